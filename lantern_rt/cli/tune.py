"""The `tune` command: what to measure with, progress, and a table of what was found.

Does not know option parsing, nor how measuring and choosing work.
"""

from __future__ import annotations

import json
import statistics
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bundle.files import Bundle
from ..bundle.manifest import Manifest
from ..errors import LanternError, RequestError
from ..output.charts import Chart, Line, chart_png
from ..output.files import check_output, check_png, write_output
from ..planning.candidates import Measured, parse_budget
from ..planning.costs import PassCost
from ..planning.rates_file import Rates, RatesEntry, as_entries, merge, read_rates, weights_of
from ..planning.tree_search import speed_by_nodes
from ..requests import Options
from ..text.prompt_files import read_prompts
from ..tuning.measure import Calibration
from ..tuning.tune import Finalist, TuneResult, tune
from .running import Running

_MOST_MINUTES = 24 * 60.0
_CLASSES = 64  # class ids to measure with, spread over all


@dataclass(frozen=True)
class Tune:
    """What the user asked `tune` for."""

    bundle: str
    minutes: float
    quality: str
    images: int
    prompts: Path | None
    temperature: float | None
    running: Running
    rates: Path | None
    plot: Path | None
    json: bool
    force: bool


def tune_command(asked: Tune) -> None:
    """Measure, store, and print what was found."""
    if not 0 < asked.minutes <= _MOST_MINUTES:
        raise RequestError(f"minutes: found {asked.minutes:g}, expected a number above 0, up to {_MOST_MINUTES:g}")
    if not 1 <= asked.images <= 64:
        raise RequestError(f"images: found {asked.images}, expected a whole number 1 .. 64")
    budget = parse_budget(asked.quality)
    bundle = asked.running.open_bundle(asked.bundle)
    calibration = calibration_of(bundle, asked.prompts, asked.images)
    earlier = () if asked.rates is None else _earlier_rates(asked.rates, bundle.manifest, asked.force)
    if asked.plot is not None:
        check_png(asked.plot, asked.force)
    sampling = Options() if asked.temperature is None else Options(temperature=asked.temperature)
    pipeline = asked.running.load(bundle)
    result = tune(pipeline, calibration, budget, asked.minutes, sampling, lambda line: print(line, file=sys.stderr))
    if asked.rates is not None:
        _write_rates(asked.rates, bundle.manifest, result, earlier)
    if asked.plot is not None:
        write_output(asked.plot, chart_png(_charts(result)), asked.force)
    if asked.json:
        print(json.dumps(_report(result), allow_nan=False))
    else:
        print("\n".join(_lines(result)))


def calibration_of(bundle: Bundle, prompts: Path | None, images: int) -> Calibration:
    """Prompts of a file or of the bundle, or class ids; `images` are drawn together."""
    condition = bundle.manifest.condition
    if condition.kind == "embeddings":
        raise RequestError(
            f"bundle {bundle.manifest.name} takes text embeddings; export it with --text-encoder to give prompts"
        )
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


def _earlier_rates(path: Path, manifest: Manifest, force: bool) -> tuple[RatesEntry, ...]:
    """Rates of the same weights that the file holds already; any other file is replaced by force only."""
    if path.is_file():
        with suppress(LanternError):
            if earlier := read_rates(path).fitting(manifest):
                return earlier
    check_output(path, force)
    return ()


def _write_rates(path: Path, manifest: Manifest, result: TuneResult, earlier: tuple[RatesEntry, ...]) -> None:
    entries = merge(as_entries(result.measured, result.situation.greedy), earlier)
    rates = Rates(format=1, weights=weights_of(manifest), entries=entries)
    write_output(path, (rates.model_dump_json(indent=1, exclude_none=True) + "\n").encode(), True)


