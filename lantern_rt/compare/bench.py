"""Benchmarks of decoding methods against plain decoding: speed, shares of time, and deviation from the target."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np

from ..bundle.manifest import Manifest
from ..completion import list_supported_methods
from ..engines.contracts import Progress
from ..methods import Quality
from ..pipeline import Pipeline
from .prompts import Prompts
from .statistics import estimate_interval, estimate_mean
from .turns import ComparedMethod, MethodRun, run_methods_in_turns, tokens_per_pass

MIN_TURNS = 3
METHODS = ("ar", "sjd", "rows", "eagle:tree=dynamic-8-4-2", "eagle:tree=chain-3", "lantern", "lantern++")


def list_default_methods(manifest: Manifest) -> list[str]:
    return list_supported_methods(manifest, METHODS)


def run_bench(
    pipeline: Pipeline,
    methods: Sequence[ComparedMethod],
    prompts: Prompts,
    batch_size: int,
    min_images: int,
    progress: Progress,
    first_seed: int,
) -> list[list[MethodRun]]:
    """Run methods in turns after a warm-up turn, plain decoding first; return the runs of each, one per turn."""
    turns = max(MIN_TURNS, -(-min_images // batch_size))
    requests = (prompts.request(max(turn, 0), batch_size, first_seed) for turn in range(-1, turns))
    by_turn = [
        [replace(run, images=[]) for run in runs]  # Images are only decoded so that the time includes it.
        for runs in run_methods_in_turns(
            pipeline, methods, requests, progress=progress, total_images=(turns + 1) * batch_size
        )
    ]
    return [list(runs) for runs in zip(*by_turn[1:], strict=True)]


def summarize_runs(runs: Sequence[MethodRun], baseline_runs: Sequence[MethodRun]) -> dict[str, Any]:
    """Summarize the runs of a method relative to those of plain decoding in the same turns, as a JSON object.

    The speed-up is the median of the speed-ups of all turns, because the two runs of a turn share the load of the host.
    Its interval comes from resampled turns. Times and shares refer to whole pipeline calls.
    """
    stats = [run.statistics for run in runs]
    total = sum(run.seconds for run in runs)
    method = runs[0].settings.method
    images_per_second = len(runs[0].codes) / statistics.median(run.seconds for run in runs)
    speed_ups = np.array([ar.seconds / run.seconds for run, ar in zip(runs, baseline_runs, strict=True)])
    (speed_up,) = estimate_interval(lambda turns: [float(np.median(speed_ups[turns]))], len(runs))
    nats = [score.nats for run in runs for score in run.likelihoods]
    plain_nats = [score.nats for run in baseline_runs for score in run.likelihoods]
    ratio, error = estimate_paired_ratio(nats, plain_nats)
    (passes,) = estimate_mean([tokens_per_pass(runs)], num_seeds=1)
    share = {
        "target": sum(entry.target_seconds for entry in stats) / total,
        "drafter": sum(entry.drafter_seconds for entry in stats) / total,
        "host": sum(entry.host_seconds for entry in stats) / total,
    }
    return {
        "method": runs[0].method.label,
        "settings": runs[0].settings.as_dict(),
        "exact": method.exact,
        "images_per_second": images_per_second,
        "tokens_per_second": images_per_second * len(runs[0].codes[0]),
        "speed_up": speed_up["value"],
        "speed_up_interval": {"low": speed_up["low"], "high": speed_up["high"]},
        "speed_ups": speed_ups.tolist(),
        "tokens_per_forward_pass": statistics.mean(entry.tokens_per_forward_pass for entry in stats),
        "tokens_per_forward_pass_interval": {"low": passes["low"], "high": passes["high"]},
        "drafter_passes_per_target_pass": sum(s.drafter_passes for s in stats) / sum(s.target_passes for s in stats),
        "share": share | {"text_and_images": 1 - sum(share.values())},
        "tvd_per_token": statistics.mean(run.tvd_per_token for run in runs) if method.measures_tvd else None,
        "nll_per_token": statistics.mean(nats),
        "nll_ratio": ratio,
        "nll_error": error,
    }


def describe_fastest_method(report_rows: Sequence[Mapping[str, Any]]) -> str:
    best, *others = sorted((row for row in report_rows if row["exact"]), key=lambda row: -row["speed_up"])
    label = best["method"]
    reached = [row["method"] for row in others if row["speed_up_interval"]["high"] >= best["speed_up_interval"]["low"]]
    if reached:
        return f"no exact method is certainly the fastest: {', '.join([label, *reached])}; a larger --count tells more"
    option = "quality" if label in get_args(Quality) else "method"
    return f"fastest exact method: {label} ({best['speed_up']:.2f}); select it with --{option} {label}"


def estimate_paired_ratio(scores: Sequence[float], baseline_scores: Sequence[float]) -> tuple[float, float]:
    """Return the ratio of the summed scores of a method and of plain decoding on the same images, and its error."""
    ratio = sum(scores) / sum(baseline_scores)
    spread = statistics.stdev(
        score - ratio * reference for score, reference in zip(scores, baseline_scores, strict=True)
    )
    return ratio, spread * len(baseline_scores) ** 0.5 / sum(baseline_scores)
