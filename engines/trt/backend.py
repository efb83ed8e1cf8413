"""TensorRT and TensorRT-RTX as backends: ONNX graphs to plans and plans to engines, through the API both share.

Networks are strongly typed: every tensor has the type that the graph gives it, so precision is the exporter's
choice. TensorRT builds on and for the GPU of this host; TensorRT-RTX builds ahead of time for the compute
capabilities asked for, on a host without any GPU.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...bundle.files import Bundle
from ...bundle.manifest import DecoderSpec, DrafterSpec
from ...errors import EngineError, RequestError
from ...inputs import brief, short
from ...runtime.engine import Engine, Floats
from ..contracts import Function, Progress, Tensor
from ..device_graph import WORD, device_graph
from ..engine_folder import EngineFolder
from ..gpu import find_gpu
from ..ort.backend import OrtGraphs
from ..ort.device import Device
from ..ort.providers import ON_CPU
from ..profiles import BuildOptions, Profile, capacity_of
from .engine import TensorRTEngine, TensorRTFunction
from .plan import Kernels, Plan, first, make_logger

Shape = tuple[int, ...]
MEMORY = "cuda"  # the provider of ONNX Runtime whose memory plans run on
MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}


def import_library(name: str) -> Any:
    """The module of a backend. Raises: EngineError with the command that installs it."""
    try:
        module = importlib.import_module(MODULES[name])
        _ = module.__version__  # any folder of that name on the path would be a module, too
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        problem = f"{MODULES[name]} cannot be imported ({brief(error, 200)})"
        raise EngineError(problem, remedy=f"install it with `pip install 'lantern-rt[{name}]'`") from error
    return module


def find_backend(name: str) -> TensorRTBackend:
    """The backend of a name; its library need not be installed. Raises: RequestError if there is none."""
    if name not in MODULES:
        raise RequestError(field="backend", found=short(name), expected=f"one of {', '.join(MODULES)}")
    return TensorRTBackend(name)


class TensorRTGraphs(OrtGraphs):
    """The plans of an engine folder on the first GPU, and graphs that were not built on the CPU.

    Raises: EngineError unless ONNX Runtime has the GPU's memory.
    """

    def __init__(self, library: Any, bundle: Bundle, folder: EngineFolder, threads: int) -> None:
        super().__init__(bundle, threads, ON_CPU)
        self._library, self._gpu, self._plans = library, Device(MEMORY), folder
        self._gpu.zeros((1,), "float32")  # loads the provider, or says why it does not
        self._kernels = Kernels(folder)
        weakref.finalize(self, self._kernels.save)  # some are compiled while plans run

    def decoder(self, role: str, spec: DecoderSpec | DrafterSpec, code_embeddings: Floats | None) -> Engine:
        return TensorRTEngine(self._plan(role), spec, code_embeddings, self._gpu)

    def function(
        self, role: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], threads: int | None = None
    ) -> Function:
        if role not in self._plans.manifest.graphs:
            return super().function(role, inputs, outputs, threads)
        return TensorRTFunction(self._plan(role), inputs, outputs, self._gpu).run

    def _plan(self, role: str) -> Plan:
        plans = self._plans
        if role not in plans.manifest.graphs:
            raise plans.other(f"no plan of the {role}", "one")
        profiles = plans.manifest.graphs[role].profiles
        return Plan(self._library, plans.path(role), profiles, plans.rebuild, self._kernels)


class TensorRTBackend:
    """Builds and opens plans with the library of one of the two names, `tensorrt` and `tensorrt-rtx`."""

    roles = ("target", "drafter", "vq_decoder")  # the graphs it builds

    def __init__(self, name: str) -> None:
        self.name = name

    def version(self) -> str:
        """The installed library's version. Raises: EngineError with the command that installs it."""
        return str(import_library(self.name).__version__)

    def compute_capabilities(self, options: BuildOptions) -> tuple[str, ...]:
        """Those asked for, or that of this host's GPU."""
        if options.compute_capabilities:
            return tuple(name.upper() for name in options.compute_capabilities)
        if gpu := find_gpu():
            return (gpu.compute_capability,)
        remedy = "build on the host that will run the engines, or with --backend tensorrt-rtx"
        if self.name == "tensorrt-rtx":
            remedy = "give --compute-capability, such as SM89"
        raise EngineError(field=self.name, found="no NVIDIA GPU and driver", remedy=remedy)

    def build(
        self, bundle: Bundle, role: str, profiles: Sequence[Profile], options: BuildOptions, folder: Path, say: Progress
    ) -> Path | None:
        """Parse the graph, build a plan for all profiles, and write it as `<role>.plan`.

        None for an image decoder for several sizes: the CPU runs that.
        """
        if role == "vq_decoder" and bundle.manifest.sizes:
            return None
        library, path, entries = import_library(self.name), bundle.path(role), 0
        if spec := {"target": bundle.manifest.target, "drafter": bundle.manifest.drafter}.get(role):
            model = device_graph(path, spec, role == "drafter", capacity=capacity_of(profiles)).model
            entries = max(profile.nodes[2] for profile in profiles)
            if role == "target":
                prefixes = entries * max(profile.rows[2] for profile in profiles)
                entries = max(spec.vocab_size, 1 + (bundle.manifest.row_end or 0), prefixes)
        else:
            model = path.read_bytes()
        errors: list[str] = []
        builder = library.Builder(logger := make_logger(library, errors))
        typed = getattr(library.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)  # the only kind from 11 on
        network = builder.create_network(0 if typed is None else 1 << int(typed))
        parser = library.OnnxParser(network, logger)
        if not parser.parse(model, str(path)):  # the path is where weights in other files lie
            what = f"this graph: {first(errors)}"
            if parser.num_errors:
                error = parser.get_error(0)
                what = f"node `{error.node_name()}` ({error.node_operator()}): {' '.join(error.desc().split())[:200]}"
            raise self._refusal(path, f"cannot parse {what}", f"update {self.name}, or export the bundle again")
        config = builder.create_builder_config()
        config.clear_flag(library.BuilderFlag.TF32)  # float32 is what a float32 bundle promises
        if self.name == "tensorrt-rtx":
            self._choose_gpus(library, config, options)
        for profile in profiles:
            shapes = builder.create_optimization_profile()
            for tensor in map(network.get_input, range(network.num_inputs)):
                shapes.set_shape(tensor.name, *ranges(tensor.name, tuple(tensor.shape), profile, entries))
            config.add_optimization_profile(shapes)
        config.progress_monitor = monitor = make_monitor(library, f"building {role}", say)
        plan = builder.build_serialized_network(network, config)
        if monitor.interrupted:
            raise KeyboardInterrupt
        if plan is None:
            remedy = "try smaller --max-rows or --max-nodes, or another --backend"
            raise self._refusal(path, f"does not build this graph: {first(errors)}", remedy)
        file = folder / f"{role}.plan"
        file.write_bytes(memoryview(plan))
        return file

    def open(self, bundle: Bundle, folder: EngineFolder, threads: int) -> OrtGraphs:
        """The plans on the first GPU; the condition graph on the CPU.

        Raises:
            EngineError: the plans are not this bundle's, library's or GPU's, or altered.
        """
        library, gpu = import_library(self.name), find_gpu()
        built_for = folder.manifest.compute_capabilities
        if gpu is None:
            raise EngineError(
                field=str(folder.folder),
                found="no NVIDIA GPU and driver",
                expected=f"a GPU of {', '.join(built_for)}",
                remedy="run without --engines, or on a host that has one",
            )
        if gpu.compute_capability not in built_for:
            raise folder.other(f"engines for {', '.join(built_for)}", f"{gpu.compute_capability}, the GPU of this host")
        folder.check(bundle, self.version())
        return TensorRTGraphs(library, bundle, folder, threads)

    def _choose_gpus(self, library: Any, config: Any, options: BuildOptions) -> None:
        known = {key: value for key, value in library.ComputeCapability.__members__.items() if key[:2] == "SM"}
        config.num_compute_capabilities = len(names := self.compute_capabilities(options))
        for i, name in enumerate(names):
            if name not in known:
                raise RequestError(field="compute_capability", found=short(name), expected=f"one of {', '.join(known)}")
            config.set_compute_capability(known[name], i)

    def _refusal(self, path: Path, problem: str, remedy: str) -> EngineError:
        return EngineError(f"{self.name} {self.version()} {problem}", field=str(path), remedy=remedy)


