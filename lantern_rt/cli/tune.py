"""The `tune` command: what to measure with, and a table of what was found."""

from __future__ import annotations

import statistics
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from ..bundle.manifest import Manifest
from ..checks import explain, require_library, whole
from ..errors import LanternError, RequestError
from ..methods import Ar, Auto
from ..output.charts import Chart, Line, chart_png
from ..output.files import check_output, check_png, write_output
from ..planning.acceptance_statistics import (
    AcceptanceStatistics,
    MethodStatistics,
    merge,
    read_statistics,
    weights_of,
)
from ..planning.costs import PassCost
from ..planning.tree_search import speed_by_nodes
from ..runner import subjects_of
from ..tuning.measure import Calibration, describe
from ..tuning.tune import Finalist, TuneResult
from ..tuning.tune import tune as measure
from .console import print_json, say
from .options import BundleName, Force, Json, Prompts, Running

EXAMPLES = """
lantern-rt tune scenes
lantern-rt tune scenes --quality strict --minutes 2
lantern-rt tune bundles/llamagen-b --images 8 --quality TVD=0.1 --json
"""
_MOST_MINUTES = 24 * 60.0


def tune(
    bundle: BundleName,
    minutes: Annotated[float, typer.Option(help="How long to measure, about.")] = 5,
    quality: Annotated[
        str, typer.Option(help="What may be given away: strict (nothing), balanced, fast, or TVD=x per token.")
    ] = "balanced",
    images: Annotated[int, typer.Option(help="Images decoded together, as in later use.")] = 1,
    *,
    running: Running,
    prompts: Prompts = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. [default: the bundle's]")] = None,
    acceptance_statistics: Annotated[
        Path | None,
        typer.Option(help="Also write the statistics found, for a bundle to bring along; adds to those found before."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw costs of passes and expected speed by size of a draft, a .png file.")
    ] = None,
    json: Json = False,
    force: Force = False,
) -> None:
    """Measure what is fastest here for a bundle, and keep it for method auto. Best with nothing else running."""
    if not 0 < minutes <= _MOST_MINUTES:
        raise RequestError(f"minutes: found {minutes:g}, expected a number above 0, up to {_MOST_MINUTES:g}")
    whole("images", images, 1, 1, 64)
    try:
        budget = Auto(quality=quality)
    except ValidationError as error:
        raise RequestError(": ".join(explain(error))) from error
    opened = running.open_bundle(bundle)
    subjects = subjects_of(opened, prompts)
    earlier = () if acceptance_statistics is None else _earlier(acceptance_statistics, opened.manifest, force)
    if plot is not None:
        require_library("matplotlib", "plot", "plot")
        check_png(plot, force)
    sampling = {} if temperature is None else {"temperature": temperature}
    result = measure(Calibration(running.load(opened), subjects, images, sampling), budget, minutes, say)
    if acceptance_statistics is not None:
        entries = merge(result.entries, earlier)
        found = AcceptanceStatistics(format=2, weights=weights_of(opened.manifest), entries=entries)
        write_output(acceptance_statistics, (found.model_dump_json(indent=1) + "\n").encode(), True)
    if plot is not None:
        write_output(plot, chart_png(_charts(result)), force)
    if json:
        print_json(_report(result))
    else:
        print("\n".join(_lines(result)))


def _earlier(path: Path, manifest: Manifest, force: bool) -> tuple[MethodStatistics, ...]:
    """Statistics of the same weights that the file holds already; any other file is replaced by force only."""
    if path.is_file():
        with suppress(LanternError):
            if earlier := read_statistics(path).fitting(manifest):
                return earlier
    check_output(path, force)
    return ()


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
        f"{1e3 * costs.redraft:.2f} a token of a window"
    )
    lines.append(f"{'within the budget':58}  TVD a token  NLL against ar     images  what it gives")
    for one in result.entries:
        lines.append(
            f"  {describe(one.method):56}  {one.tvd_per_token:11.3f}  {one.nll_ratio:6.3f} +- {one.nll_error:5.3f}  "
            f"{one.images:6}  {_gives(one)}"
        )
    lines.append(f"{'compared with ar':58}  speed-up (median)  tokens a pass  TVD a token")
    for finalist in result.finalists:
        tokens, tvd = map(statistics.mean, (finalist.tokens_per_forward_pass, finalist.tvd_per_token))
        lines.append(f"  {finalist.method!s:56}  {finalist.speed_up:17.2f}  {tokens:13.2f}  {tvd:11.3f}")
    chosen = result.choice
    won = "nothing was faster than ar" if isinstance(chosen.method, Ar) else f"speed-up {chosen.speed_up:.2f}"
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
    for one in _boldest(result.entries):
        by_nodes = speed_by_nodes(one.rates(), one.window_tokens(), costs)
        speeds.append(Line(describe(one.method), list(by_nodes.items())))
    return [
        Chart(f"A pass, {where}", "nodes", "milliseconds", passes, log2=True),
        Chart("Expected speed-up", "nodes of a target pass", "speed-up", speeds, log2=True),
    ]


def _boldest(entries: list[MethodStatistics]) -> list[MethodStatistics]:
    """Every exact method, and of each the relaxed form that gives away most within the budget."""
    exact = [one for one in entries if one.method.exact]
    relaxed = [one for one in sorted(entries, key=lambda one: one.tvd_per_token) if not one.method.exact]
    return [*exact, *{one.method.method: one for one in relaxed}.values()]


def _curve(cost: PassCost) -> str:
    return "  ".join(f"{n}: {1e3 * s:.1f}" for n, s in zip(cost.nodes, cost.seconds, strict=True))


def _gives(one: MethodStatistics) -> str:
    """Tokens a pass by window, or how often a first child is accepted."""
    if one.windows:
        return "tokens a pass by window  " + "  ".join(f"{each.window}: {each.tokens:.2f}" for each in one.windows)
    return f"first child accepted {one.acceptance_rates[0][0]:.2f}"


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
        "acceptance_statistics": [entry.model_dump() for entry in result.entries],
        "finalists": [_finalist(finalist) for finalist in result.finalists],
        "untried": [describe(method) for method in result.untried],
        "path": result.path,
    }


def _finalist(finalist: Finalist) -> dict[str, Any]:
    return {
        "method": finalist.method.model_dump(),
        "predicted_tokens_per_forward_pass": finalist.plan.tokens,
        "predicted_seconds_per_step": finalist.plan.seconds,
        "speed_ups": finalist.speed_ups,
        "tokens_per_forward_pass": finalist.tokens_per_forward_pass,
        "tvd_per_token": finalist.tvd_per_token,
        "nll_per_token": [score.nats for score in finalist.scores],
        "entropy_per_token": [score.entropy for score in finalist.scores],
    }


def _by_nodes(cost: PassCost) -> dict[int, float]:
    return {nodes: 1e3 * seconds for nodes, seconds in zip(cost.nodes, cost.seconds, strict=True)}
