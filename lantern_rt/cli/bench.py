"""The `bench` command: what to run, and the table, the JSON and the chart of what was found."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import __version__
from ..checks import require_library, whole
from ..engines.host import processor
from ..errors import RequestError
from ..output.charts import Chart, Line, chart_png
from ..output.files import check_png, write_output
from ..runner import parse_contenders, subjects_of
from ..tuning.bench import Bench, usual_methods
from ..tuning.bench import bench as compare
from .console import print_json, say
from .options import BundleName, Force, Json, Prompts, Running

EXAMPLES = """
lantern-rt bench scenes
lantern-rt bench scenes --threads 1 --batch 4 --greedy --json
lantern-rt bench scenes --sweep --images 16 --plot speed.png
lantern-rt bench scenes --methods sjd:window=5,sjd:window=11,auto:quality=fast
"""
_QUALITIES = ("strict", "balanced")
_WIDTH = 150  # of a table that goes to a file


def bench(
    bundle: BundleName,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods to compare with ar, NAME:PARAMETER=VALUE:..., joined by commas, as in eval. "
            "[default: all that the bundle can run]"
        ),
    ] = None,
    quality: Annotated[
        list[str] | None,
        typer.Option(help="Budget of a row of auto; may be given several times. [default: strict, balanced]"),
    ] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Also relax to several degrees.")] = False,
    images: Annotated[int, typer.Option(help="Images of every method, at least three turns.")] = 8,
    batch: Annotated[int, typer.Option(help="Images decoded together.")] = 1,
    greedy: Annotated[bool, typer.Option("--greedy", help="Temperature 0.")] = False,
    prompts: Prompts = None,
    *,
    running: Running,
    plot: Annotated[Path | None, typer.Option(help="Draw tokens per second against quality, a .png file.")] = None,
    json: Json = False,
    force: Force = False,
) -> None:
    """Measure methods against ar, in turns on the same prompts and seeds. Best with nothing else running."""
    if plot is not None:
        require_library("matplotlib", "plot", "plot")
        check_png(plot, force)
    whole("images", images, 1, 1, 10_000)
    whole("batch", batch, 1, 1, 64)
    if methods is not None and (sweep or quality):
        raise RequestError("methods: says what to run; leave --sweep and --quality out, or leave --methods out")
    opened = running.open_bundle(bundle)
    named = methods or usual_methods(opened.manifest, tuple(quality or _QUALITIES), sweep)
    contenders = parse_contenders(named, {"temperature": 0.0} if greedy else {}, opened)
    subjects = subjects_of(opened, prompts)
    pipeline = running.load(opened)
    found = compare(pipeline, contenders, subjects, batch, images, say)
    figures = [found.figures(runs) for runs in found.runs]
    situation = pipeline.situation(batch, 0.0 if greedy else None, "")
    facts = {
        "lantern_rt": __version__,
        "bundle": opened.manifest.name,
        "bundle_digest": opened.digest,
        "processor": processor(),
        "backend": situation.backend,
        "threads": situation.threads,
        "batch": batch,
        "greedy": situation.greedy,
    }
    if plot is not None:
        write_output(plot, chart_png(_charts(figures, facts)), force)
    if json:
        bound = None if found.memory_bound is None else 1e3 * found.memory_bound
        print_json({**facts, "memory_bound_ms": bound, "rows": figures})
    else:
        _print_table(found, facts, figures)


def _print_table(found: Bench, facts: dict[str, Any], figures: list[dict[str, Any]]) -> None:
    """One table, with what `auto` chose below it."""
    from rich.console import Console
    from rich.table import Table

    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    table = Table(title=_title(facts), title_justify="left", box=None, pad_edge=False)
    table.add_column("method", no_wrap=True)
    for heading in (
        "images/s", "speed-up", "tokens\na pass", "target", "drafter", "host", "text,\nimages", "memory\nbound",
        "TVD\na token", "NLL\na token", "NLL against ar",
    ):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    for one in figures:
        share, limit, error = one["share"], one["share_of_memory_bound"], one["nll_error"]
        table.add_row(
            one["label"],
            f"{one['images_per_second']:.3g}",
            f"{one['speed_up']:.2f}",
            f"{one['tokens_per_forward_pass']:.2f}",
            *(f"{share[name]:.0%}" for name in ("target", "drafter", "host", "text_and_images")),
            "-" if limit is None else f"{limit:.0%}",
            f"{one['tvd_per_token']:.3f}",
            f"{one['nll_per_token']:.3f}",
            f"{one['nll_ratio']:.3f}" + ("" if error is None else f" +- {error:.3f}"),
        )
    console.print(table, highlight=False)
    turns = len(found.runs[0])
    lines = [f"{turns} turns of {found.images} image{'s' * (found.images > 1)}; speeds are medians of turns"]
    if found.memory_bound is not None:
        lines.append(f"memory bound: reading the target's weights once a pass, {1e3 * found.memory_bound:.2f} ms here")
    lines += [f"{one['label']}: {one['choice']}" for one in figures if one["choice"]]
    print("\n".join(lines))


def _title(facts: dict[str, Any]) -> str:
    kind = "greedy" if facts["greedy"] else "sampling"
    threads, batch = facts["threads"], facts["batch"]
    return (
        f"{facts['bundle']} ({facts['bundle_digest'][:12]}), {facts['backend']}, {threads} "
        f"thread{'s' * (threads > 1)}, {batch} image{'s' * (batch > 1)} at a time, {kind}"
    )


def _charts(figures: list[dict[str, Any]], facts: dict[str, Any]) -> list[Chart]:
    """Tokens per second against both measures of quality, a line for each method."""
    title = _title(facts).replace(f" ({facts['bundle_digest'][:12]}), {facts['backend']}", "")
    return [
        Chart(title, "total variation given away a token", "tokens per second", _lines(figures, "tvd_per_token")),
        Chart("", "nats a token, against ar", "tokens per second", _lines(figures, "nll_ratio")),
    ]


def _lines(figures: list[dict[str, Any]], quality: str) -> list[Line]:
    """A line of every method's rows, in order of quality; points are named by what sets them apart."""
    methods: dict[str, list[dict[str, Any]]] = {}
    for one in figures:
        methods.setdefault(one["label"].split(":")[0], []).append(one)
    lines = []
    for method, rows in methods.items():
        rows = sorted(rows, key=lambda one: (one[quality], one["tokens_per_second"]))
        points = [(one[quality], one["tokens_per_second"]) for one in rows]
        names = [one["label"].partition(":")[2].replace(":", " ").replace("=", " ") or method for one in rows]
        lines.append(Line(method, points, names))
    return lines
