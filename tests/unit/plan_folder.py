"""Engine folders whose files are text instead of TensorRT engines, for checks that need no TensorRT library."""

from __future__ import annotations

from pathlib import Path

from lantern_rt.bundle.files import open_bundle
from lantern_rt.engines.engine_folder import (
    ENGINE_FILE,
    FORMAT_VERSION,
    BuiltEngine,
    EngineFolder,
    EngineManifest,
    compute_blake2b,
    open_engine_folder,
)
from lantern_rt.engines.profiles import BuildOptions, profiles

BUILD_OPTIONS = BuildOptions("tensorrt-rtx", max_rows=4, max_nodes=8, compute_capabilities=("SM89",))
BUILDER_VERSION = "1.7"


def write_engine_folder(bundle: Path, folder: Path) -> EngineFolder:
    """Write an engine folder for a bundle: the manifest of a real build, but text files as engines."""
    loaded_bundle = open_bundle(bundle)
    folder.mkdir(parents=True)
    graphs = {}
    for role in ("target", "drafter", "vq_decoder"):
        path = folder / f"{role}.plan"
        path.write_bytes(f"plan of {role}".encode())
        graphs[role] = BuiltEngine(
            path=path.name,
            blake2b=compute_blake2b(path),
            bytes=path.stat().st_size,
            onnx="0" * 64,
            profiles=profiles(loaded_bundle.manifest, role, BUILD_OPTIONS),
            seconds=0.5,
        )
    manifest = EngineManifest(
        format_version=FORMAT_VERSION,
        backend=BUILD_OPTIONS.backend,
        builder_version=BUILDER_VERSION,
        compute_capabilities=BUILD_OPTIONS.compute_capabilities,
        gpu=None,
        precision=loaded_bundle.manifest.target.dtype,
        bundle=loaded_bundle.manifest.name,
        bundle_sha256=loaded_bundle.digest,
        command=("lantern-rt", "build-engine", str(bundle), "--backend", BUILD_OPTIONS.backend),
        built="2026-01-02T03:04:05+00:00",
        graphs=graphs,
    )
    (folder / ENGINE_FILE).write_text(manifest.model_dump_json())
    return open_engine_folder(folder)
