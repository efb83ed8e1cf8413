"""The `build-engine` command: builds TensorRT engines from a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..engines.build import build_engines
from ..engines.profiles import BuildOptions
from .console import print_json, print_stderr, print_text, show_progress
from .options import BundleArgument, ForceOption, JsonOption, open_named_bundle

EXAMPLES = r"""
lantern-rt build-engine bundles/llamagen-xl --output engines/llamagen-xl
lantern-rt build-engine bundles/llamagen-xl --backend tensorrt-rtx --compute-capability SM89 \
    --compute-capability SM120 --max-rows 8 --max-nodes 64 --output engines/llamagen-xl-rtx
lantern-rt run bundles/llamagen-xl "a red sphere on sand" --engines engines/llamagen-xl
"""


def build_engine(
    bundle: BundleArgument,
    output: Annotated[Path, typer.Option(help="Folder to write the engines to.")],
    backend: Annotated[str, typer.Option(help="Library to build for: tensorrt or tensorrt-rtx.")] = "tensorrt",
    max_rows: Annotated[
        int, typer.Option(help="Maximum number of batch rows per forward pass; with guidance, an image has two rows.")
    ] = 8,
    max_nodes: Annotated[
        int,
        typer.Option(
            help="Maximum number of new tokens per row and forward pass, at least the nodes of the draft tree."
        ),
    ] = 64,
    compute_capability: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SM",
            help="GPU architecture to build for, such as SM89; may be given several times. [default: this host]",
        ),
    ] = None,
    json: JsonOption = False,
    force: ForceOption = False,
) -> None:
    """Build TensorRT engines from a bundle, for `run --engines`."""
    options = BuildOptions(backend, max_rows, max_nodes, tuple(compute_capability or ()))
    opened = open_named_bundle(bundle)
    if opened.manifest.target.dtype == "float32":
        print_stderr(
            "note: this bundle computes in float32, and so will its engines; exported with --compute float16, they "
            "take half the memory"
        )
    with show_progress() as progress:
        manifest, lines = build_engines(opened, bundle, options, output, force, progress)
    if json:
        print_json({"folder": str(output), "manifest": manifest.model_dump(mode="json"), "build_commands": lines})
        return
    for role, graph in manifest.graphs.items():
        print_stderr(f"{role}: {graph.seconds:.1f} s, {graph.bytes / 2**20:,.1f} MiB")
    print_text(output)
