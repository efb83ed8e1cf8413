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
from ..planning.acceptance_statistics import AcceptanceStatistics, MethodStatistics, merge, read_statistics, weights_of
from ..planning.costs import PassCost
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
    sampling = {} if temperature is None else {"temperature": temperature}
    result = measure(Calibration(running.load(opened), subjects, images, sampling), budget, minutes, say)
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
    situation, costs, chosen = result.situation, result.found.costs, result.choice
    print(f"{situation.backend}, threads {situation.threads}, images at a time {situation.images}, {situation.quality}")
    passes = {"target": costs.target, "drafter": costs.drafter or {}}
    print_table(
        ["ms by nodes of a pass", *map(str, costs.target)],
        [[name, *(f"{ms:.1f}" for ms in _ms(cost).values())] for name, cost in passes.items() if cost],
    )
    print(
        f"ms outside the engines: {1e3 * costs.step:.2f} a step, {1e3 * costs.level:.2f} a drafter pass, "
        f"{1e3 * costs.redraft:.2f} a token of a window"
    )
    print_table(
        ["within the budget", "TVD a token", "NLL against ar", "images", "what it gives"],
        [
            [
                describe(one.method),
                f"{one.tvd_per_token:.3f}",
                f"{one.nll_ratio:.3f} +- {one.nll_error:.3f}",
                f"{one.images}",
                "tokens a pass by window  " + "  ".join(f"{each.window}: {each.tokens:.2f}" for each in one.windows)
                if one.windows
                else f"first child accepted {one.acceptance_rates[0][0]:.2f}",
            ]
            for one in result.found.entries
        ],
    )
    print_table(
        ["compared with ar", "speed-up (median)", "tokens a pass", "TVD a token"],
        [
            [
                str(one.method),
                f"{one.speed_up:.2f}",
                f"{statistics.mean(one.tokens_per_forward_pass):.2f}",
                f"{one.quality.tvd_per_token:.3f}",
            ]
            for one in result.finalists
        ],
    )
    won = "nothing was faster than ar" if isinstance(chosen.method, Ar) else f"speed-up {chosen.speed_up:.2f}"
    print(f"chosen: {chosen.method} ({won}), kept in {result.path}")


def _charts(result: TuneResult) -> list[Chart]:
    """What passes cost, and what speed-up each kind of candidate promises by nodes of a target pass."""
    costs, threads, images = result.found.costs, result.situation.threads, result.situation.images
    passes = {"target": costs.target, "drafter": costs.drafter or {}}
    where = f"{threads} thread{'s' * (threads > 1)}, {images} image{'s' * (images > 1)} at a time"
    # Every exact method, and of each the relaxed form that gives away most within the budget.
    by_tvd = sorted(result.found.entries, key=lambda one: one.tvd_per_token)
    shown = {(one.method.method, one.method.exact): one for one in by_tvd}.values()
    speeds = [Line(describe(one.method), list(speed_by_nodes(one, costs).items())) for one in shown]
    costly = [Line(name, list(_ms(cost).items())) for name, cost in passes.items() if cost]
    return [
        Chart(f"A pass, {where}", "nodes", "milliseconds", costly, log2=True),
        Chart("Expected speed-up", "nodes of a target pass", "speed-up", speeds, log2=True),
    ]


def _report(result: TuneResult) -> dict[str, Any]:
    """The result for machines."""
    found, costs = result.found, result.found.costs
    return {
        "situation": result.situation.model_dump(),
        "choice": result.choice.model_dump(),
        "target_ms": _ms(costs.target),
        "drafter_ms": None if costs.drafter is None else _ms(costs.drafter),
        "step_ms": 1e3 * costs.step,
        "level_ms": 1e3 * costs.level,
        "redraft_ms": 1e3 * costs.redraft,
        "acceptance_statistics": [entry.model_dump() for entry in found.entries],
        "finalists": [finalist.model_dump() for finalist in result.finalists],
        "untried": [describe(method) for method in found.untried],
        "path": result.path,
    }


def _ms(cost: PassCost) -> dict[int, float]:
    return {nodes: 1e3 * seconds for nodes, seconds in cost.items()}
