"""Building engines: a bundle and options in, a folder with `engine.json` out, whole or not at all.

`estimate` and `plan_build` say beforehand how much memory the engines will take, and what shapes they are made for.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ..bundle.files import Bundle
from ..errors import RequestError
from ..output.files import check_new_folder, folder_or_nothing
from .contracts import Progress
from .engine_folder import ENGINE_FILE, FORMAT_VERSION, KIND, BuiltGraph, EngineManifest, PlanFile
from .host import processor
from .loader import find_backend
from .memory import cache_bytes, check_products, count_weights, pass_bytes
from .ort.backend import OrtBackend
from .ort.providers import PROVIDERS
from .profiles import BuildOptions, Profile, capacity, profiles

_RECORDED = ("backend", "provider", "compute_capabilities")  # entries of their own in engine.json, not `settings`


@dataclass(frozen=True)
class Estimate:
    """Bytes that one graph takes: `cache` for `max_rows` full rows, `activations` at least, for the largest pass."""

    role: str
    weights: int
    cache: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """All three."""
        return self.weights + self.cache + self.activations


def estimate(bundle: Bundle, options: BuildOptions) -> list[Estimate]:
    """An estimate for every graph of the bundle. Raises: BundleError if a graph cannot be read."""
    return [_estimate(bundle, role, options) for role in OrtBackend.roles if role in bundle.manifest.files]


def plan_build(bundle: Bundle, options: BuildOptions) -> dict[str, tuple[Profile, ...]]:
    """Check the options and work out the shapes of every graph, by role. Raises: RequestError."""
    backend = find_backend(options.backend)
    if (provider := PROVIDERS.get(options.provider)) is not None and provider.plugin:
        found = f"found {provider.name}, which makes what it runs when it loads a bundle"
        raise RequestError(f"--provider: {found}; run the bundle itself with `--provider {provider.name}`")
    for flag, name in (("--provider", "onnxruntime"), ("--compute-capability", "tensorrt-rtx")):
        if flag in options.given() and name != backend.name:
            raise RequestError(f"{flag}: goes with backend {name}, found {backend.name}")
    return {role: profiles(bundle.manifest, role, options) if backend.shaped else () for role in backend.roles}


def build_engines(
    bundle: Bundle, bundle_name: str, options: BuildOptions, output: Path, force: bool, say: Progress
) -> EngineManifest:
    """Build every graph that the backend takes and write the folder; returns what `engine.json` says.

    bundle_name: what the user calls the bundle, for the command that builds again.

    Raises: EngineError if the backend is missing or does not take a graph, RequestError on options, OutputError.
    """
    shapes, backend = plan_build(bundle, options), find_backend(options.backend)
    own = options.backend == "onnxruntime"
    check_products(bundle, f"{options.backend}-{options.provider}" if own else options.backend)
    version, capabilities = backend.version(), backend.compute_capabilities(options)
    check_new_folder(output, force, ENGINE_FILE, KIND)
    began, files = time.perf_counter(), bundle.manifest.files
    values = {name: value for name, value in vars(options).items() if name not in _RECORDED and value is not None}
    given = [word for flag, found in options.given().items() for one in found for word in (flag, str(one))]
    with folder_or_nothing(output, force, ENGINE_FILE, KIND) as folder:
        graphs: dict[str, BuiltGraph] = {}
        for role in (role for role in backend.roles if role in files):
            start = time.perf_counter()
            if not (built := backend.build(bundle, role, shapes[role], options, folder, say)):
                continue
            graphs[role] = BuiltGraph(
                seconds=time.perf_counter() - start,
                onnx_sha256={name: entry.sha256 for name, entry in files.items() if name.split(".")[0] == role},
                files=tuple(PlanFile.of(path) for path in built),
                profiles=shapes[role],
            )
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
            settings={name: str(value) for name, value in values.items()},
            bundle=bundle.manifest.name,
            bundle_sha256=bundle.digest,
            command=("lantern-rt", "build-engine", bundle_name, "--backend", options.backend, *given),
            built=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=time.perf_counter() - began,
            graphs=graphs,
        )
        (folder / ENGINE_FILE).write_text(manifest.model_dump_json(indent=2) + "\n", "utf-8")
    return manifest


def _estimate(bundle: Bundle, role: str, options: BuildOptions) -> Estimate:
    manifest = bundle.manifest
    size = 2 if manifest.target.dtype == "float16" else 4  # bytes of a number
    weights = size * count_weights(bundle.path(role))
    spec = {"target": manifest.target, "drafter": manifest.drafter}.get(role)
    if spec is None:
        return Estimate(role, weights)
    columns, rows = capacity(manifest, role, options), options.max_rows
    cache = cache_bytes(spec, rows, columns, size)
    return Estimate(role, weights, cache, pass_bytes(spec, rows, options.max_nodes, columns, size))
