"""Stand-in for TensorRT: the API of the library, implemented with ONNX Runtime and host memory.

The stand-in is stricter than TensorRT, to find mistakes. Errors are: tensors that overlap in memory, KV caches that are
not written in place, inputs with NaN, and shapes outside the profile. An engine file is a JSON text with an ONNX graph,
the folder of the weights, and the shapes of the inputs.
"""

from __future__ import annotations

import base64
import ctypes
import json
import mmap
from collections.abc import Sequence
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from lantern_rt.engines.ort.providers import CUDA_STREAM
from lantern_rt.engines.trt.builder import Inputs

Array = np.ndarray[Any, Any]
_TENSORRT_TYPES = {"float": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "int32": "INT32", "int64": "INT64"}
_NUMPY_TYPES = {"FLOAT": np.float32, "HALF": np.float16, "INT32": np.int32, "INT64": np.int64}
_NODE_AXES = ("rows", "nodes")
_UNCONSTRAINED_AXES = ("entries", "earlier", "earlier rows")
_AXIS_NAMES = {  # axis names of the tensors of a decoder; tensors that are not listed have the axis `rows` first
    "embeddings": ("entries",),
    "hidden": ("earlier rows", "earlier"),
    "write": ("rows",),
    "seen": ("rows", "nodes", "words"),
    **dict.fromkeys(("token_ids", "hidden_ids", "position_ids", "logits", "hidden_states"), _NODE_AXES),
}


_CudaGraphStrategy = Enum("_CudaGraphStrategy", ("DISABLED", "WHOLE_GRAPH_CAPTURE"))
_TensorIOMode = Enum("_TensorIOMode", ("INPUT", "OUTPUT"))
_DataType = Enum("_DataType", ("FLOAT", "HALF", "INT64", "INT32", "BF16"))
_AllocationStrategy = Enum("_AllocationStrategy", ("ON_PROFILE_CHANGE",))


class _ILogger:
    ERROR = "error"
    INTERNAL_ERROR = "internal error"


class _ExecutionContext:
    """Implementation of `IExecutionContext`, which runs an engine."""

    def __init__(self, engine: _CudaEngine) -> None:
        self.engine = engine
        self.profile = -1
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        assert stream == CUDA_STREAM
        self.profile = profile
        return 0 <= profile < self.engine.num_optimization_profiles

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        min_shape, _, max_shape = self.engine.profiles[self.profile][name]
        bounds = zip(shape, min_shape, max_shape, strict=True)
        in_range = [minimum <= size <= maximum for size, minimum, maximum in bounds]
        assert all(in_range), (name, shape)
        self.shapes[name] = shape
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name in self.engine.inputs:
            return self.shapes[name]
        axis_sizes: dict[str | int, int] = {}
        for input_name, shape in self.shapes.items():
            for axis, size in zip(_AXIS_NAMES.get(input_name, ("rows",)), shape, strict=False):
                assert axis in _UNCONSTRAINED_AXES or axis_sizes.setdefault(axis, size) == size, f"{input_name}: {axis}"
        axes = _AXIS_NAMES.get(name, ("rows",))
        return tuple(
            size if isinstance(size, int) else axis_sizes[axes[i]]
            for i, size in enumerate(self.engine.outputs[name].shape)
        )

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self.addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        assert stream_handle == CUDA_STREAM  # CUDA cannot record the default stream into a graph
        engine = self.engine
        addresses = self.addresses
        views: dict[str, Array] = {}
        memory_ranges = []
        for name, address in addresses.items():
            shape = self.get_tensor_shape(name)
            dtype = np.dtype(_NUMPY_TYPES[engine.get_tensor_dtype(name).name])
            size = int(np.prod(shape)) * dtype.itemsize
            views[name] = np.frombuffer((ctypes.c_char * size).from_address(address), dtype).reshape(shape)
            if name.startswith("present_"):
                assert address == addresses[name.replace("present", "past", 1)], f"{name}: not in place"
            else:
                memory_ranges.append((address, address + size, name))
        memory_ranges.sort()
        for (_, end, name), (start, _, next_name) in pairwise(memory_ranges):
            assert end <= start, f"{name} and {next_name} overlap"
        # A pass reads some rows of `hidden`; the other rows may be uninitialized.
        for name in engine.inputs.keys() - {"hidden"}:
            assert np.isfinite(views[name]).all(), name
        outputs = engine.session.run(list(engine.outputs), {name: views[name].copy() for name in engine.inputs})
        for name, array in zip(engine.outputs, outputs, strict=True):
            views[name][...] = array
        engine.runs.append((self.profile, dict(self.shapes)))
        return True


