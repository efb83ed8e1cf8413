"""The `tune` command: what to measure with, and a table of what was found."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from ..bundle.files import open_bundle
from ..bundle.manifest import Manifest
from ..checks import require_library, whole
from ..compare.turns import subjects_of
from ..errors import LanternError, RequestError
from ..methods import Ar
from ..output.charts import Chart, Line, chart_png
from ..output.files import check_output, check_png, write_output
from ..planning.acceptance_statistics import AcceptanceStatistics, MethodStatistics, merge, read_statistics, weights_of
from ..planning.costs import HostCosts
from ..planning.intervals import median_interval
from ..planning.store import forget_tuning
from ..planning.tree_search import speed_by_nodes
from ..requests import resolve_settings
from ..tuning.judged import read_judged
from ..tuning.measure import Measurement, describe
from ..tuning.pictures import Decoders
from ..tuning.tune import tune as measure
from .console import print_json, print_table, print_text, progress
from .options import BundleName, Embeddings, Force, Json, Prompts, Running

EXAMPLES = """
lantern-rt tune scenes
lantern-rt tune scenes --quality balanced --minutes 10
lantern-rt tune scenes --quality fast --evaluation eval-scenes/eval.json
lantern-rt tune bundles/llamagen-b --images 8 --quality TVD=0.1 --json
"""
_MOST_MINUTES = 24 * 60.0
_FOUND = {
    "within the budget": "{name}",
    "TVD a token": "{tvd_per_token:.3f}",
    "NLL against ar": "{nll_ratio:.3f} +- {nll_error:.3f}",
    "images": "{images:d}",
    "what it gives": "{gives}",
}
_DECODERS = {
    "image decoder, compared with cpu": "{provider}",
    "ms": "{ms:.1f}",
    "speed-up (median)": "{speed_up:.2f} ({low:.2f}-{high:.2f})",
    "difference of 255 levels": "{difference:.2f}",
}
_COMPARED = {
    "compared with ar": "{method}",
    "speed-up (median)": "{speed_up:.2f} ({low:.2f}-{high:.2f})",
    "tokens a pass": "{tokens_per_forward_pass:.2f}",
    "TVD a token": "{tvd_per_token:.3f}",
}


def tune(
    bundle: BundleName,
    minutes: Annotated[float, typer.Option(help="How long to measure.")] = 5,
    quality: Annotated[
        str, typer.Option(help="What may be given away: strict (nothing), balanced, fast, or TVD=x per token.")
    ] = "strict",
    images: Annotated[int, typer.Option(help="Images decoded together, as in later use.")] = 1,
    *,
    running: Running,
    prompts: Prompts = None,
    embeddings: Embeddings = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. [default: the bundle's]")] = None,
    acceptance_statistics: Annotated[
        Path | None,
        typer.Option(help="Also write the statistics found, for a bundle to bring along; adds to those found before."),
    ] = None,
    evaluation: Annotated[
        Path | None,
        typer.Option(help="The eval.json of lantern-rt eval: budgets decide by what it found of images, where it did."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw costs of passes and expected speed by size of a draft, a .png file.")
    ] = None,
    reset: Annotated[
        bool, typer.Option("--reset", help="Forget what was measured here for the bundle; measures nothing.")
    ] = False,
    json: Json = False,
    force: Force = False,
) -> None:
    """Measure what method and image decoder suit this host best, and keep that. Best with nothing else running."""
    if reset:
        if any(one is not None for one in (prompts, embeddings, temperature, acceptance_statistics, evaluation, plot)):
            raise RequestError("reset: measures nothing; leave out what measuring takes")
        _reset(bundle, json)
        return
    if not 0 < minutes <= _MOST_MINUTES:
        raise RequestError(f"minutes: found {minutes:g}, expected a number above 0, up to {_MOST_MINUTES:g}")
    whole("images", images, 1, 1, 64)
    opened = running.open_bundle(bundle)
    asked = {"method": "auto", "quality": quality, "temperature": temperature}
    settings = resolve_settings(opened.manifest, asked)
    subjects = subjects_of(opened, prompts, embeddings=embeddings)
    judged = {} if evaluation is None else read_judged(evaluation, opened, settings)
    earlier = () if acceptance_statistics is None else _earlier(acceptance_statistics, opened.manifest, force)
    if plot is not None:
        require_library("matplotlib", "plot", "plot")
        check_png(plot, force)
    pipeline = running.load(opened, settings)
    with progress() as show:
        found = Measurement(pipeline, subjects, images, settings, show, judged)
        pictures = running.provider is None and running.engines is None  # else it is said what runs them
        choice, doubt, finalists, decoders, path = measure(found, minutes, pictures)
    if acceptance_statistics is not None:
        entries = merge(found.entries, earlier)
        written = AcceptanceStatistics(format=4, weights=weights_of(opened.manifest), entries=entries)
        write_output(acceptance_statistics, (written.model_dump_json(indent=1) + "\n").encode(), True)
    if plot is not None:
        write_output(plot, chart_png(_charts(found)), force)
    passes, costs = _passes(found.costs), found.costs
    outside = {f"{name}_ms": 1e3 * getattr(costs, name) for name in ("step", "level", "redraft")}
    if json:
        report = {
            "situation": found.situation.model_dump(),
            "choice": choice and choice.model_dump(),
            "doubt": doubt or None,
            "target_ms": passes["target"],
            "drafter_ms": passes.get("drafter"),
            **outside,
            "acceptance_statistics": [entry.model_dump() for entry in found.entries],
            "finalists": [finalist.report for finalist in finalists],
            "untried": [describe(method) for method in found.untried],
            "image_decoder": decoders and _decoders_report(decoders),
            "path": str(path),
        }
        print_json(report)
        return
    print_text(found.situation)
    for name, cost in passes.items():
        print_text(f"{name} pass, ms by nodes: {_listed(cost, '.1f')}")
    times = "  ".join(f"{ms:.2f}" for ms in outside.values())
    print_text(f"outside the engines, ms of a step, a drafter pass and a token of a window: {times}")
    print_table(_FOUND, [{**dict(one), "name": describe(one.method), "gives": _gives(one)} for one in found.entries])
    low_high = [dict(zip(("low", "high"), median_interval(one.speed_ups), strict=True)) for one in finalists]
    print_table(_COMPARED, [{**dict(one.choice), **more} for one, more in zip(finalists, low_high, strict=True)])
    if decoders is not None:
        _print_decoders(decoders)
    if choice is None:
        print_text(f"nothing chosen: {doubt}")
        return
    won = "nothing was faster than ar" if isinstance(choice.method, Ar) else f"speed-up {choice.speed_up:.2f}"
    print_text(f"chosen: {choice.method} ({won}), kept in {path}")


def _decoders_report(decoders: Decoders) -> dict[str, Any]:
    """What was found of image decoders, for JSON."""
    return {
        "choice": decoders.choice and decoders.choice.model_dump(),
        "doubt": decoders.doubt or None,
        "compared": [one._asdict() for one in decoders.compared],
        "missing": decoders.missing,
    }


def _print_decoders(decoders: Decoders) -> None:
    rows = []
    for one in decoders.compared:
        low, high = median_interval(one.speed_ups)
        gain = {"speed_up": statistics.median(one.speed_ups), "low": low, "high": high}
        rows.append({**one._asdict(), **gain, "ms": 1e3 * one.seconds})
    if rows:
        print_table(_DECODERS, rows)
    if decoders.missing:
        print_text(f"image decoder, not tried as not installed here: {', '.join(decoders.missing)} (docs/gpu.md)")
    if decoders.choice or decoders.doubt:
        print_text(f"image decoder: {decoders.choice or f'nothing chosen: {decoders.doubt}'}")


def _reset(bundle: str, json: bool) -> None:
    path = forget_tuning(open_bundle(bundle, verify=False).digest)
    if json:
        print_json({"removed": path and str(path)})
    else:
        print_text(f"removed {path}" if path else f"nothing was measured here for {bundle}")


def _earlier(path: Path, manifest: Manifest, force: bool) -> tuple[MethodStatistics, ...]:
    """Statistics of the same weights that the file holds already; any other file is replaced by force only."""
    if path.is_file():
        with suppress(LanternError):
            if earlier := read_statistics(path).fitting(manifest):
                return earlier
    check_output(path, force)
    return ()


def _passes(costs: HostCosts) -> dict[str, dict[int, float]]:
    """Milliseconds by nodes, of the engines that there are."""
    passes = {"target": costs.target, "drafter": costs.drafter or {}}
    return {name: {nodes: 1e3 * s for nodes, s in cost.items()} for name, cost in passes.items() if cost}


def _listed(numbers: Mapping[int, float], kind: str) -> str:
    return "  ".join(f"{name}: {value:{kind}}" for name, value in numbers.items())


def _gives(one: MethodStatistics) -> str:
    if one.acceptance_rates:
        return f"first child accepted {one.acceptance_rates[0][0]:.2f}"
    if one.fronts:
        return f"tokens a pass by drafts  {_listed({each.drafts: each.tokens_per_pass for each in one.fronts}, '.2f')}"
    return f"tokens a pass by window  {_listed({each.window: each.tokens for each in one.windows}, '.2f')}"


def _charts(found: Measurement) -> list[Chart]:
    """What passes cost, and what speed-up each kind of candidate promises by nodes of a target pass."""
    passes = [Line(name, list(cost.items())) for name, cost in _passes(found.costs).items()]
    # Every exact method, and of each the relaxed form that gives away most within the budget.
    by_tvd = sorted(found.entries, key=lambda one: one.tvd_per_token)
    shown = {(one.method.method, one.method.exact): one for one in by_tvd}.values()
    speeds = [Line(describe(one.method), list(speed_by_nodes(one, found.costs).items())) for one in shown]
    return [
        Chart(f"A pass, {found.situation}", "nodes", "milliseconds", passes, log2=True),
        Chart("Expected speed-up", "nodes of a target pass", "speed-up", speeds, log2=True),
    ]
