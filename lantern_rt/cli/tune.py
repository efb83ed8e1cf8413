"""The `tune` command: what to measure with, and a table of what was found."""

from __future__ import annotations

from collections.abc import Mapping
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
from ..planning.acceptance_statistics import AcceptanceStatistics, MethodStatistics, merge, read_statistics, weights_of
from ..planning.costs import HostCosts
from ..planning.tree_search import speed_by_nodes
from ..runner import subjects_of
from ..tuning.measure import Calibration, describe
from ..tuning.tune import TuneResult
from ..tuning.tune import tune as measure
from .console import print_json, print_table, say
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
    result = measure(Calibration(running.load(opened), subjects, images, temperature, say), budget, minutes)
    if acceptance_statistics is not None:
        entries = merge(result.found.entries, earlier)
        found = AcceptanceStatistics(format=2, weights=weights_of(opened.manifest), entries=entries)
        write_output(acceptance_statistics, (found.model_dump_json(indent=1) + "\n").encode(), True)
    if plot is not None:
        write_output(plot, chart_png(_charts(result)), force)
    if json:
        print_json(_report(result))
    else:
        _print_result(result)


def _earlier(path: Path, manifest: Manifest, force: bool) -> tuple[MethodStatistics, ...]:
    """Statistics of the same weights that the file holds already; any other file is replaced by force only."""
    if path.is_file():
        with suppress(LanternError):
            if earlier := read_statistics(path).fitting(manifest):
                return earlier
    check_output(path, force)
    return ()


def _print_result(result: TuneResult) -> None:
    costs, chosen = result.found.costs, result.choice
    print(result.situation)
    for name, cost in _passes(costs).items():
        print(f"{name} pass, ms by nodes: {_listed(cost, '.1f')}")
    print(
        f"outside the engines, ms: {1e3 * costs.step:.2f} a step, {1e3 * costs.level:.2f} a drafter pass, "
        f"{1e3 * costs.redraft:.2f} a token of a window"
    )
    columns = {
        "within the budget": "{method}",
        "TVD a token": "{tvd_per_token:.3f}",
        "NLL against ar": "{nll_ratio:.3f} +- {nll_error:.3f}",
        "images": "{images:d}",
        "what it gives": "{gives}",
    }
    entries = result.found.entries
    print_table(columns, [{**dict(one), "method": describe(one.method), "gives": _gives(one)} for one in entries])
    columns = {
        "compared with ar": "{method}",
        "speed-up (median)": "{speed_up:.2f}",
        "tokens a pass": "{tokens_per_forward_pass:.2f}",
        "TVD a token": "{tvd_per_token:.3f}",
    }
    print_table(columns, [dict(one.choice) for one in result.finalists])
    won = "nothing was faster than ar" if isinstance(chosen.method, Ar) else f"speed-up {chosen.speed_up:.2f}"
    print(f"chosen: {chosen.method} ({won}), kept in {result.path}")


def _passes(costs: HostCosts) -> dict[str, dict[int, float]]:
    """Milliseconds by nodes, of the engines that there are."""
    passes = {"target": costs.target, "drafter": costs.drafter or {}}
    return {name: {nodes: 1e3 * s for nodes, s in cost.items()} for name, cost in passes.items() if cost}


def _listed(numbers: Mapping[int, float], kind: str) -> str:
    return "  ".join(f"{name}: {value:{kind}}" for name, value in numbers.items())


def _gives(one: MethodStatistics) -> str:
    if one.windows:
        return f"tokens a pass by window  {_listed({each.window: each.tokens for each in one.windows}, '.2f')}"
    return f"first child accepted {one.acceptance_rates[0][0]:.2f}"


def _charts(result: TuneResult) -> list[Chart]:
    """What passes cost, and what speed-up each kind of candidate promises by nodes of a target pass."""
    costs = result.found.costs
    passes = [Line(name, list(cost.items())) for name, cost in _passes(costs).items()]
    # Every exact method, and of each the relaxed form that gives away most within the budget.
    by_tvd = sorted(result.found.entries, key=lambda one: one.tvd_per_token)
    shown = {(one.method.method, one.method.exact): one for one in by_tvd}.values()
    speeds = [Line(describe(one.method), list(speed_by_nodes(one, costs).items())) for one in shown]
    return [
        Chart(f"A pass, {result.situation}", "nodes", "milliseconds", passes, log2=True),
        Chart("Expected speed-up", "nodes of a target pass", "speed-up", speeds, log2=True),
    ]


def _report(result: TuneResult) -> dict[str, Any]:
    """The result for machines."""
    found, costs, passes = result.found, result.found.costs, _passes(result.found.costs)
    return {
        "situation": result.situation.model_dump(),
        "choice": result.choice.model_dump(),
        "target_ms": passes["target"],
        "drafter_ms": passes.get("drafter"),
        "step_ms": 1e3 * costs.step,
        "level_ms": 1e3 * costs.level,
        "redraft_ms": 1e3 * costs.redraft,
        "acceptance_statistics": [entry.model_dump() for entry in found.entries],
        "finalists": [finalist.report for finalist in result.finalists],
        "untried": [describe(method) for method in found.untried],
        "path": result.path,
    }
