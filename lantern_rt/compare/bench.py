"""Methods against plain decoding: how fast they are, where the time goes, and what they give away."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from ..bundle.manifest import Manifest
from ..engines.contracts import Progress
from ..methods import Quality
from ..pipeline import Pipeline
from .prompts import Prompts
from .turns import ComparedMethod, Run, run_in_turns

MIN_TURNS = 3


def default_methods(manifest: Manifest) -> list[str]:
    """Method strings of all that a bundle can run."""
    methods = ["ar", "sjd", "rows"]
    if manifest.drafters:
        methods += ["eagle:tree=dynamic-8-4-2", "eagle:tree=chain-3"]
        methods += ["lantern", "lantern++"] if manifest.neighbors else []
    return methods


def bench(
    pipeline: Pipeline,
    methods: Sequence[ComparedMethod],
    prompts: Prompts,
    batch_size: int,
    min_images: int,
    progress: Progress,
) -> list[list[Run]]:
    """Run all methods in turns, after one turn that is not counted.

    Args:
        pipeline: that runs them.
        methods: plain decoding first.
        prompts: to draw.
        batch_size: number of images per forward pass.
        min_images: minimum number of images per method; there are three turns in any case.
        progress: progress callback.

    Returns:
        Runs by method and turn.
    """
    turns = max(MIN_TURNS, -(-min_images // batch_size))
    requests = (prompts.request(max(turn, 0), batch_size) for turn in range(-1, turns))
    by_turn = [
        [replace(one, images=[]) for one in runs]  # pictures were painted for the time it takes
        for runs in run_in_turns(pipeline, methods, requests, progress=progress, total=(turns + 1) * batch_size)
    ]
    return [list(runs) for runs in zip(*by_turn[1:], strict=True)]


def summarize(runs: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    """A method's runs beside those of plain decoding, ready for JSON; times and shares are of whole calls.

    The speed-up is the median of the ratios of turns, as both runs of a turn met the same moment of the host.
    """
    stats = [one.statistics for one in runs]
    total = sum(one.seconds for one in runs)
    method = runs[0].settings.method
    images_per_second = len(runs[0].codes) / statistics.median(one.seconds for one in runs)
    speed_ups = [ar.seconds / one.seconds for one, ar in zip(runs, plain, strict=True)]
    nats = [score.nats for one in runs for score in one.likelihoods]
    plain_nats = [score.nats for one in plain for score in one.likelihoods]
    ratio, error = paired_ratio(nats, plain_nats)
    share = {
        "target": sum(one.target_seconds for one in stats) / total,
        "drafter": sum(one.drafter_seconds for one in stats) / total,
        "host": sum(one.host_seconds for one in stats) / total,
    }
    return {
        "method": runs[0].method.label,
        "settings": runs[0].settings.as_dict(),
        "exact": method.exact,
        "images_per_second": images_per_second,
        "tokens_per_second": images_per_second * len(runs[0].codes[0]),
        "speed_up": statistics.median(speed_ups),
        "speed_ups": speed_ups,
        "tokens_per_forward_pass": statistics.mean(one.tokens_per_forward_pass for one in stats),
        "drafter_passes_per_target_pass": sum(s.drafter_passes for s in stats) / sum(s.target_passes for s in stats),
        "share": share | {"text_and_images": 1 - sum(share.values())},
        "tvd_per_token": statistics.mean(one.tvd_per_token for one in runs) if method.measured else None,
        "nll_per_token": statistics.mean(nats),
        "nll_ratio": ratio,
        "nll_error": error,
    }


def fastest(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a line that names the fastest exact method of a report's rows, and how to ask for it."""
    best = max((row for row in rows if row["exact"]), key=lambda row: row["speed_up"])
    label = best["method"]
    option = "quality" if label in get_args(Quality) else "method"
    return f"fastest exact method: {label} ({best['speed_up']:.2f}); ask for it with --{option} {label}"


def paired_ratio(scores: Sequence[float], plain: Sequence[float]) -> tuple[float, float]:
    """Ratio of the sums over the same two or more images, and its standard error."""
    ratio = sum(scores) / sum(plain)
    spread = statistics.stdev(own - ratio * other for own, other in zip(scores, plain, strict=True))
    return ratio, spread * len(plain) ** 0.5 / sum(plain)
