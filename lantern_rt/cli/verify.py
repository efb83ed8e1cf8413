"""The `verify` command."""

from __future__ import annotations

import html
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..bundle.files import Bundle, open_bundle
from ..errors import CheckpointError, EngineError, RequestError
from ..output.files import check_output, write_output
from .console import say
from .families import FAMILIES, Checkpoints, read_family
from .options import BundleName, Force, Json

if TYPE_CHECKING:
    from ..export.graph.graphs import Graph
    from ..export.verify import Verification

EXAMPLES = """
lantern-rt verify scenes
lantern-rt verify bundles/llamagen-b --against c2i_B_256.pt --vq vq_ds16_c2i.pt --report b.html
"""


def verify(
    bundle: BundleName,
    against: Annotated[
        Path | None,
        typer.Option(
            help="The target's checkpoint, a path or hf:owner/name as in export. Without it, ONNX's reference "
            "evaluator on small inputs."
        ),
    ] = None,
    vq: Annotated[Path | None, typer.Option(help="Checkpoint of the VQ model, with --against.")] = None,
    drafter: Annotated[Path | None, typer.Option(help="Folder of the drafter, with --against.")] = None,
    text_encoder: Annotated[Path | None, typer.Option(help="Folder of the text encoder, with --against.")] = None,
    model: Annotated[str | None, typer.Option(help="Size by name, as in export.")] = None,
    config: Annotated[Path | None, typer.Option(help="JSON file with sizes, as in export.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write the tables to this .html as well.")] = None,
    json: Json = False,
    force: Force = False,
) -> None:
    """Compare a bundle's graphs with what they were made from (exit code 2 if they differ).

    Needs lantern-rt[cpu,export].
    """
    if against is None and any((vq, drafter, text_encoder, model, config)):
        raise RequestError("verify: found checkpoint options without --against, expected the target's there")
    if report:
        check_output(report, force)
    opened = open_bundle(bundle)
    if missing := [n for n in ("torch", "onnx", "onnxruntime") if importlib.util.find_spec(n) is None]:
        raise EngineError(
            f"verify needs {' and '.join(missing)}, found none installed; run `pip install 'lantern-rt[cpu,export]'`"
        )
    from ..export.verify import verify as compare

    if against is None:
        result = compare(opened, progress=say)
    else:
        say("reading checkpoints")
        given = Checkpoints(against, vq, drafter, text_encoder, model, config)
        result = compare(opened, _graphs(opened, given), str(against), say)
    if report:
        write_output(report, html_report(result).encode(), force)
    if json:
        print(dumps(result.as_dict()))  # differences may be infinite
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
    """Tables and verdict as one page that needs nothing else."""
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
