"""A stand-in for TensorRT: ONNX Runtime behind the library's API, with host memory in place of device memory.

It is stricter than the library, to find mistakes: tensors that overlap, caches that are not written in place, inputs
that are NaN and shapes outside a profile are errors. An "engine" is a JSON text with an ONNX graph, the folder of its
weights, and the shapes of its inputs.
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
_TYPES = {"float": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "int32": "INT32", "int64": "INT64"}
_NUMPY = {"FLOAT": np.float32, "HALF": np.float16, "INT32": np.int32, "INT64": np.int64}
_NODES = ("rows", "nodes")
_FREE = ("entries", "earlier", "earlier rows")
_AXES = {  # names of the axes of a decoder's inputs; inputs of other graphs have only rows
    "embeddings": ("entries",),
    "hidden": ("earlier rows", "earlier"),
    "write": ("rows",),
    "seen": ("rows", "nodes", "words"),
    **dict.fromkeys(("token_ids", "hidden_ids", "position_ids", "logits", "hidden_states"), _NODES),
}


class _Graphs(Enum):
    DISABLED = 0
    WHOLE_GRAPH_CAPTURE = 1


class _Mode(Enum):
    INPUT = 1
    OUTPUT = 2


class _Type(Enum):
    FLOAT = 1
    HALF = 2
    INT64 = 3
    INT32 = 4
    BF16 = 5


class _Allocation(Enum):
    ON_PROFILE_CHANGE = 1


class _Logger:
    ERROR = "error"
    INTERNAL_ERROR = "internal error"


class _Context:
    def __init__(self, engine: _Engine) -> None:
        self.engine = engine
        self.profile = -1
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        assert stream == CUDA_STREAM
        self.profile = profile
        return 0 <= profile < self.engine.num_optimization_profiles

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        low, _, high = self.engine.profiles[self.profile][name]
        in_range = [minimum <= size <= maximum for size, minimum, maximum in zip(shape, low, high, strict=True)]
        assert all(in_range), (name, shape)
        self.shapes[name] = shape
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name in self.engine.inputs:
            return self.shapes[name]
        axis_sizes: dict[str | int, int] = {}
        for input_name, shape in self.shapes.items():
            for axis, size in zip(_AXES.get(input_name, ("rows",)), shape, strict=False):
                assert axis in _FREE or axis_sizes.setdefault(axis, size) == size, f"{input_name}: {axis}"
        axes = _AXES.get(name, ("rows",))
        return tuple(
            size if isinstance(size, int) else axis_sizes[axes[i]]
            for i, size in enumerate(self.engine.outputs[name].shape)
        )

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self.addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        assert stream_handle == CUDA_STREAM  # the default stream cannot be recorded
        engine = self.engine
        addresses = self.addresses
        views: dict[str, Array] = {}
        spans = []
        for name, address in addresses.items():
            shape = self.get_tensor_shape(name)
            dtype = np.dtype(_NUMPY[engine.get_tensor_dtype(name).name])
            size = int(np.prod(shape)) * dtype.itemsize
            views[name] = np.frombuffer((ctypes.c_char * size).from_address(address), dtype).reshape(shape)
            if name.startswith("present_"):
                assert address == addresses[name.replace("present", "past", 1)], f"{name}: not in place"
            else:
                spans.append((address, address + size, name))
        spans.sort()
        for (_, end, name), (start, _, next_name) in pairwise(spans):
            assert end <= start, f"{name} and {next_name} overlap"
        for name in engine.inputs.keys() - {"hidden"}:  # only some rows of `hidden` are read, and the others never set
            assert np.isfinite(views[name]).all(), name
        outputs = engine.session.run(list(engine.outputs), {name: views[name].copy() for name in engine.inputs})
        for name, array in zip(engine.outputs, outputs, strict=True):
            views[name][...] = array
        engine.runs.append((self.profile, dict(self.shapes)))
        return True


class HostKernels:
    """A runtime cache with a word for every context, as if for its compiled kernels; tests may add words."""

    version = "1"

    def __init__(self) -> None:
        self.kernels: set[str] = set()

    def serialize(self) -> bytes:
        return json.dumps([self.version, *sorted(self.kernels)]).encode()

    def deserialize(self, blob: bytes) -> bool:
        version, *kernels = json.loads(blob)
        self.kernels |= set(kernels) if version == self.version else set()
        return bool(version == self.version)


class _Config:
    def __init__(self, engine: _Engine) -> None:
        self.engine = engine
        self.strategy = _Allocation.ON_PROFILE_CHANGE
        self.cache: HostKernels | None = None
        self.cuda_graph_strategy = _Graphs.DISABLED

    def set_execution_context_allocation_strategy(self, strategy: _Allocation) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> HostKernels:
        self.engine.caches.append(HostKernels())
        return self.engine.caches[-1]

    def set_runtime_cache(self, cache: HostKernels) -> bool:
        self.cache = cache
        return True


class _Engine:
    def __init__(self, plan: dict[str, Any], library: HostLibrary) -> None:
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
        return _Mode.INPUT if name in self.inputs else _Mode.OUTPUT

    def get_tensor_dtype(self, name: str) -> Enum:
        return _Type[_TYPES[(self.inputs | self.outputs)[name].type[len("tensor(") : -1]]]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(size if isinstance(size, int) else -1 for size in (self.inputs | self.outputs)[name].shape)

    def create_runtime_config(self) -> _Config:
        return _Config(self)

    def create_execution_context(self, config: _Config) -> _Context:
        assert config.strategy is _Allocation.ON_PROFILE_CHANGE
        assert config.cache is not None
        assert config.cuda_graph_strategy is _Graphs.WHOLE_GRAPH_CAPTURE
        config.cache.kernels.add(f"{len(self.inputs)} {self.contexts}")
        self.contexts += 1
        return _Context(self)


class HostLibrary:
    """The part of TensorRT's API that runs engines.

    Attributes:
        engines: all engines, in the order of loading.
        caches: all runtime caches, in the order of creation.
    """

    __name__ = "host_tensorrt"
    __version__ = "1.0"
    ILogger = _Logger
    TensorIOMode = _Mode
    DataType = _Type
    ExecutionContextAllocationStrategy = _Allocation
    CudaGraphStrategy = _Graphs

    def __init__(self) -> None:
        self.engines: list[_Engine] = []
        self.caches: list[HostKernels] = []

    def Runtime(self, logger: Any) -> HostLibrary:  # noqa: N802
        self.logger = logger
        return self

    def deserialize_cuda_engine(self, plan: mmap.mmap) -> _Engine | None:
        try:
            self.engines.append(_Engine(json.loads(bytes(plan)), self))
        except ValueError:
            self.logger.log(_Logger.ERROR, "Serialization assertion failed")
            return None
        return self.engines[-1]


def write_plan(onnx: Path, inputs: Sequence[Inputs], plan: Path) -> Path:
    """Write the "engine" of a graph, whose weights, or a link to them, are in the graph's folder."""
    graph = base64.b64encode(onnx.read_bytes()).decode()
    folder = onnx.with_suffix(".onnx.data").resolve().parent
    plan.write_text(json.dumps({"graph": graph, "folder": str(folder), "inputs": inputs}))
    return plan
