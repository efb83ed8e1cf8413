"""The `bench` command: what to run, and the table, the JSON and the chart of what was found."""

from __future__ import annotations

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
from ..tuning.bench import bench as compare
from ..tuning.bench import figures, memory_bound, usual_methods
from .console import print_json, print_table, print_text, progress
from .options import BundleName, Embeddings, Force, Json, Prompts, Running

EXAMPLES = """
lantern-rt bench scenes
lantern-rt bench scenes --threads 1 --batch 4 --greedy --json
lantern-rt bench scenes --sweep --images 16 --plot speed.png
lantern-rt bench scenes --methods sjd:window=5,sjd:window=11,auto:quality=fast
"""
_QUALITIES = ("strict", "balanced")
_COLUMNS = {
    "method": "{label}",
    "images/s": "{images_per_second:.3g}",
    "speed-up": "{speed_up:.2f}",
    "tokens\na pass": "{tokens_per_forward_pass:.2f}",
    "target": "{share[target]:.0%}",
    "drafter": "{share[drafter]:.0%}",
    "host": "{share[host]:.0%}",
    "text,\nimages": "{share[text_and_images]:.0%}",
    "memory\nbound": "{share_of_memory_bound:.0%}",
    "TVD\na token": "{tvd_per_token:.3f}",
    "NLL\na token": "{nll_per_token:.3f}",
    "NLL against ar": "{nll_ratio:.3f} +- {nll_error:.3f}",
}


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
    embeddings: Embeddings = None,
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
    subjects = subjects_of(opened, prompts, embeddings=embeddings)
    pipeline = running.load(opened)
    with progress() as show:
        runs = compare(pipeline, contenders, subjects, batch, images, show)
    bound = memory_bound(pipeline)
    rows = [figures(of_method, runs[0], bound) for of_method in runs]
    situation = pipeline.situation(batch, 0.0 if greedy else None, "")
    if plot is not None:
        axes = {"tvd_per_token": "total variation given away a token", "nll_ratio": "nats a token, against ar"}
        title = f"{opened.manifest.name}, {situation}"
        charts = [Chart(title, label, "tokens per second", _lines(rows, figure)) for figure, label in axes.items()]
        write_output(plot, chart_png(charts), force)
    if json:
        facts = {
            "lantern_rt": __version__,
            "bundle": opened.manifest.name,
            "bundle_digest": opened.digest,
            "processor": processor(),
            "backend": situation.backend,
            "threads": situation.threads,
            "batch": batch,
            "greedy": situation.greedy,
            "memory_bound_ms": bound and 1e3 * bound,
        }
        print_json({**facts, "rows": rows})
        return
    print_table(_COLUMNS, rows, f"{opened.manifest.name} ({opened.digest[:12]}), {situation}")
    print_text(f"{len(runs[0])} turns of {batch} image{'s' * (batch > 1)}; speeds are medians of turns")
    if bound is not None:
        print_text(f"memory bound: reading the target's weights once a pass, {1e3 * bound:.2f} ms here")
    for row in rows:
        if row["choice"]:
            print_text(f"{row['label']}: {row['choice']}")


def _lines(rows: list[dict[str, Any]], figure: str) -> list[Line]:
    """A line of every method's rows, in order of this figure; points are named by what sets them apart."""
    methods: dict[str, list[tuple[float, float, str]]] = {}
    for row in rows:
        method, _, parameters = row["label"].partition(":")
        name = parameters.replace(":", " ").replace("=", " ") or method
        methods.setdefault(method, []).append((row[figure], row["tokens_per_second"], name))
    return [
        Line(method, [(x, y) for x, y, _ in sorted(points)], [name for *_, name in sorted(points)])
        for method, points in methods.items()
    ]
