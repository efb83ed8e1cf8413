"""Building engines: a bundle and options in, a folder with `engine.json` out, whole or not at all.

`estimate` and `plan_build` say beforehand how much memory the engines will take, and what shapes they are made for.
Weights are counted in the graphs; keys and values follow from the sizes in `bundle.json`; activations are an estimate:
the tensors that a pass cannot do without, not what a library's allocator makes of them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

from ..bundle.files import Bundle
from ..bundle.onnx_scan import float_weights
from ..errors import BundleError
from ..output.files import check_new_folder, folder_or_nothing
from .contracts import Progress
from .engine_folder import ENGINE_FILE, FORMAT_VERSION, KIND, BuiltGraph, EngineManifest, PlanFile
from .host import processor
from .loader import find_backend
from .profiles import BuildOptions, Profile, largest_past, profiles

FFN_RATIO = 3  # intermediate_size over hidden_size: 8/3 in Llama-style models, rounded up


@dataclass(frozen=True)
class Estimate:
    """Bytes that one graph takes. `cache` is for `max_rows` full rows, `activations` for the largest pass."""

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
    roles = ("target", "drafter", "condition", "vq_decoder")
    return [_estimate(bundle, role, options) for role in roles if role in bundle.manifest.files]


def plan_build(bundle: Bundle, options: BuildOptions) -> dict[str, tuple[Profile, ...]]:
    """Check the options and work out the shapes of every graph, by role; needs no backend's library.

    Raises: RequestError.
    """
    backend = find_backend(options.backend)
    backend.check_options(options)
    return {role: profiles(bundle.manifest, role, options) if backend.shaped else () for role in backend.roles}


def build_engines(
    bundle: Bundle, bundle_name: str, options: BuildOptions, output: Path, force: bool, say: Progress
) -> EngineManifest:
    """Build every graph that the backend takes and write the folder; returns what `engine.json` says.

    bundle_name: what the user calls the bundle, for the command that builds again.

    Raises: EngineError if the backend is not installed or does not take a graph, RequestError on options, OutputError
    if `output` cannot be written.
    """
    shapes, backend = plan_build(bundle, options), find_backend(options.backend)
    version, capabilities = backend.version(), backend.compute_capabilities(options)
    check_new_folder(output, force, ENGINE_FILE, KIND)
    began = time.perf_counter()
    with folder_or_nothing(output, force, ENGINE_FILE, KIND) as folder:
        graphs: dict[str, BuiltGraph] = {}
        for role in backend.roles:
            if role not in bundle.manifest.files:
                continue
            start = time.perf_counter()
            built = backend.build(bundle, role, shapes[role], options, folder, say)
            seconds = time.perf_counter() - start
            sources = {
                name: entry.sha256
                for name, entry in bundle.manifest.files.items()
                if name == role or name.startswith(f"{role}.")
            }
            files = tuple(PlanFile.of(path) for path in built)
            graphs[role] = BuiltGraph(onnx_sha256=sources, files=files, profiles=shapes[role], seconds=seconds)
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


def _settings(options: BuildOptions) -> dict[str, str]:
    """What a builder is told beyond its own defaults, as text."""
    elsewhere = ("backend", "provider", "compute_capabilities")  # entries of their own in engine.json
    values = {field.name: getattr(options, field.name) for field in fields(options) if field.name not in elsewhere}
    return {name: str(value) for name, value in values.items() if value is not None}


def _command(bundle_name: str, options: BuildOptions) -> tuple[str, ...]:
    """The command line that asks for these options; defaults are left out."""
    command = ["lantern-rt", "build-engine", bundle_name, "--backend", options.backend]
    for flag, value in options.given().items():
        values = value if isinstance(value, tuple) else (value,)
        command += [word for one in values for word in (flag, str(one))]
    return tuple(command)


def _estimate(bundle: Bundle, role: str, options: BuildOptions) -> Estimate:
    manifest, path = bundle.manifest, bundle.path(role)
    size = 2 if manifest.target.dtype == "float16" else 4  # bytes of a number
    try:
        weights = size * float_weights(path)
    except (ValueError, OSError) as error:
        found = getattr(error, "strerror", None) or error
        raise BundleError(f"{path}: expected an ONNX graph, found {found}") from error
    spec = {"target": manifest.target, "drafter": manifest.drafter}.get(role)
    if spec is None:
        return Estimate(role, weights)
    past, nodes = largest_past(manifest, options), options.max_rows * options.max_nodes
    cache = 2 * spec.num_layers * past * options.max_rows * spec.num_kv_heads * spec.head_dim * size
    logits = nodes * spec.vocab_size * 4  # float32
    heads = spec.hidden_size // spec.head_dim
    scores = nodes * (past + options.max_nodes) * (2 * heads + 1) * size  # the mask, two copies of one layer's scores
    states = nodes * spec.hidden_size * (4 + 2 * FFN_RATIO) * size  # of one layer: states, gates and projections
    return Estimate(role, weights, cache, logits + scores + states)
