"""TensorRT and TensorRT-RTX as backends: ONNX graphs to plans and plans to engines, through the API both share.

Networks are strongly typed: every tensor has the type that the graph gives it, so precision is the exporter's
choice. TensorRT builds on and for the GPU of this host; TensorRT-RTX builds ahead of time for the compute
capabilities asked for, on a host without any GPU.

Does not know the decode loop, nor what `engine.json` must say.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...bundle.files import Bundle
from ...bundle.manifest import DecoderSpec, DrafterSpec
from ...bundle.onnx_scan import place_of_node
from ...errors import EngineError, OutputError, RequestError
from ...output.files import write_output
from ...runtime.engine import Engine, Floats
from ..contracts import Built, Function, Graphs, PlanOptions, Progress
from ..engine_folder import EngineFolder, EngineManifest
from ..ort.backend import OrtGraphs
from ..ort.session import Tensor, ThreadOptions
from ..profiles import BuildOptions, Profile
from .cuda_driver import find_gpu
from .cuda_memory import DeviceMemory, open_gpu
from .engine import TensorRTEngine, TensorRTFunction
from .library import Messages, import_library, make_logger, make_monitor
from .plan_errors import PlanSource

_AMPERE = 80


class TensorRTGraphs:
    """The plans of an engine folder, and `others` for graphs that were not built.

    CUDA graphs are for decoders: of the image decoder a pass takes long, and every one has its own addresses.
    """

    def __init__(
        self, library: Any, memory: DeviceMemory, folder: EngineFolder, others: Graphs, options: PlanOptions
    ) -> None:
        self._library, self._memory, self._folder, self._others = library, memory, folder, others
        self._options = options

    def decoder(self, role: str, spec: DecoderSpec | DrafterSpec, code_embeddings: Floats | None) -> Engine:
        """The target or the drafter as an engine."""
        options = self._options if role == "target" else replace(self._options, weight_budget=None)
        return TensorRTEngine(self._library, self._memory, self._source(role), spec, code_embeddings, options)

    def function(self, role: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Function:
        """Another graph."""
        if role not in self._folder.manifest.graphs:
            return self._others.function(role, inputs, outputs)
        return TensorRTFunction(self._library, self._memory, self._source(role), inputs, outputs)

    def _source(self, role: str) -> PlanSource:
        folder = self._folder
        return PlanSource(folder.path(role), folder.manifest.graphs[role].profiles, folder.rebuild)


class TensorRTBackend:
    """Builds and opens plans with the library of one of the two names, `tensorrt` and `tensorrt-rtx`."""

    roles: tuple[str, ...] = ("target", "drafter", "vq_decoder")
    shaped = True

    def __init__(self, name: str) -> None:
        self.name = name

    def version(self) -> str:
        """Of the installed library."""
        return str(import_library(self.name).__version__)

    def driver(self) -> str | None:
        """The CUDA version that the driver supports."""
        gpu = find_gpu()
        return gpu.driver if gpu else None

    def check_options(self, options: BuildOptions) -> None:
        """Refuse what belongs to the other library, or to ONNX Runtime."""
        if options.provider != "cpu":
            raise RequestError(f"--provider: goes with backend onnxruntime, found {self.name}")
        if self.name == "tensorrt" and options.compute_capabilities:
            raise RequestError(
                "--compute-capability: goes with backend tensorrt-rtx; tensorrt builds for the GPU of this host"
            )
        if self.name == "tensorrt-rtx" and options.hardware_compatible:
            raise RequestError(
                "--hardware-compatible: goes with backend tensorrt; give tensorrt-rtx every --compute-capability"
            )
        if self.name == "tensorrt-rtx" and options.refit and find_gpu() is None:
            raise RequestError("--refit: tensorrt-rtx needs a GPU to build plans that can be refitted, found none")
        if self.name == "tensorrt-rtx" and options.timing_cache is not None:
            raise RequestError(
                "--timing-cache: goes with backend tensorrt; tensorrt-rtx times no kernels when it builds"
            )

    def compute_capabilities(self, options: BuildOptions) -> tuple[str, ...]:
        """Those asked for, or that of this host's GPU."""
        if options.compute_capabilities:
            return tuple(name.upper() for name in options.compute_capabilities)
        gpu = find_gpu()
        if gpu is None:
            advice = (
                "give --compute-capability, such as SM89"
                if self.name == "tensorrt-rtx"
                else "build on the host that will run the engines, or with --backend tensorrt-rtx"
            )
            raise EngineError(f"{self.name}: found no NVIDIA GPU and driver to build for; {advice}")
        return (gpu.compute_capability,)

    def build(
        self, bundle: Bundle, role: str, profiles: Sequence[Profile], options: BuildOptions, folder: Path, say: Progress
    ) -> Built:
        """Parse the graph, build a plan for all profiles, and write it as `<role>.plan`."""
        began = time.perf_counter()
        library, messages = import_library(self.name), Messages()
        logger = make_logger(library, messages)
        builder = library.Builder(logger)
        typed = getattr(library.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)  # the only kind from 11 on
        network = builder.create_network(0 if typed is None else 1 << int(typed))
        parser = library.OnnxParser(network, logger)
        path = bundle.path(role)
        if not parser.parse_from_file(str(path)):
            raise EngineError(self._parse_failure(path, parser, messages))
        config = self._configure(library, builder, options)
        for profile in profiles:
            shapes = builder.create_optimization_profile()
            for i in range(network.num_inputs):
                tensor = network.get_input(i)
                shapes.set_shape(tensor.name, *ranges(tensor.name, tuple(tensor.shape), profile))
            config.add_optimization_profile(shapes)
        monitor = make_monitor(library, f"building {role}", say)
        config.progress_monitor = monitor
        plan = builder.build_serialized_network(network, config)
        if monitor.interrupted:
            raise KeyboardInterrupt
        if plan is None:
            raise EngineError(
                f"{path}: {self.name} {library.__version__} does not build this graph: {messages.brief()}; "
                f"try smaller --max-rows, --max-nodes or --max-past, or another --backend"
            )
        if options.timing_cache is not None:
            timings = bytes(memoryview(config.get_timing_cache().serialize()))
            write_output(options.timing_cache, timings, force=True)
        file = folder / f"{role}.plan"
        with file.open("wb") as stream:
            stream.write(memoryview(plan))
        return Built((file,), time.perf_counter() - began)

    def check_host(self, manifest: EngineManifest, where: str, rebuild: str) -> None:
        """The GPU must be one that the plans were built for."""
        known = ", ".join(manifest.compute_capabilities)
        gpu = find_gpu()
        if gpu is None:
            raise EngineError(
                f"{where}: found no NVIDIA GPU and driver, expected a GPU of {known}; run without --engines, or on a "
                f"host that has one"
            )
        compatible = "hardware_compatible" in manifest.settings and int(gpu.compute_capability[2:]) >= _AMPERE
        if gpu.compute_capability not in manifest.compute_capabilities and not compatible:
            raise EngineError(
                f"{where}: found engines for {known}, expected {gpu.compute_capability}, the GPU of this host; "
                f"rebuild with `{rebuild}`"
            )

    def open(self, bundle: Bundle, folder: EngineFolder, threads: ThreadOptions, options: PlanOptions) -> Graphs:
        """The plans on the first GPU; the condition graph on the CPU."""
        others = OrtGraphs(lambda role: (bundle.path(role), False), threads, "cpu")
        return TensorRTGraphs(import_library(self.name), open_gpu(), folder, others, options)

    def _configure(self, library: Any, builder: Any, options: BuildOptions) -> Any:
        config = builder.create_builder_config()
        config.clear_flag(library.BuilderFlag.TF32)  # float32 is what a float32 bundle promises
        if self.name == "tensorrt-rtx":
            capabilities = [self._capability(library, name) for name in self.compute_capabilities(options)]
            config.num_compute_capabilities = len(capabilities)
            for i, capability in enumerate(capabilities):
                config.set_compute_capability(capability, i)
        if options.hardware_compatible:
            config.hardware_compatibility_level = library.HardwareCompatibilityLevel.AMPERE_PLUS
        if options.optimization_level is not None:
            config.builder_optimization_level = options.optimization_level
        if options.workspace is not None:
            config.set_memory_pool_limit(library.MemoryPoolType.WORKSPACE, options.workspace)
        for name in ("weight_streaming", "refit"):
            if getattr(options, name):
                config.set_flag(self._flag(library, name))
        if options.timing_cache is not None:
            config.set_timing_cache(config.create_timing_cache(_read_timings(options.timing_cache)), False)
        return config

    def _capability(self, library: Any, name: str) -> Any:
        known = {key: value for key, value in library.ComputeCapability.__members__.items() if key.startswith("SM")}
        if name not in known:
            raise RequestError(f"compute-capability: found {name!r}, expected one of {', '.join(known)}")
        return known[name]

    def _flag(self, library: Any, name: str) -> Any:
        if (flag := getattr(library.BuilderFlag, name.upper(), None)) is None:
            raise RequestError(f"--{name.replace('_', '-')}: {self.name} {library.__version__} does not have it")
        return flag

    def _parse_failure(self, path: Path, parser: Any, messages: Messages) -> str:
        version = import_library(self.name).__version__
        if not parser.num_errors:
            return f"{path}: {self.name} {version} cannot parse this graph: {messages.brief()}; export the bundle again"
        error = parser.get_error(0)
        place = place_of_node(path, error.node())
        near = f" near `{place}`" if place else ""
        code = error.code().name.replace("_", " ").lower()
        return (
            f"{path}: {self.name} {version} cannot parse node `{error.node_name()}` ({error.node_operator()}){near}: "
            f"{code} ({' '.join(error.desc().split())[:200]}); update {self.name}, or build with another --backend"
        )


def ranges(name: str, shape: tuple[int, ...], profile: Profile) -> tuple[tuple[int, ...], ...]:
    """Smallest, best and largest shape of a graph input under a profile; fixed sizes stay as they are."""
    if name.startswith("past_key_values."):
        axes = [profile.past, profile.rows]
    elif name == "attention_mask":
        columns = tuple(past + nodes for past, nodes in zip(profile.past, profile.nodes, strict=True))
        axes = [profile.rows, (1, 1, 1), profile.nodes, columns]  # type: ignore[list-item]
    else:
        axes = [profile.rows, profile.nodes]
    return tuple(tuple(axes[i][which] if size < 0 else size for i, size in enumerate(shape)) for which in range(3))


def _read_timings(path: Path) -> bytes:
    try:
        return path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise OutputError(f"{path}: cannot be read ({error.strerror})") from error
