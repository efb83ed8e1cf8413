"""Methods against plain decoding: speed, where the time goes, and what they give away.

A method's speed is the median over turns, of whole calls, text and images included.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..bundle.manifest import Manifest
from ..engines.host import read_bandwidth
from ..engines.memory import weight_bytes
from ..pipeline import Pipeline
from .turns import Contender, Run, Subjects, take_turns

Show = Callable[[str, int, int], None]  # what is being done, how much of it is done, of how much

FEWEST_TURNS = 3
_DYNAMIC, _STATIC = "dynamic-8-4-2", "chain-3"  # trees where the bundle has none of the kind


def figures(runs: Sequence[Run], plain: Sequence[Run], memory_bound: float | None) -> dict[str, Any]:
    """What a method's runs say beside those of plain decoding, ready for JSON; times and shares are of whole calls.

    memory_bound: seconds that reading the target's weights once takes, or None.
    """
    stats = [one.statistics for one in runs]
    total = sum(one.seconds for one in runs)
    passes = sum(one.target_passes for one in stats)
    images_per_second = len(runs[0].codes) / statistics.median(one.seconds for one in runs)
    speed_ups = [ar.seconds / one.seconds for one, ar in zip(runs, plain, strict=True)]
    nats = [score.nats for one in runs for score in one.likelihoods]
    ratio, error = paired_ratio(nats, [score.nats for one in plain for score in one.likelihoods])
    tvd = statistics.fmean(one.tvd_per_token for one in runs)  # runs are of equally many images
    share = {
        name: sum(getattr(one, f"{name}_seconds") for one in stats) / total for name in ("target", "drafter", "host")
    }
    return {
        "label": runs[0].contender.label,
        "settings": runs[0].settings.as_dict(),
        "choice": runs[0].settings.choice,
        "images_per_second": images_per_second,
        "tokens_per_second": images_per_second * len(runs[0].codes[0]),
        "speed_up": statistics.median(speed_ups),
        "speed_ups": speed_ups,
        "tokens_per_forward_pass": statistics.mean(one.tokens_per_forward_pass for one in stats),
        "drafter_passes_per_target_pass": sum(one.drafter_passes for one in stats) / passes,
        "share": share | {"text_and_images": 1 - sum(share.values())},
        "share_of_memory_bound": None if memory_bound is None else passes * memory_bound / total,
        "tvd_per_token": tvd if runs[0].settings.method.measured else None,
        "nll_per_token": statistics.mean(nats),
        "nll_ratio": ratio,
        "nll_error": error,
    }


def usual_methods(manifest: Manifest, qualities: Sequence[str], sweep: bool) -> str:
    """Methods that the bundle can run, as method strings joined by commas; sweep: several bounds of each."""
    methods = ["ar", "sjd", "rows"]
    table = manifest.neighbors > 0
    if sweep:
        methods += ["rows:window=4", "rows:window=3"]
        methods += ["sjd:lambda=1.5", "sjd:lambda=2", "sjd:lambda=3"] if table else []
    if manifest.drafter is not None:
        own = next((one.parameters()["tree"] for one in manifest.decoding.methods if one.method == "eagle"), _STATIC)
        dynamic = own if own.startswith("dynamic") else _DYNAMIC
        static = _STATIC if own.startswith("dynamic") else own
        methods += [f"eagle:tree={dynamic}", f"eagle:tree={static}"]
        methods += ["lantern", "lantern++"] if table else []
        if sweep and table:
            methods += [f"lantern:delta={bound}:tree={dynamic}" for bound in (0.01, 0.05, 0.2)]
            methods += [f"lantern++:lambda={bound}:tree={static}" for bound in (1.5, 2, 4)]
    return ",".join([*methods, *(f"auto:quality={quality}" for quality in qualities)])


def bench(
    pipeline: Pipeline, contenders: Sequence[Contender], subjects: Subjects, batch: int, images: int, show: Show
) -> list[list[Run]]:
    """Runs by method and turn: all methods on at least `images` images each, `batch` at a time."""
    turns = max(FEWEST_TURNS, -(-images // batch))
    for number, contender in enumerate(contenders):
        show("warming up", number, len(contenders))
        pipeline(**subjects.request(0, batch), **contender.options)
    show("warming up", len(contenders), len(contenders))
    show("turns", 0, turns)
    found = []
    for runs in take_turns(pipeline, contenders, (subjects.request(turn, batch) for turn in range(turns))):
        found.append([replace(one, images=[]) for one in runs])  # images were painted for the time it takes
        show("turns", len(found), turns)
    return [list(runs) for runs in zip(*found, strict=True)]


def memory_bound(pipeline: Pipeline) -> float | None:
    """Seconds that reading the target's weights once takes; None where they do not lie in this host's memory."""
    situation = pipeline.situation(1, None, "")
    if situation.backend != "onnxruntime-cpu":
        return None
    size = weight_bytes(pipeline.bundle, "target")
    return size / read_bandwidth(size, situation.threads)


def paired_ratio(scores: Sequence[float], plain: Sequence[float]) -> tuple[float, float]:
    """Ratio of the sums over the same two or more images, and its standard error."""
    ratio = sum(scores) / sum(plain)
    spread = statistics.stdev(own - ratio * other for own, other in zip(scores, plain, strict=True))
    return ratio, spread * len(plain) ** 0.5 / sum(plain)
