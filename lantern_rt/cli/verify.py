"""The `verify` command."""

from __future__ import annotations

from collections.abc import Iterator
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..bundle.manifest import Manifest
from ..engines.engine_folder import open_engine_folder
from ..errors import CheckpointError, RequestError
from ..inputs import require_library
from ..output.tables import text_table
from .console import print_stderr, print_text, show_progress
from .options import BundleArgument, JsonOption, open_bundle

if TYPE_CHECKING:
    from ..export.verify import Verification

EXAMPLES = """
lantern-rt verify scenes
lantern-rt verify bundles/llamagen-b c2i_B_256.pt vq_ds16_c2i.pt
lantern-rt verify bundles/llamagen-xl --engines engines/llamagen-xl
"""


def verify(
    bundle: BundleArgument,
    checkpoints: Annotated[
        list[str] | None,
        typer.Argument(
            help="What the bundle was exported from, as export takes it: target, VQ model, drafter, text encoder, "
            "config, LoRA adapters, those that there were, in this order. [default: ONNX's reference evaluator on "
            "small inputs]"
        ),
    ] = None,
    engines: Annotated[
        Path | None,
        typer.Option(
            help="Engine folder of the bundle: its graphs with the bundle's, and on their GPU plans with those."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Compare a bundle's graphs with what they were made from (exit code 2 if they differ).

    Needs lantern-rt[cpu,export].
    """
    if engines and checkpoints:
        raise RequestError(field="engines", found="checkpoints, too", expected="one of them")
    opened = open_bundle(bundle)
    options = _match(opened.manifest, checkpoints) if checkpoints else {}
    for library in ("torch", "onnx", "onnxruntime"):
        require_library(library, "verify", "cpu,export")
    with show_progress(lines=False) as progress:
        progress("loading PyTorch")
        from ..export.registry import read_family
        from ..export.verify import verify as verify_bundle
        from ..export.verify import verify_engines
    with show_progress() as progress:
        if engines:
            result, reason = verify_engines(opened, open_engine_folder(engines), progress)
            if reason:
                print_stderr(f"note: plans were not run: {reason}")
        elif options:
            model = read_family(opened.manifest.family, options, progress)
            result = verify_bundle(opened, model, options["target"], progress)
        else:
            result = verify_bundle(opened, progress=progress)
    if json:
        print_text(dumps(result.as_dict()))  # differences may be infinite
    else:
        print_text(f"{result.bundle} ({result.precision}) against {result.against}")
        for title, rows in _tables(result):
            print_text(f"\n{title}\n{text_table(rows)}")
        print_text("\npassed" if result.passed else "\nFAILED")
    if not result.passed:
        raise typer.Exit(2)


def _match(manifest: Manifest, checkpoints: list[str]) -> dict[str, Any]:
    """The options of an export, from checkpoints in the order of the bundle's provenance. Raises: CheckpointError."""
    from ..export.registry import CHECKPOINTS, FAMILIES

    if manifest.family not in FAMILIES:
        expected = f"a bundle of {', '.join(FAMILIES)}"
        raise CheckpointError(field="checkpoints", found=f"one of family {manifest.family!r}", expected=expected)
    names = {source.role: source.name for source in reversed(manifest.provenance.sources)}
    roles = [role for role in CHECKPOINTS if role in names]
    scales = [one.role.partition(":")[2] for one in manifest.provenance.sources if one.role.startswith("lora:")]
    if len(checkpoints) != len(roles) + len(scales):
        expected = ", ".join(f"{role.replace('_', ' ')} ({names[role]})" for role in roles)
        expected += ", LoRA adapter" * len(scales)
        raise CheckpointError(field="checkpoints", found=", ".join(checkpoints), expected=expected)
    options: dict[str, Any] = dict(zip(roles, checkpoints, strict=False)) | {"weights": manifest.provenance.weights}
    options["lora"] = [f"{place}:{own}" for place, own in zip(checkpoints[len(roles) :], scales, strict=True)] or None
    if "grid" in FAMILIES[manifest.family]:
        options["grid"] = manifest.grid_rows
    return options


def _tables(result: Verification) -> Iterator[tuple[str, list[list[str]]]]:
    for title, found in (
        ("Token distributions", result.distributions),
        ("Pictures", result.pictures),
        ("Tensors", result.tensors),
    ):
        if found:
            header = [name.replace("_", " ") for name in found[0]]
            yield title, [header, *([_text(value) for value in row.values()] for row in found)]


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
