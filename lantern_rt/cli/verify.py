"""The `verify` command and the bar of long writes. Does not know option parsing, nor how graphs are compared."""

from __future__ import annotations

import html
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..bundle.files import Bundle, open_bundle
from ..errors import CheckpointError, EngineError
from ..output.files import check_output, write_output
from ..progress import Progress
from .families import FAMILIES, Checkpoints, read_family

if TYPE_CHECKING:
    from ..export.graph.graphs import Graph
    from ..export.verify import Verification


def verify_command(name: str, given: Checkpoints | None, report: Path | None, as_json: bool, force: bool) -> None:
    """Compare a bundle's graphs and print the tables; exit code 2 if a limit is passed."""
    if report:
        check_output(report, force)
    bundle = open_bundle(name)
    if missing := [n for n in ("torch", "onnx", "onnxruntime") if importlib.util.find_spec(n) is None]:
        raise EngineError(
            f"verify needs {' and '.join(missing)}, found none installed; run `pip install 'lantern-rt[cpu,export]'`"
        )
    from ..export.verify import verify

    def say(line: str) -> None:
        print(line, file=sys.stderr)

    if given is None:
        result = verify(bundle, progress=say)
    else:
        say("reading checkpoints")
        result = verify(bundle, _graphs(bundle, given), str(given.target), say)
    if report:
        write_output(report, html_report(result).encode(), force)
    if as_json:
        print(json.dumps(result.as_dict()))
    else:
        print(text_report(result))
    if not result.passed:
        raise typer.Exit(2)


def _graphs(bundle: Bundle, given: Checkpoints) -> Sequence[Graph]:
    """The checkpoints' modules, as they would be written."""
    manifest = bundle.manifest
    if manifest.family not in FAMILIES:
        raise CheckpointError(
            f"--against: found a bundle of family {manifest.family!r}, expected {' or '.join(FAMILIES)}"
        )
    given.check(manifest.family)
    if (given.drafter is None) != (manifest.drafter is None):
        wanted = "none: the bundle has none" if given.drafter else "the folder of the bundle's drafter"
        raise CheckpointError(f"--drafter: found {given.drafter or 'nothing'}, expected {wanted}")
    if (given.text_encoder is None) == (manifest.condition.kind == "text"):
        wanted = "none: the bundle has none" if given.text_encoder else "the folder of the bundle's text encoder"
        raise CheckpointError(f"--text-encoder: found {given.text_encoder or 'nothing'}, expected {wanted}")
    given, _ = given.fetched(manifest.family)
    heads = manifest.target.hidden_size // manifest.target.head_dim  # the bundle knows what weights do not tell
    return read_family(manifest.family, replace(given, grid=manifest.grid_rows, heads=heads)).graphs


def text_report(result: Verification) -> str:
    """Two tables and a verdict."""
    lines = [f"{result.bundle} ({result.precision}) against {result.against}"]
    for title, header, rows in _tables(result):
        widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
        lines += ["", title]
        lines += [
            "  " + "  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)) for row in (header, *rows)
        ]
    return "\n".join(line.rstrip() for line in [*lines, "", "passed" if result.passed else "FAILED"])


def html_report(result: Verification) -> str:
    """The same as one page that needs nothing else."""
    parts = [f"<h1>{html.escape(result.bundle)}: {'passed' if result.passed else 'failed'}</h1>"]
    parts.append(f"<p>Precision {result.precision}; against {html.escape(result.against)}; digest {result.digest}.</p>")
    for title, header, rows in _tables(result):
        cells = "".join(f"<th>{html.escape(text)}</th>" for text in header)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(t)}</td>" for t in row) + "</tr>" for row in rows)
        parts.append(f"<h2>{title}</h2><table><tr>{cells}</tr>{body}</table>")
    style = "body{font-family:sans-serif;margin:2em}td,th{text-align:left;padding:.2em 1em .2em 0}"
    title = html.escape(f"{result.bundle}: verification")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{style}</style>'
        f"{''.join(parts)}</html>\n"
    )


def _tables(result: Verification) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Title, header and rows of each table, as text."""
    tables = (("Token distributions", result.distributions), ("Tensors", result.tensors))
    for title, found in tables:
        if found:
            header = [name.replace("_", " ") for name in found[0]]
            yield title, header, [[_text(value) for value in row.values()] for row in found]


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


@contextmanager
def export_progress() -> Iterator[Progress]:
    """Lines on stderr, and a bar of bytes where that is a terminal."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bar(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        yield _OnTerminal(bar)


class _Lines(Progress):
    def __call__(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class _OnTerminal(Progress):
    def __init__(self, bar: Any) -> None:
        self.bar, self.task = bar, bar.add_task("", total=None)

    def __call__(self, line: str) -> None:
        self.bar.update(self.task, description=line)

    def bytes(self, done: int, total: int) -> None:
        self.bar.update(self.task, completed=done, total=total)
