"""The `verify` command: compares a bundle's graphs with the checkpoints they were exported from."""

from __future__ import annotations

from collections.abc import Iterator
from json import dumps
from os.path import isfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..bundle.files import open_bundle
from ..bundle.manifest import Manifest
from ..engines.engine_folder import open_engine_folder
from ..errors import CheckpointError, ParityError, RequestError
from ..inputs import require_library
from ..output.files import convert_output_errors, find_cache_folder
from ..output.tables import format_text_table
from ..published import (
    check_host_requirements,
    choose_default_precision,
    export_bundle,
    find_published_model,
)
from .console import print_stderr, print_text, show_progress
from .options import BundleArgument, JsonOption, open_named_bundle

if TYPE_CHECKING:
    from ..export.verify import VerificationReport

EXAMPLES = """
lantern-rt verify scenes
lantern-rt verify bundles/llamagen-b c2i_B_256.pt vq_ds16_c2i.pt
lantern-rt verify bundles/llamagen-xl --engines engines/llamagen-xl
lantern-rt verify llamagen-c2i-b-256 --export
"""


def verify(
    bundle: BundleArgument,
    checkpoints: Annotated[
        list[str] | None,
        typer.Argument(
            help="Checkpoints that the bundle was exported from, as given to export, in the order target, VQ model, "
            "drafter, text encoder, config, LoRA adapters; or a folder that has them under the same file names. "
            "[default: compare with ONNX's reference evaluator on small inputs]"
        ),
    ] = None,
    engines: Annotated[
        Path | None,
        typer.Option(
            help="Engine folder to compare with the bundle: its ONNX graphs and, if their GPU is here, its engines."
        ),
    ] = None,
    export: Annotated[
        bool,
        typer.Option(
            "--export", help="Export the published model again, and compare all files with BUNDLE's byte by byte."
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Compare a bundle's graphs with the checkpoints they were exported from.

    The exit code is 2 if the graphs differ from the checkpoints. Needs lantern-rt[cpu,export].
    """
    if engines and checkpoints:
        raise RequestError("cannot be combined with checkpoints", field="engines", remedy="give one of them")
    if export:
        _compare_with_export(bundle)
        return
    opened = open_named_bundle(bundle)
    for library in ("torch", "onnx", "onnxruntime"):
        require_library(library, "verify", "cpu,export")
    with show_progress(announce_tasks=False) as progress:
        progress("loading PyTorch")
        from ..export.registry import read_family_checkpoints
        from ..export.verify import verify_bundle, verify_engines

        options = _match_export_options(opened.manifest, checkpoints) if checkpoints else {}
    with show_progress() as progress:
        if engines:
            result, reason = verify_engines(opened, open_engine_folder(engines), progress)
            if reason:
                print_stderr(f"note: the engines were not run: {reason}")
        elif options:
            model = read_family_checkpoints(opened.manifest.family, options, progress)
            result = verify_bundle(opened, model, options["target"], progress)
        else:
            result = verify_bundle(opened, progress=progress)
    if json:
        print_text(dumps(result.as_dict()))  # differences may be infinite
    else:
        print_text(f"{result.bundle} ({result.precision}) against {result.against}")
        for title, rows in _make_result_tables(result):
            print_text(f"\n{title}\n{format_text_table(rows)}")
        print_text("\npassed" if result.passed else "\nFAILED")
    if not result.passed:
        raise typer.Exit(2)


def _compare_with_export(name: str) -> None:
    """Compare the bundle of a published model with a new export, byte by byte."""
    model = find_published_model(name)
    opened = open_named_bundle(name)
    check_host_requirements(name, model)
    cache = find_cache_folder()
    with convert_output_errors(cache, (OSError,)):
        cache.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=cache) as folder, show_progress() as progress:
        made = open_bundle(export_bundle(name, Path(folder) / name, choose_default_precision(), progress))
    if opened.digest != made.digest:
        files = [{(role, entry.sha256) for role, entry in bundle.manifest.files.items()} for bundle in (opened, made)]
        actual = f"other files: {', '.join(sorted({role for role, _ in files[0] ^ files[1]})) or 'bundle.json'}"
        remedy = f"the bundle's exporter was {opened.manifest.provenance.exporter}"
        raise ParityError(field=name, found=actual, expected="the same files as a new export", remedy=remedy)
    print_text(f"{name} equals its export: {opened.digest}")


def _match_export_options(manifest: Manifest, checkpoints: list[str]) -> dict[str, Any]:
    """Return the export options of checkpoints in the order of the sources, or of one folder that has them all."""
    from ..export.registry import CHECKPOINTS, FAMILIES, load_model_family

    if manifest.family not in FAMILIES:
        expected = f"a bundle of {', '.join(FAMILIES)}"
        raise CheckpointError(field="checkpoints", found=f"a bundle of family {manifest.family!r}", expected=expected)
    sources = manifest.provenance.sources
    names = {source.role: source.name for source in reversed(sources)}
    roles = [role for role in CHECKPOINTS if role in names]
    scales = [source.role.partition(":")[2] for source in sources if source.role.startswith("lora:")]
    if "target_config" in names:  # it is read with the target beside it, so it may be named or not
        configuration = Path(checkpoints[0]).parent / names["target_config"]
        checkpoints = [text for text in checkpoints if Path(text) != configuration]
    named = [Path(checkpoints[0]) / names[role] for role in roles]
    if len(checkpoints) == 1 < len(roles) and not scales and all(map(isfile, named)):
        checkpoints = [str(path) for path in named]
    if len(checkpoints) != len(roles) + len(scales):
        expected = ", ".join(f"{role.replace('_', ' ')} ({names[role]})" for role in roles)
        expected += ", LoRA adapter" * len(scales)
        raise CheckpointError(field="checkpoints", found=", ".join(checkpoints), expected=expected)
    options: dict[str, Any] = dict(zip(roles, checkpoints, strict=False)) | {"weights": manifest.provenance.weights}
    adapters = checkpoints[len(roles) :]
    options["lora"] = [_append_lora_scale(text, scale) for text, scale in zip(adapters, scales, strict=True)] or None
    if "grid" in load_model_family(manifest.family).export_options:
        options["grid"] = manifest.grid_rows
    return options


def _append_lora_scale(adapter: str, scale: str) -> str:
    """Return `FOLDER:scale` with the scale that the bundle records; `adapter` may state it as well."""
    from ..export.checkpoints.lora import split_folder_and_scale

    folder, user_scale = split_folder_and_scale(adapter)
    if folder != adapter and user_scale != float(scale):
        remedy = "give the scale that it was exported with, or none"
        raise CheckpointError(field=adapter, found=f"scale {user_scale:g}", expected=scale, remedy=remedy)
    return f"{folder}:{scale}"


def _make_result_tables(result: VerificationReport) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield the title and the rows of each table of results. The first row has the headings."""
    for title, rows in (
        ("Token distributions", result.distributions),
        ("Images", result.pictures),
        ("Tensors", result.tensors),
    ):
        if rows:
            header = [name.replace("_", " ") for name in rows[0]]
            yield title, [header, *([_format_value(value) for value in row.values()] for row in rows)]


def _format_value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
