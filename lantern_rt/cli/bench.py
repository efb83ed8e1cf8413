"""The `bench` command: what to run, and the table, the JSON and the chart of what was found.

Does not know option parsing, nor how runs are timed.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .. import __version__
from ..bundle.files import Bundle
from ..checks import whole
from ..errors import RequestError
from ..output.charts import Chart, Line, chart_png
from ..output.files import check_png, write_output
from ..pipeline import Pipeline
from ..runner import parse_contenders, subjects_of
from ..tuning.bench import Bench, bench, usual_methods
from .running import Running

_QUALITIES = ("strict", "balanced")
_WIDTH = 150  # of a table that goes to a file


@dataclass(frozen=True)
class BenchCommand:
    """What the user asked `bench` for."""

    bundle: str
    methods: str | None
    qualities: tuple[str, ...]
    sweep: bool
    images: int
    batch: int
    greedy: bool
    prompts: Path | None
    running: Running
    plot: Path | None
    json: bool
    force: bool


@dataclass(frozen=True)
class BenchReport:
    """What was found. facts: what the figures are of; figures: those of every way, plain decoding first."""

    found: Bench
    facts: dict[str, Any]
    figures: list[dict[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        bound = self.found.memory_bound
        return {**self.facts, "memory_bound_ms": None if bound is None else 1e3 * bound, "rows": self.figures}


def bench_command(asked: BenchCommand) -> None:
    """Check, run, print."""
    if asked.plot is not None:
        check_png(asked.plot, asked.force)
    report = run_bench(asked)
    if asked.plot is not None:
        write_output(asked.plot, chart_png(_charts(report.figures, report.facts)), asked.force)
    if asked.json:
        print(json.dumps(report.as_dict(), allow_nan=False))
    else:
        print_table(report)


def run_bench(asked: BenchCommand) -> BenchReport:
    """Check and run; what is being done goes to stderr."""
    whole("images", asked.images, 1, 1, 10_000)
    whole("batch", asked.batch, 1, 1, 64)
    if asked.methods is not None and (asked.sweep or asked.qualities):
        raise RequestError("methods: says what to run; leave --sweep and --quality out, or leave --methods out")
    bundle = asked.running.open_bundle(asked.bundle)
    subjects = subjects_of(bundle, asked.prompts)
    sampling = {"temperature": 0.0} if asked.greedy else {}
    named = asked.methods or usual_methods(bundle.manifest, asked.qualities or _QUALITIES, asked.sweep)
    contenders = parse_contenders(named, sampling, bundle)
    pipeline = asked.running.load(bundle)
    say = partial(print, file=sys.stderr)
    found = bench(pipeline, contenders, subjects, asked.batch, asked.images, say)
    return BenchReport(found, _facts(bundle, pipeline, asked), [found.figures(runs) for runs in found.runs])


def _facts(bundle: Bundle, pipeline: Pipeline, asked: BenchCommand) -> dict[str, Any]:
    """What the figures are of."""
    from ..engines.host import processor

    situation = pipeline.situation(asked.batch, 0.0 if asked.greedy else None, "")
    return {
        "lantern_rt": __version__,
        "bundle": bundle.manifest.name,
        "bundle_digest": bundle.digest,
        "processor": processor(),
        "backend": situation.backend,
        "threads": situation.threads,
        "batch": asked.batch,
        "greedy": situation.greedy,
    }


def print_table(report: BenchReport) -> None:
    """One table, with what `auto` chose below it."""
    from rich.console import Console
    from rich.table import Table

    found, figures, facts = report.found, report.figures, report.facts
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    table = Table(title=_title(facts), title_justify="left", box=None, pad_edge=False)
    table.add_column("method", no_wrap=True)
    for heading in (
        "images/s", "speed-up", "tokens\na pass", "target", "drafter", "host", "text,\npictures", "memory\nbound",
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
            *(f"{share[name]:.0%}" for name in ("target", "drafter", "host", "text_and_pictures")),
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
