"""The `build-engine` command."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..bundle.files import Bundle
from ..engines.build import build_engines, estimate, plan_build
from ..engines.ort.providers import DEFAULT_PROVIDER
from ..engines.profiles import BuildOptions, Profile
from ..errors import RequestError
from .console import Facts, print_facts, print_json, print_text, progress, say
from .options import ENGINE, BundleName, Force, Json, open_whole

EXAMPLES = r"""
lantern-rt build-engine scenes --backend onnxruntime --output engines/scenes-cpu
lantern-rt run --engines engines/scenes-cpu --prompt "a red sphere on sand"
lantern-rt build-engine bundles/llamagen-xl --backend tensorrt-rtx --compute-capability SM89 \
    --compute-capability SM120 --max-rows 8 --max-nodes 64 --output engines/llamagen-xl-rtx
lantern-rt build-engine bundles/llamagen-xl --backend tensorrt --dry-run
"""


def build_engine(
    bundle: BundleName,
    backend: Annotated[str, typer.Option(help="onnxruntime, tensorrt or tensorrt-rtx.")] = "onnxruntime",
    output: Annotated[Path | None, typer.Option(help="Engine folder to write; not needed with --dry-run.")] = None,
    provider: Annotated[
        str, typer.Option(help="What ONNX Runtime builds for: cpu, cuda, ... (docs/gpu.md).", rich_help_panel=ENGINE)
    ] = DEFAULT_PROVIDER,
    max_rows: Annotated[int, typer.Option(help="Sequences per pass; guidance makes two of every image.")] = 8,
    max_nodes: Annotated[int, typer.Option(help="New nodes per pass, at least the tree's.")] = 64,
    max_past: Annotated[
        int | None, typer.Option(help="Columns of a cache before a pass. [default: prefix and codes]")
    ] = None,
    compute_capability: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SM", help="GPU to build for, such as SM89; may be given several times. [default: this host's]"
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print memory and shapes, build nothing.")] = False,
    json: Json = False,
    force: Force = False,
) -> None:
    """Turn a bundle into what this host (or a GPU) runs fastest; `run --engines` runs it."""
    capabilities = tuple(compute_capability or ())
    options = BuildOptions(backend, provider, max_rows, max_nodes, max_past, capabilities)
    opened = open_whole(bundle)
    if backend != "onnxruntime" and opened.manifest.target.dtype == "float32":
        say("note: this bundle computes in float32, and so will its plans; exported with --compute float16, they take "
            "half the memory")  # fmt: skip
    if dry_run:
        _print_plan(opened, options, json)
        return
    if output is None:
        raise RequestError("found no --output, expected a folder to write the engines to (or --dry-run)")
    with progress() as show:
        manifest = build_engines(opened, bundle, options, output, force, show)
    if json:
        print_json({"folder": str(output), "manifest": manifest.model_dump(mode="json")})
        return
    for role, graph in manifest.graphs.items():
        say(f"{role}: {graph.seconds:.1f} s, {_mib(sum(file.bytes for file in graph.files))}")
    print_text(output)


def _print_plan(bundle: Bundle, options: BuildOptions, as_json: bool) -> None:
    plan, estimates = plan_build(bundle, options), estimate(bundle, options)
    total = sum(part.total for part in estimates)
    if as_json:
        profiles = {role: [shape.model_dump() for shape in shapes] for role, shapes in plan.items()}
        print_json({"estimates": [asdict(part) for part in estimates], "total": total, "profiles": profiles})
        return
    memory: dict[str, str] = {}
    for part in estimates:
        sizes = {"weights": part.weights, "keys and values": part.cache, "activations": part.activations}
        memory[part.role] = ", ".join(f"{name} {_mib(size)}" for name, size in sizes.items() if size)
    section = f"memory for {options.max_rows} rows and {options.max_nodes} nodes, estimated"
    facts: Facts = {section: {**memory, "total": _mib(total)}}
    for role, shapes in plan.items():
        ranges = f"profiles of {role} (smallest/tuned for/largest)"
        facts[ranges] = {shape.name: _ranges(shape) for shape in shapes}
    print_facts({section: values for section, values in facts.items() if values})


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _ranges(profile: Profile) -> str:
    sizes = {"rows": profile.rows, "nodes": profile.nodes, "columns": profile.columns}
    return ", ".join(f"{name} {'/'.join(map(str, each))}" for name, each in sizes.items() if each[2])
