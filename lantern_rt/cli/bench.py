"""The `bench` command: what to run, and the table, the JSON and the chart of what was found."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import __version__
from ..checks import require_library, short, whole
from ..compare.bench import bench as compare
from ..compare.bench import figures, memory_bound, usual_methods
from ..compare.turns import Contender, Subjects, parse_contenders, subjects_of
from ..engines.host import processor
from ..errors import RequestError
from ..output.charts import Chart, Line, chart_png
from ..output.files import check_png, write_output
from ..pipeline import Pipeline
from ..service import Service
from ..tuning.callers import FEWEST_IMAGES, MOST_CALLERS, measure_callers
from .console import print_json, print_table, print_text, progress
from .options import BundleName, Embeddings, Force, Json, Prompts, Running

EXAMPLES = """
lantern-rt bench scenes
lantern-rt bench scenes --threads 1 --batch 4 --greedy --json
lantern-rt bench scenes --sweep --images 16 --plot speed.png
lantern-rt bench scenes --methods sjd:window=5,sjd:window=11,auto:quality=fast
lantern-rt bench scenes --concurrency 1,2,4,8 --images 40
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
_OF_CALLERS = {
    "method": "{label}",
    "callers": "{callers:d}",
    "images": "{images:d}",
    "images/s": "{images_per_second:.3g}",
    "median s": "{median_seconds:.2f}",
    "p95 s": "{p95_seconds:.2f}",
    "drawn by": "{drawn_by}",
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
    concurrency: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="Instead, what N callers at a time get of a service like that of serve: images a second, seconds of "
            "an image. Each gets at least three. [default method: auto]",
        ),
    ] = None,
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
    sampling = {"temperature": 0.0} if greedy else {}
    opened = running.open_bundle(bundle)
    if concurrency is not None:
        if sweep or plot is not None or batch > 1:
            raise RequestError("concurrency: leave --batch, --sweep and --plot out; they compare methods, not loads")
        counts, named = _counts(concurrency), methods or f"auto:quality={(quality or _QUALITIES)[0]}"
        asked = {label.strip() for label in named.split(",")}
        contenders = [one for one in parse_contenders(named, sampling, opened) if one.label in asked]
        subjects = subjects_of(opened, prompts, embeddings=embeddings)
        _bench_callers(running.load(opened, picture_threads=1), contenders, subjects, counts, images, json)
        return
    named = methods or usual_methods(opened.manifest, tuple(quality or _QUALITIES), sweep)
    contenders = parse_contenders(named, sampling, opened)
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
        facts = {"batch": batch, "greedy": situation.greedy, "memory_bound_ms": bound and 1e3 * bound}
        print_json({**_facts(pipeline), **facts, "rows": rows})
        return
    print_table(_COLUMNS, rows, f"{opened.manifest.name} ({opened.digest[:12]}), {situation}")
    print_text(f"{len(runs[0])} turns of {batch} image{'s' * (batch > 1)}; speeds are medians of turns")
    if bound is not None:
        print_text(f"memory bound: reading the target's weights once a pass, {1e3 * bound:.2f} ms here")
    for row in rows:
        if row["choice"]:
            print_text(f"{row['label']}: {row['choice']}")


def _counts(text: str) -> list[int]:
    """Numbers of callers. Raises: RequestError: they are no such numbers."""
    counts = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if not all(1 <= count <= MOST_CALLERS for count in counts):
        raise RequestError(
            f"concurrency: found {short(text)}, expected whole numbers 1 .. {MOST_CALLERS} joined by commas"
        )
    return counts


def _bench_callers(
    pipeline: Pipeline, contenders: list[Contender], subjects: Subjects, counts: list[int], images: int, json: bool
) -> None:
    """Measure and print what callers get; each measurement after one that only warms up."""
    rows = []
    with Service(pipeline, waiting=MOST_CALLERS) as service, progress() as show:
        for one, count in product(contenders, counts):
            total = max(images, FEWEST_IMAGES * count)
            for what in ("warming up", "measuring"):
                label = f"{one.label}, callers: {count}, {what}"
                found = measure_callers(service, count, total, subjects, one.options, True, partial(show, label))
            rows.append({"label": one.label, **found})
    facts = _facts(pipeline)
    if json:
        print_json({**facts, "together": service.together, "rows": rows})
        return
    print_table(_OF_CALLERS, rows, f"{facts['bundle']} ({facts['bundle_digest'][:12]})")
    print_text(f"threads: {facts['threads']}; images that share passes: at most {service.together}")
    print_text("seconds: from asking to the picture, without HTTP and PNG")


def _facts(pipeline: Pipeline) -> dict[str, Any]:
    """Where rows come from, for JSON."""
    bundle, situation = pipeline.bundle, pipeline.situation(1, None, "")
    return {
        "lantern_rt": __version__,
        "bundle": bundle.manifest.name,
        "bundle_digest": bundle.digest,
        "processor": processor(),
        "backend": situation.backend,
        "image_decoder": pipeline.engines.picture_backend,
        "threads": situation.threads,
    }


def _lines(rows: list[dict[str, Any]], figure: str) -> list[Line]:
    """A line of every method's rows, in order of this figure; points are named by what sets them apart."""
    methods: dict[str, list[tuple[float, float, str]]] = {}
    for row in rows:
        method, _, parameters = row["label"].partition(":")
        name = parameters.replace(":", " ").replace("=", " ") or method
        if row[figure] is None:
            continue
        methods.setdefault(method, []).append((row[figure], row["tokens_per_second"], name))
    return [
        Line(method, [(x, y) for x, y, _ in sorted(points)], [name for *_, name in sorted(points)])
        for method, points in methods.items()
    ]