def ranges(name: str, shape: Shape, profile: Profile, entries: int) -> tuple[Shape, ...]:
    """Smallest, best and largest shape of a graph input under a profile; fixed sizes stay as they are.

    entries: embeddings that nodes read from, or nodes of the pass whose hidden states they read, at most.
    """
    some: Shape = (1, entries, entries)
    axes: list[Shape] | None = {"embeddings": [some], "hidden": [(1, *profile.rows[1:]), some]}.get(name)
    if axes is None:
        axes = [profile.rows, profile.nodes, tuple(size // WORD for size in profile.columns)]
    return tuple(tuple(axes[i][which] if size < 0 else size for i, size in enumerate(shape)) for which in range(3))


def make_monitor(library: Any, what: str, say: Progress) -> Any:
    """A progress monitor that passes on the outer two levels of phases, and stops the build on Ctrl-C.

    `interrupted` on the result tells that it did: an exception must not cross the library's own frames.
    """

    class Monitor(library.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.interrupted = False
            self._phases: dict[str, tuple[int, int]] = {}  # depth and steps

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            self._phases[name] = (self._phases.get(parent, (0, 0))[0] + 1 if parent else 0, steps)
            self._report(name, 0)

        def step_complete(self, name: str, step: int) -> bool:
            self._report(name, step + 1)
            return not self.interrupted

        def phase_finish(self, name: str) -> None:
            self._report(name)

        def _report(self, name: str, done: int | None = None) -> None:
            depth, steps = self._phases.get(name, (2, 1))
            try:
                if depth < 2:
                    say(f"{what}: {name[0].lower()}{name[1:]}", steps if done is None else done, steps)
            except KeyboardInterrupt:
                self.interrupted = True

    return Monitor()
