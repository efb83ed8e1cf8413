"""TensorRT and TensorRT-RTX as backends: plans to engines, through the API both share.

TensorRT builds on and for the GPU of this host; TensorRT-RTX builds ahead of time for the compute capabilities asked
for, on a host without any GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from ...bundle.files import Bundle
from ...bundle.manifest import DecoderSpec, DrafterSpec
from ...errors import EngineError, RequestError
from ...inputs import short
from ...runtime.engine import Engine, Floats
from ..contracts import Function, Tensor
from ..engine_folder import EngineFolder
from ..gpu import Stream, find_gpu
from ..ort.backend import OrtGraphs
from ..ort.device import Device
from ..ort.providers import ON_CPU
from ..profiles import BuildOptions
from .builder import MODULES, RTX, import_library
from .engine import TensorRTEngine, TensorRTFunction
from .plan import Kernels, Plan

MEMORY = "cuda"  # the provider of ONNX Runtime whose memory plans run on


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
        return Plan(self._library, plans.path(role), profiles, plans.rebuild, Stream(), self._kernels)


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
        if self.name == RTX:
            remedy = "give --compute-capability, such as SM89"
        raise EngineError(field=self.name, found="no NVIDIA GPU and driver", remedy=remedy)

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
        if folder.manifest.gpu not in (None, gpu.name):
            raise folder.other(f"engines for {folder.manifest.gpu}", f"{gpu.name}, the GPU of this host")
        folder.check(bundle, self.version())
        return TensorRTGraphs(library, bundle, folder, threads)
