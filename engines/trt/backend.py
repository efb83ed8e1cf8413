"""Loader of engine folders, for TensorRT and TensorRT-RTX, whose Python API is largely the same."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from ...bundle.files import Bundle
from ...bundle.manifest import DecoderSizes
from ...errors import EngineError
from ...runtime.engine import Engine, Floats
from ..contracts import Function, TensorSpec
from ..engine_folder import EngineFolder
from ..gpu import find_gpu
from ..ort.backend import OrtGraphLoader
from ..ort.device import OrtDevice
from ..ort.providers import ON_CPU
from .builder import import_library
from .engine import TensorRTEngine, TensorRTFunction
from .executable import KernelCache, TensorRTExecutable

MEMORY = "cuda"  # execution provider of ONNX Runtime that allocates the device memory for TensorRT engines


class TensorRTGraphLoader(OrtGraphLoader):
    """Loader of TensorRT engines of a checked folder on the first GPU, and of graphs without an engine on the CPU."""

    def __init__(self, library: Any, bundle: Bundle, folder: EngineFolder, threads: int) -> None:
        super().__init__(bundle, threads, ON_CPU)
        self._library = library
        self._gpu = OrtDevice(MEMORY)
        self._folder = folder
        self._gpu.zeros((1,), "float32")  # raises now if the provider cannot be loaded
        self._kernels = KernelCache(folder)
        weakref.finalize(self, self._kernels.save)  # at the end, as TensorRT-RTX compiles kernels while engines run

    def load_decoder(self, spec: DecoderSizes, code_embeddings: Floats | None) -> Engine:
        roles = self._bundle.manifest.list_graphs_of_decoder(spec.role)
        return TensorRTEngine([*map(self._load_executable, roles)], spec, code_embeddings, self._gpu)

    def load_graph_function(self, role: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Function:
        if role not in self._folder.manifest.graphs:
            return super().load_graph_function(role, inputs, outputs)
        return TensorRTFunction(self._load_executable(role), inputs, outputs, self._gpu).run

    def _load_executable(self, role: str) -> TensorRTExecutable:
        folder = self._folder
        if role not in folder.manifest.graphs:
            raise folder.make_mismatch_error(f"no engine for the {role}", "an engine for each decoder")
        profiles = folder.manifest.graphs[role].profiles
        return TensorRTExecutable(
            self._library, folder.engine_path(role), profiles, folder.rebuild_command, self._kernels
        )


def open_tensorrt_folder(bundle: Bundle, folder: EngineFolder, threads: int) -> OrtGraphLoader:
    """Return a loader of an engine folder, after checking that it fits bundle, library and GPU and is unaltered."""
    built = folder.manifest
    library = import_library(built.backend)
    gpu = find_gpu()
    built_for = ", ".join(built.compute_capabilities)
    if gpu is None:
        raise EngineError(
            field=str(folder.folder),
            found="no NVIDIA GPU and driver",
            expected=f"a GPU of {built_for}",
            remedy="run without --engines, or on a host with such a GPU",
        )
    if gpu.compute_capability not in built.compute_capabilities:
        raise folder.make_mismatch_error(f"engines for {built_for}", f"{gpu.compute_capability}, the GPU of this host")
    if built.gpu not in (None, gpu.name):
        raise folder.make_mismatch_error(f"engines for {built.gpu}", f"{gpu.name}, the GPU of this host")
    folder.check_compatibility(bundle, str(library.__version__))
    return TensorRTGraphLoader(library, bundle, folder, threads)
