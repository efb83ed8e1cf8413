"""Building engines: a bundle and options in, a folder with `engine.json` out.

The folder appears whole or not at all. Does not know what a backend does with a graph, nor how progress is
shown.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ..bundle.files import Bundle
from ..output.folders import check_new_folder, folder_or_nothing
from .contracts import Backend, Progress, find_backend
from .engine_folder import ENGINE_FILE, FORMAT_VERSION, KIND, BuiltGraph, EngineManifest, PlanFile
from .estimates import Estimate, estimate
from .host import processor
from .profiles import BuildOptions, Profile, profiles


@dataclass(frozen=True)
class BuildPlan:
    """What a build will do: memory that the result will take, and the shapes it is made for, by role."""

    estimates: list[Estimate]
    profiles: dict[str, tuple[Profile, ...]]


def plan_build(bundle: Bundle, options: BuildOptions) -> BuildPlan:
    """Check the options and work out shapes and memory; builds nothing, needs no backend's library."""
    backend = find_backend(options.backend)
    backend.check_options(options)
    return BuildPlan(
        estimate(bundle, options), {role: _profiles(bundle, backend, role, options) for role in backend.roles}
    )


def build_engines(
    bundle: Bundle, bundle_name: str, options: BuildOptions, output: Path, force: bool, say: Progress
) -> EngineManifest:
    """Build every graph that the backend takes and write the folder; returns what `engine.json` says.

    bundle_name: what the user calls the bundle, for the command that builds again. EngineError if the backend is
    not installed or does not take a graph, RequestError on options, OutputError if `output` cannot be written.
    """
    backend = find_backend(options.backend)
    backend.check_options(options)
    version = backend.version()
    capabilities = backend.compute_capabilities(options)
    check_new_folder(output, force, ENGINE_FILE, KIND)
    began = time.perf_counter()
    with folder_or_nothing(output, force, ENGINE_FILE, KIND) as folder:
        graphs: dict[str, BuiltGraph] = {}
        for role in backend.roles:
            if role not in bundle.manifest.files:
                continue
            shapes = _profiles(bundle, backend, role, options)
            built = backend.build(bundle, role, shapes, options, folder, say)
            sources = {
                name: entry.sha256
                for name, entry in bundle.manifest.files.items()
                if name == role or name.startswith(f"{role}.")
            }
            files = tuple(PlanFile.of(path) for path in built.files)
            graphs[role] = BuiltGraph(onnx_sha256=sources, files=files, profiles=shapes, seconds=built.seconds)
        manifest = EngineManifest(
            format_version=FORMAT_VERSION,
            backend=backend.name,
            provider=options.provider if backend.name == "onnxruntime" else None,
            builder=backend.name,
            builder_version=version,
            processor=processor(),
            compute_capabilities=capabilities,
            driver=backend.driver(),
            precision=bundle.manifest.target.dtype,
            settings=_settings(options),
            bundle=bundle.manifest.name,
            bundle_sha256=bundle.digest,
            command=_command(bundle_name, options),
            built=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=time.perf_counter() - began,
            graphs=graphs,
        )
        (folder / ENGINE_FILE).write_text(manifest.model_dump_json(indent=2) + "\n", "utf-8")
    return manifest


def _profiles(bundle: Bundle, backend: Backend, role: str, options: BuildOptions) -> tuple[Profile, ...]:
    return profiles(bundle.manifest, role, options) if backend.shaped else ()


def _settings(options: BuildOptions) -> dict[str, str]:
    """The options that differ from a builder's own defaults, as text."""
    names = ("max_rows", "max_nodes", "max_past", "optimization_level", "workspace", "timing_cache")
    flags = ("hardware_compatible", "weight_streaming", "refit")
    values = {name: getattr(options, name) for name in (*names, *flags)}
    return {name: str(value) for name, value in values.items() if value is not None and value is not False}


def _command(bundle_name: str, options: BuildOptions) -> tuple[str, ...]:
    """The command line that asks for these options; defaults are left out."""
    command = ["lantern-rt", "build-engine", bundle_name, "--backend", options.backend]
    plain = BuildOptions(options.backend)
    for name in ("provider", "max_rows", "max_nodes", "max_past", "optimization_level", "timing_cache"):
        if (value := getattr(options, name)) != getattr(plain, name):
            command += [f"--{name.replace('_', '-')}", str(value)]
    if options.workspace is not None:
        command += ["--workspace", str(options.workspace >> 20)]
    for capability in options.compute_capabilities:
        command += ["--compute-capability", capability]
    for name in ("hardware_compatible", "weight_streaming", "refit"):
        if getattr(options, name):
            command.append(f"--{name.replace('_', '-')}")
    return tuple(command)
