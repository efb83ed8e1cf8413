"""The `verify` command."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from html import escape
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..bundle.files import Bundle
from ..checks import require_library
from ..errors import CheckpointError, RequestError
from ..output.files import check_output, write_output
from ..output.tables import html_page, html_table, text_table
from .console import print_text, progress
from .families import FAMILIES, Checkpoints, read_family
from .options import BundleName, Force, Json, open_whole

if TYPE_CHECKING:
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
    opened = open_whole(bundle)
    for library in ("torch", "onnx", "onnxruntime"):
        require_library(library, "verify", "cpu,export")
    with progress(lines=False) as show:
        show("loading PyTorch")
        from ..export.verify import verify as compare
    given = None
    if against is not None:
        given = _fetched(opened, Checkpoints(against, vq, drafter, text_encoder, model, config))
    with progress() as show:
        if given is None:
            result = compare(opened, progress=show)
        else:
            result = compare(opened, read_family(opened.manifest.family, given, show), str(against), show)
    if report:
        write_output(report, html_report(result).encode(), force)
    if json:
        print_text(dumps(result.as_dict()))  # differences may be infinite
    else:
        print_text(f"{result.bundle} ({result.precision}) against {result.against}")
        for title, rows in _tables(result):
            print_text(f"\n{title}\n{text_table(rows)}")
        print_text("\npassed" if result.passed else "\nFAILED")
    if not result.passed:
        raise typer.Exit(2)


def _fetched(bundle: Bundle, given: Checkpoints) -> Checkpoints:
    """The checkpoints on this machine, with what the bundle tells of them. Raises: CheckpointError."""
    manifest = bundle.manifest
    if manifest.family not in FAMILIES:
        raise CheckpointError(
            f"--against: found a bundle of family {manifest.family!r}, expected {' or '.join(FAMILIES)}"
        )
    given.check(manifest.family)
    for option, needed in (
        ("drafter", manifest.drafter is not None),
        ("text encoder", manifest.condition.kind == "text"),
    ):
        place = getattr(given, option.replace(" ", "_"))
        if (place is not None) != needed:
            wanted = f"the folder of the bundle's {option}" if needed else "none: the bundle has none"
            raise CheckpointError(f"--{option.replace(' ', '-')}: found {place or 'nothing'}, expected {wanted}")
    given, _ = given.fetched(manifest.family)
    heads = manifest.target.hidden_size // manifest.target.head_dim  # the bundle knows what weights do not tell
    return replace(given, grid=manifest.grid_rows, heads=heads)


def html_report(result: Verification) -> str:
    """Tables and verdict as one page that needs nothing else."""
    body = f"<p>Precision {result.precision}; against {escape(result.against)}; digest {result.digest}.</p>"
    for title, (header, *rows) in _tables(result):
        body += f"<h2>{title}</h2>" + html_table([[escape(text) for text in row] for row in rows], header)
    return html_page(f"{result.bundle}: verification {'passed' if result.passed else 'failed'}", body)


def _tables(result: Verification) -> Iterator[tuple[str, list[list[str]]]]:
    """Title of each table, and its rows as text, the header first."""
    for title, found in (("Token distributions", result.distributions), ("Tensors", result.tensors)):
        if found:
            header = [name.replace("_", " ") for name in found[0]]
            yield title, [header, *([_text(value) for value in row.values()] for row in found)]


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