def _lines(result: TuneResult) -> list[str]:
    """The result as text."""
    situation, costs = result.situation, result.costs
    lines = [
        f"{situation.backend}, threads {situation.threads}, images at a time {situation.images}, {situation.quality}",
        f"target pass, ms by nodes   {_curve(costs.target)}",
    ]
    if costs.drafter is not None:
        lines.append(f"drafter pass, ms by nodes  {_curve(costs.drafter)}")
    lines.append(
        f"outside the engines, ms    {1e3 * costs.step:.2f} a step, {1e3 * costs.level:.2f} a drafter pass, "
        f"{1e3 * costs.redraft:.2f} a code of a window"
    )
    lines.append(f"{'within the budget':58}  TVD a code  NLL against ar     images  what it gives")
    for one in result.measured:
        lines.append(
            f"  {one.candidate.label:56}  {one.tvd_per_code:10.3f}  {one.nll_ratio:6.3f} +- {one.nll_error:5.3f}  "
            f"{one.images:6}  {_gives(one)}"
        )
    lines.append(f"{'compared with ar':58}  x ar (median)  codes a pass  TVD a code  drafts")
    for finalist in result.finalists:
        lines.append(
            f"  {finalist.label:56}  {finalist.speed:13.2f}  {statistics.mean(finalist.tokens):12.2f}  "
            f"{statistics.mean(finalist.tvd):10.3f}  {finalist.plan.name}"
        )
    chosen = result.choice
    won = "nothing was faster than ar" if chosen.method == "ar" else f"{chosen.speed_against_ar:.2f} x ar"
    lines.append(f"chosen: {chosen.method} ({won}), kept in {result.path}")
    return lines


def _charts(result: TuneResult) -> list[Chart]:
    """What passes cost, and what speed-up each kind of candidate promises by nodes of a target pass."""
    costs, situation = result.costs, result.situation
    engines = {"target": costs.target, "drafter": costs.drafter}
    passes = [
        Line(name, [(nodes, 1e3 * seconds) for nodes, seconds in zip(cost.nodes, cost.seconds, strict=True)])
        for name, cost in engines.items()
        if cost is not None
    ]
    threads, images = situation.threads, situation.images
    where = f"{threads} thread{'s' * (threads > 1)}, {images} image{'s' * (images > 1)} at a time"
    speeds = []
    for one in _boldest(result.measured):
        by_nodes = speed_by_nodes(one.rates, one.windows, costs)
        speeds.append(Line(one.candidate.label, list(by_nodes.items())))
    return [
        Chart(f"A pass, {where}", "nodes", "milliseconds", passes, powers=True),
        Chart("Expected speed", "nodes of a target pass", "x ar", speeds, powers=True),
    ]


def _boldest(measured: list[Measured]) -> list[Measured]:
    """Every exact candidate, and of each method the relaxed one that gives away most within the budget."""
    exact = [one for one in measured if one.candidate.exact]
    bold: dict[str, Measured] = {}
    for one in sorted(measured, key=lambda one: one.tvd_per_code):
        if not one.candidate.exact:
            bold[one.candidate.method] = one
    return [*exact, *bold.values()]


def _curve(cost: PassCost) -> str:
    return "  ".join(f"{n}: {1e3 * s:.1f}" for n, s in zip(cost.nodes, cost.seconds, strict=True))


def _gives(one: Measured) -> str:
    """Codes per pass by window, or how often a first child is accepted."""
    if one.windows:
        return "codes a pass by window  " + "  ".join(f"{w}: {codes:.2f}" for w, codes in sorted(one.windows.items()))
    return f"first child accepted {one.rates[0, 0]:.2f}"


def _report(result: TuneResult) -> dict[str, Any]:
    """The result for machines."""
    costs = result.costs
    return {
        "situation": result.situation.model_dump(),
        "choice": result.choice.model_dump(),
        "target_ms": _by_nodes(costs.target),
        "drafter_ms": None if costs.drafter is None else _by_nodes(costs.drafter),
        "step_ms": 1e3 * costs.step,
        "level_ms": 1e3 * costs.level,
        "redraft_ms": 1e3 * costs.redraft,
        "measured": [entry.model_dump() for entry in as_entries(result.measured, result.situation.greedy)],
        "finalists": [_finalist(finalist) for finalist in result.finalists],
        "untried": [candidate.label for candidate in result.untried],
        "path": result.path,
    }


def _finalist(finalist: Finalist) -> dict[str, Any]:
    return {
        "candidate": finalist.label,
        "drafts": finalist.plan.name,
        "predicted_codes_per_pass": finalist.plan.codes,
        "predicted_seconds_per_step": finalist.plan.seconds,
        "speeds_against_ar": finalist.speeds,
        "tokens_per_target_pass": finalist.tokens,
        "tvd_per_code": finalist.tvd,
        "nll_per_code": [score.nats for score in finalist.scores],
        "entropy_per_code": [score.entropy for score in finalist.scores],
    }


def _by_nodes(cost: PassCost) -> dict[int, float]:
    return {nodes: 1e3 * seconds for nodes, seconds in zip(cost.nodes, cost.seconds, strict=True)}