class HostRuntimeCache:
    """Implementation of `IRuntimeCache`, which stores texts instead of compiled kernels, one for each context."""

    version = "1"

    def __init__(self) -> None:
        self.kernels: set[str] = set()

    def serialize(self) -> bytes:
        return json.dumps([self.version, *sorted(self.kernels)]).encode()

    def deserialize(self, data: bytes) -> bool:
        version, *kernels = json.loads(data)
        self.kernels |= set(kernels) if version == self.version else set()
        return bool(version == self.version)


class _RuntimeConfig:
    """Implementation of `IRuntimeConfig`, the options of an execution context."""

    def __init__(self, engine: _CudaEngine) -> None:
        self.engine = engine
        self.allocation_strategy = _AllocationStrategy.ON_PROFILE_CHANGE
        self.cache: HostRuntimeCache | None = None
        self.cuda_graph_strategy = _CudaGraphStrategy.DISABLED

    def set_execution_context_allocation_strategy(self, strategy: _AllocationStrategy) -> None:
        self.allocation_strategy = strategy

    def create_runtime_cache(self) -> HostRuntimeCache:
        self.engine.caches.append(HostRuntimeCache())
        return self.engine.caches[-1]

    def set_runtime_cache(self, cache: HostRuntimeCache) -> bool:
        self.cache = cache
        return True


class _CudaEngine:
    """Implementation of `ICudaEngine`. `runs` records the profile number and the input shapes of every run."""

    def __init__(self, plan: dict[str, Any], library: HostTensorRT) -> None:
        self.logger = library.logger
        self.caches = library.caches
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        graph = base64.b64decode(plan["graph"])
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", plan["folder"])
        self.session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        self.inputs = {value.name: value for value in self.session.get_inputs()}
        self.outputs = {value.name: value for value in self.session.get_outputs()}
        self.profiles: list[Inputs] = plan["inputs"]
        self.num_optimization_profiles = len(self.profiles)
        self.num_io_tensors = len(self.inputs) + len(self.outputs)
        self.runs: list[tuple[int, dict[str, tuple[int, ...]]]] = []
        self.contexts = 0

    def get_tensor_name(self, index: int) -> str:
        return [*self.inputs, *self.outputs][index]

    def get_tensor_mode(self, name: str) -> Enum:
        return _TensorIOMode.INPUT if name in self.inputs else _TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> Enum:
        return _DataType[_TENSORRT_TYPES[(self.inputs | self.outputs)[name].type[len("tensor(") : -1]]]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(size if isinstance(size, int) else -1 for size in (self.inputs | self.outputs)[name].shape)

    def create_runtime_config(self) -> _RuntimeConfig:
        return _RuntimeConfig(self)

    def create_execution_context(self, config: _RuntimeConfig) -> _ExecutionContext:
        assert config.allocation_strategy is _AllocationStrategy.ON_PROFILE_CHANGE
        assert config.cache is not None
        assert config.cuda_graph_strategy is _CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        config.cache.kernels.add(f"{len(self.inputs)} {self.contexts}")
        self.contexts += 1
        return _ExecutionContext(self)


class HostTensorRT:
    """Stand-in for the Python module of TensorRT, with the classes and functions that run engines."""

    __name__ = "host_tensorrt"
    __version__ = "1.0"
    ILogger = _ILogger
    TensorIOMode = _TensorIOMode
    DataType = _DataType
    ExecutionContextAllocationStrategy = _AllocationStrategy
    CudaGraphStrategy = _CudaGraphStrategy

    def __init__(self) -> None:
        self.engines: list[_CudaEngine] = []
        self.caches: list[HostRuntimeCache] = []

    def Runtime(self, logger: Any) -> HostTensorRT:  # noqa: N802
        self.logger = logger
        return self

    def deserialize_cuda_engine(self, plan: mmap.mmap) -> _CudaEngine | None:
        try:
            self.engines.append(_CudaEngine(json.loads(bytes(plan)), self))
        except ValueError:
            self.logger.log(_ILogger.ERROR, "Serialization assertion failed")
            return None
        return self.engines[-1]


def write_engine_file(graph_path: Path, inputs: Sequence[Inputs], engine_path: Path) -> Path:
    graph = base64.b64encode(graph_path.read_bytes()).decode()
    folder = graph_path.with_suffix(".onnx.data").resolve().parent
    engine_path.write_text(json.dumps({"graph": graph, "folder": str(folder), "inputs": inputs}))
    return engine_path
