"""Build TensorRT engines of a bundle into an engine folder. If a build fails, no folder is written."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from ..bundle.files import Bundle
from ..bundle.manifest import DECODERS
from ..errors import EngineError
from ..output.files import check_new_folder, write_folder_atomically
from .contracts import Progress
from .engine_folder import ENGINE_FILE, FORMAT_VERSION, BuiltEngine, EngineManifest, compute_blake2b
from .gpu import find_gpu
from .precisions import check_matmul_support
from .profiles import RTX, BuildOptions, ShapeProfile, profiles
from .trt.builder import Inputs, build_engine_file, format_build_commands, import_library, write_device_graph

ROLES = (*DECODERS, "vq_decoder")


def build_engines(
    bundle: Bundle, bundle_name: str, options: BuildOptions, output: Path, force: bool, progress: Progress
) -> tuple[EngineManifest, list[str]]:
    """Build a TensorRT engine for every graph that the backend supports, and write an engine folder.

    `bundle_name` is the name or path that the user gave, for the command that rebuilds the engines.

    Returns:
        Contents of `engine.json`, and shell commands with which a user can rebuild an engine and check its outputs.

    Raises:
        EngineError: TensorRT is not installed, or rejects a graph.
        RequestError: TensorRT cannot build for a requested GPU, or lacks the quantized matmul of the bundle.
        OutputError: the engine folder cannot be written.
    """
    backend = options.backend
    gpu = None if backend == RTX else find_gpu()  # TensorRT-RTX builds for compute capabilities, not for a GPU model
    check_matmul_support(bundle, backend)
    capabilities = choose_compute_capabilities(options)
    command = ["lantern-rt", "build-engine", bundle_name, "--backend", backend]
    command += ["--max-rows", str(options.max_rows), "--max-nodes", str(options.max_nodes)]
    for name in options.compute_capabilities:
        command += ["--compute-capability", name]
    version = str(import_library(backend).__version__)
    check_new_folder(output, force, ENGINE_FILE)
    with write_folder_atomically(output, force, ENGINE_FILE) as folder:
        graphs: dict[str, BuiltEngine] = {}
        lines: list[str] = []
        for role, shapes, inputs in write_engine_graphs(bundle, options, folder):
            start = time.perf_counter()
            lines += format_build_commands(backend, bundle, role, inputs, capabilities, output)
            graph = folder / f"{role}.onnx"
            engine = build_engine_file(backend, graph, inputs, capabilities, progress)
            graphs[role] = BuiltEngine(
                path=engine.name,
                blake2b=compute_blake2b(engine),
                bytes=engine.stat().st_size,
                onnx=compute_blake2b(graph),
                profiles=shapes,
                seconds=time.perf_counter() - start,
            )
        manifest = EngineManifest(
            format_version=FORMAT_VERSION,
            backend=backend,
            builder_version=version,
            compute_capabilities=capabilities,
            gpu=gpu.name if gpu else None,
            precision=bundle.manifest.target.dtype,
            bundle=bundle.manifest.name,
            bundle_sha256=bundle.digest,
            command=tuple(command),
            built=datetime.now(UTC).isoformat(timespec="seconds"),
            graphs=graphs,
        )
        (folder / ENGINE_FILE).write_text(manifest.model_dump_json(indent=2) + "\n", "utf-8")
    return manifest, lines


def write_engine_graphs(
    bundle: Bundle, options: BuildOptions, folder: Path
) -> Iterator[tuple[str, tuple[ShapeProfile, ...], list[Inputs]]]:
    """Write the ONNX graphs of all engines; yield the role, the profiles and the bounds of the inputs of each."""
    for role in (role for role in ROLES if role in bundle.manifest.files):
        shapes = profiles(bundle.manifest, role, options)
        inputs = write_device_graph(bundle, role, shapes, folder)
        if inputs is not None:  # None: ONNX Runtime runs this graph on the CPU
            yield role, shapes, inputs


def choose_compute_capabilities(options: BuildOptions) -> tuple[str, ...]:
    """Return the requested compute capabilities, such as `SM89`; by default, that of this host's GPU."""
    if options.compute_capabilities:
        return tuple(name.upper() for name in options.compute_capabilities)
    if gpu := find_gpu():
        return (gpu.compute_capability,)
    remedy = "build on the host that will run the engines, or with --backend tensorrt-rtx"
    if options.backend == RTX:
        remedy = "give --compute-capability, such as SM89"
    raise EngineError(field=options.backend, found="no NVIDIA GPU and driver", remedy=remedy)
