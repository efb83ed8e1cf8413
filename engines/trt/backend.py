"""Plans of TensorRT and TensorRT-RTX to engines, through the API both share."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from ...bundle.files import Bundle
from ...bundle.manifest import DecoderSpec, DrafterSpec
from ...errors import EngineError
from ...runtime.engine import Engine, Floats
from ..contracts import Function, Tensor
from ..engine_folder import EngineFolder
from ..gpu import find_gpu
from ..ort.backend import OrtGraphs
from ..ort.device import Device
from ..ort.providers import ON_CPU
from .builder import import_library
from .engine import TensorRTEngine, TensorRTFunction
from .executable import KernelCache, TensorRTExecutable

MEMORY = "cuda"  # the provider of ONNX Runtime whose memory plans run on


class TensorRTGraphs(OrtGraphs):
    """The plans of an engine folder on the first GPU, and graphs that were not built on the CPU.

    Raises: EngineError unless ONNX Runtime has the GPU's memory.
    """

    def __init__(self, library: Any, bundle: Bundle, folder: EngineFolder, threads: int) -> None:
        super().__init__(bundle, threads, ON_CPU)
        self._library, self._gpu, self._plans = library, Device(MEMORY), folder
        self._gpu.zeros((1,), "float32")  # loads the provider, or says why it does not
        self._kernels = KernelCache(folder)
        weakref.finalize(self, self._kernels.save)  # some are compiled while plans run

    def decoder(self, role: str, spec: DecoderSpec | DrafterSpec, code_embeddings: Floats | None) -> Engine:
        return TensorRTEngine(self._plan(role), spec, code_embeddings, self._gpu)

    def function(self, role: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Function:
        if role not in self._plans.manifest.graphs:
            return super().function(role, inputs, outputs)
        return TensorRTFunction(self._plan(role), inputs, outputs, self._gpu).run

    def _plan(self, role: str) -> TensorRTExecutable:
        plans = self._plans
        if role not in plans.manifest.graphs:
            raise plans.mismatch_error(f"no plan of the {role}", "one")
        profiles = plans.manifest.graphs[role].profiles
        return TensorRTExecutable(self._library, plans.path(role), profiles, plans.rebuild_command, self._kernels)


def open_tensorrt(bundle: Bundle, folder: EngineFolder, threads: int) -> OrtGraphs:
    """The plans on the first GPU; the condition graph on the CPU.

    Raises:
        EngineError: the plans are not this bundle's, library's or GPU's, or altered.
    """
    library, gpu, built = import_library(folder.manifest.backend), find_gpu(), folder.manifest
    built_for = ", ".join(built.compute_capabilities)
    if gpu is None:
        raise EngineError(
            field=str(folder.folder),
            found="no NVIDIA GPU and driver",
            expected=f"a GPU of {built_for}",
            remedy="run without --engines, or on a host that has one",
        )
    if gpu.compute_capability not in built.compute_capabilities:
        raise folder.mismatch_error(f"engines for {built_for}", f"{gpu.compute_capability}, the GPU of this host")
    if built.gpu not in (None, gpu.name):
        raise folder.mismatch_error(f"engines for {built.gpu}", f"{gpu.name}, the GPU of this host")
    folder.check(bundle, str(library.__version__))
    return TensorRTGraphs(library, bundle, folder, threads)
