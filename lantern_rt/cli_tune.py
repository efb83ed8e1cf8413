"""The `tune` command: what to measure with, progress, and a table of what was found.

Does not know option parsing, nor how measuring and choosing work.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .bundle import Bundle, open_bundle
from .errors import RequestError
from .outputs import check_output, write_output
from .pipeline import Pipeline
from .prompt_files import read_prompts
from .requests import Options
from .runtime.published_trees import tree_name
from .tuning.auto import as_rates
from .tuning.candidates import parse_budget
from .tuning.tune import Calibration, Finalist, TuneResult, tune

_MOST_MINUTES = 24 * 60.0
_CLASSES = 64  # class ids to measure with, spread over all


@dataclass(frozen=True)
class Tune:
    """What the user asked `tune` for."""

    bundle: str
    minutes: float
    quality: str
    images: int
    threads: int | None
    prompts: Path | None
    temperature: float | None
    rates: Path | None
    json: bool
    force: bool


def tune_command(asked: Tune) -> None:
    """Measure, store, and print what was found."""
    if not 0 < asked.minutes <= _MOST_MINUTES:
        raise RequestError(f"minutes: found {asked.minutes:g}, expected a number above 0, up to {_MOST_MINUTES:g}")
    if not 1 <= asked.images <= 64:
        raise RequestError(f"images: found {asked.images}, expected a whole number 1 .. 64")
    budget = parse_budget(asked.quality)
    bundle = open_bundle(asked.bundle)
    calibration = _calibration(bundle, asked.prompts, asked.images)
    if asked.rates is not None:
        check_output(asked.rates, asked.force)
    sampling = Options() if asked.temperature is None else Options(temperature=asked.temperature)
    pipeline = Pipeline.from_bundle(bundle, asked.threads)
    result = tune(pipeline, calibration, budget, asked.minutes, sampling, lambda line: print(line, file=sys.stderr))
    if asked.rates is not None:
        rates = as_rates(result.measured, result.situation.greedy, result.images)
        write_output(asked.rates, (rates.model_dump_json(indent=1) + "\n").encode(), asked.force)
    if asked.json:
        print(json.dumps(_report(result), allow_nan=False))
    else:
        print("\n".join(_lines(result)))


def _calibration(bundle: Bundle, prompts: Path | None, images: int) -> Calibration:
    """Prompts of a file or of the bundle, or class ids."""
    condition = bundle.manifest.condition
    if condition.kind == "class":
        if prompts is not None:
            raise RequestError(f"prompts: bundle {bundle.manifest.name} takes class ids; leave --prompts out")
        classes = condition.classes or 1
        return Calibration(None, [i * classes // _CLASSES % classes for i in range(_CLASSES)], images)
    path = prompts
    if path is None and "prompts" in bundle.manifest.files:
        path = bundle.path("prompts")
    if path is None:
        raise RequestError(f"bundle {bundle.manifest.name} has no prompts to measure with; give --prompts FILE")
    return Calibration(read_prompts(path), None, images)


def _lines(result: TuneResult) -> list[str]:
    """The result as text."""
    situation, costs = result.situation, result.costs
    curve = "  ".join(f"{n}: {1e3 * s:.1f}" for n, s in zip(costs.target.nodes, costs.target.seconds, strict=True))
    lines = [
        f"{situation.backend}, {situation.threads} threads, {situation.images} images at a time, {situation.quality}",
        f"target pass, ms by nodes   {curve}",
        f"drafter pass {1e3 * costs.drafter.at(2):.1f} ms; outside the engines {1e3 * costs.step:.1f} ms a step "
        f"and {1e3 * costs.level:.1f} ms a drafter pass",
        "within the budget          first child  TVD a code  NLL against ar",
    ]
    for one in result.measured:
        lines.append(
            f"  {one.candidate.label:34} {one.rates[0, 0]:.2f}  {one.tvd_per_code:10.3f}  "
            f"{one.nll_ratio:8.3f} +- {one.nll_error:.3f}"
        )
    lines.append("compared with ar           x ar (median)  codes a pass  tree")
    for finalist in result.finalists:
        lines.append(
            f"  {finalist.measured.candidate.label:34} {statistics.median(finalist.speeds):.2f}  "
            f"{statistics.mean(finalist.tokens):10.2f}  {tree_name(finalist.plan.paths)}"
        )
    chosen = result.choice
    won = "nothing was faster than ar" if chosen.method == "ar" else f"{chosen.speed_against_ar:.2f} x ar"
    lines.append(f"chosen: {chosen.method} ({won}), kept in {result.path}")
    return lines


def _report(result: TuneResult) -> dict[str, Any]:
    """The result for machines."""
    return {
        "situation": result.situation.model_dump(),
        "choice": result.choice.model_dump(),
        "target_ms": dict(zip(result.costs.target.nodes, _ms(result.costs.target.seconds), strict=True)),
        "drafter_ms": dict(zip(result.costs.drafter.nodes, _ms(result.costs.drafter.seconds), strict=True)),
        "step_ms": 1e3 * result.costs.step,
        "level_ms": 1e3 * result.costs.level,
        "finalists": [_finalist(finalist) for finalist in result.finalists],
        "path": result.path,
    }


def _finalist(finalist: Finalist) -> dict[str, Any]:
    return {
        "candidate": finalist.measured.candidate.label,
        "tree": tree_name(finalist.plan.paths),
        "predicted_codes_per_pass": finalist.plan.codes,
        "predicted_seconds_per_step": finalist.plan.seconds,
        "speeds_against_ar": finalist.speeds,
        "tokens_per_target_pass": finalist.tokens,
    }


def _ms(seconds: tuple[float, ...]) -> list[float]:
    return [1e3 * one for one in seconds]
