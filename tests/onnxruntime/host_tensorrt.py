"""A stand-in for a GPU and TensorRT: host memory behind the device's protocol, ONNX Runtime behind the library's API.

Stricter than the real ones where that finds mistakes: everything happens as late as it may (at `synchronise`), new
memory is full of NaNs, an address outside what was allocated, tensors that overlap, bytes of another type than the
graph reads and shapes outside a profile are refused. A "plan" is a JSON text that names an ONNX file and its profiles.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from lantern_rt.engines.profiles import Profile
from lantern_rt.engines.trt.cuda import ALIGNMENT

Array = np.ndarray[Any, Any]
_TYPES = {"tensor(float)": "FLOAT", "tensor(float16)": "HALF", "tensor(int64)": "INT64"}
_NUMPY = {"FLOAT": np.float32, "HALF": np.float16, "INT64": np.int64}


class HostMemory:
    """Host memory that is used as a device's: by address, late, in order."""

    stream = 7

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.blocks: dict[int, Array] = {}
        self.kinds: dict[int, np.dtype[Any]] = {}  # of arrays as they were uploaded, by address
        self.late: list[Callable[[], None]] = []
        self.copies = 0

    def use(self) -> None:
        pass

    def allocate(self, size: int) -> int:
        block = np.full(size + ALIGNMENT, 0xFF, np.uint8)  # NaN in every float type
        address = -(-block.ctypes.data // ALIGNMENT) * ALIGNMENT
        self.blocks[address] = block[address - block.ctypes.data :][:size]
        return address

    def free(self, address: int) -> None:
        block = self.blocks.pop(address)
        self.late.append(lambda: block.fill(0xFF))  # what is asked for before still finds it

    def upload(self, target: int, source: Array) -> None:
        assert source.flags.c_contiguous
        room = self.view(target, source.nbytes)

        def copy() -> None:
            room[:] = source.reshape(-1).view(np.uint8)
            self.kinds[target] = source.dtype

        self.late.append(copy)

    def download(self, target: Array, source: int) -> None:
        assert target.flags.c_contiguous
        found, room = self.view(source, target.nbytes), target.reshape(-1).view(np.uint8)
        self.late.append(lambda: room.__setitem__(slice(None), found))

    def copy2d(self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int) -> None:
        assert width <= min(target_pitch, source_pitch) or height == 1
        self.copies += 1
        for line in range(height):
            goal, start = self.view(target + line * target_pitch, width), self.view(source + line * source_pitch, width)
            self.late.append(lambda goal=goal, start=start: goal.__setitem__(slice(None), start))  # type: ignore[misc]

    def zero(self, target: int, size: int) -> None:
        room = self.view(target, size)
        self.late.append(lambda: room.fill(0))

    def synchronise(self) -> None:
        waiting, self.late = self.late, []
        for action in waiting:
            action()

    def view(self, address: int, size: int) -> Array:
        """The bytes at an address; they must lie in one block that is still allocated."""
        for start, block in self.blocks.items():
            if start <= address and address + size <= start + len(block):
                return block[address - start :][:size]
        raise AssertionError(f"{size} bytes at {address:#x}: outside of what is allocated")


class _Mode(Enum):
    INPUT = 1
    OUTPUT = 2


class _Type(Enum):
    FLOAT = 1
    HALF = 2
    INT64 = 3


class _Allocation(Enum):
    USER_MANAGED = 1


class _Logger:
    ERROR, INTERNAL_ERROR = "error", "internal error"


class _Context:
    def __init__(self, engine: _Engine) -> None:
        self.engine, self.profile = engine, -1
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.memory: tuple[int, int] | None = None

    def set_device_memory(self, address: int, size: int) -> None:
        if size < self.engine.device_memory_size_v2 or address % ALIGNMENT:
            self.engine.complain(f"{size} bytes at {address:#x} are no memory for intermediate results")
        self.memory = (address, size)

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        assert stream == self.engine.memory.stream
        self.profile = profile
        return 0 <= profile < self.engine.num_optimization_profiles

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self.profile >= 0
        assert name in self.engine.inputs
        profile = self.engine.profiles[self.profile]
        rows, nodes, past = ((one[0], one[2]) for one in (profile.rows, profile.nodes, profile.past))
        columns = past[0] + nodes[0], past[1] + nodes[1]
        sizes = {"nodes": nodes, "past": past, "columns": columns, "past + nodes": columns}
        axes = self.engine.inputs[name].shape
        bounds = [(axis, axis) if isinstance(axis, int) else sizes.get(axis, rows) for axis in axes]
        if len(shape) != len(axes) or not all(low <= n <= high for n, (low, high) in zip(shape, bounds, strict=True)):
            return self.engine.complain(f"{name}: {shape} does not satisfy {bounds}")
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert name in {*self.engine.inputs, *self.engine.outputs}
        if address == 0 or address % ALIGNMENT:
            return self.engine.complain(f"{name}: {address:#x} is no address of a tensor")
        self.addresses[name] = address
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name in self.engine.inputs:
            return self.shapes[name]
        sizes: dict[str, int] = {}
        for value in self.engine.inputs.values():
            for symbol, size in zip(value.shape, self.shapes[value.name], strict=True):
                if isinstance(symbol, str):
                    assert sizes.setdefault(symbol, size) == size, f"{value.name}: {symbol}"
        if "columns" in sizes:
            assert sizes["columns"] == sizes["past"] + sizes["nodes"]
        return tuple(sizes[size] if isinstance(size, str) else size for size in self.engine.outputs[name].shape)

    def execute_async_v3(self, stream: int) -> bool:
        engine, memory = self.engine, self.engine.memory
        assert stream == memory.stream
        if self.memory is None:
            return engine.complain("no memory was set")
        memory.view(*self.memory)
        if missing := sorted({*engine.inputs, *engine.outputs} - self.addresses.keys()):
            return engine.complain(f"{missing[0]}: no address")
        if missing := sorted(engine.inputs.keys() - self.shapes.keys()):
            return engine.complain(f"{missing[0]}: no shape")
        views: dict[str, Array] = {}
        spans = [(self.memory[0], sum(self.memory), "intermediate results")]
        for name in self.addresses:
            shape, dtype = self.get_tensor_shape(name), _NUMPY[engine.get_tensor_dtype(name).name]
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            views[name] = memory.view(self.addresses[name], size).view(dtype).reshape(shape)
            spans.append((self.addresses[name], self.addresses[name] + size, name))
        spans.sort()
        for (_, end, one), (start, _, other) in pairwise(spans):
            assert end <= start, f"{one} and {other} overlap"
        kinds = {name: self.addresses[name] for name in engine.inputs if not name.startswith("past_")}
        scratch = memory.view(*self.memory)

        def run() -> None:
            scratch.fill(0xA5)
            for name, address in kinds.items():
                assert memory.kinds[address] == views[name].dtype, name
            for name in engine.inputs:
                assert np.isfinite(views[name]).all(), name
            found = engine.session.run(list(engine.outputs), {name: views[name].copy() for name in engine.inputs})
            for name, array in zip(engine.outputs, found, strict=True):
                views[name][...] = array

        engine.runs.append((self.profile, dict(self.shapes)))
        memory.late.append(run)
        return True


class _Engine:
    device_memory_size_v2 = 1000

    def __init__(self, plan: dict[str, Any], library: HostLibrary) -> None:
        self.memory, self.logger = library.memory, library.logger
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(plan["onnx"], options, providers=["CPUExecutionProvider"])
        self.inputs = {value.name: value for value in self.session.get_inputs()}
        self.outputs = {value.name: value for value in self.session.get_outputs()}
        self.profiles = [Profile.model_validate_json(json.dumps(profile)) for profile in plan["profiles"]]
        self.num_optimization_profiles = len(self.profiles)
        self.num_io_tensors = len(self.inputs) + len(self.outputs)
        self.runs: list[tuple[int, dict[str, tuple[int, ...]]]] = []
        self.contexts: weakref.WeakSet[_Context] = weakref.WeakSet()

    def get_tensor_name(self, index: int) -> str:
        return [*self.inputs, *self.outputs][index]

    def get_tensor_mode(self, name: str) -> Enum:
        return _Mode.INPUT if name in self.inputs else _Mode.OUTPUT

    def get_tensor_dtype(self, name: str) -> Enum:
        return _Type[_TYPES[(self.inputs | self.outputs)[name].type]]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(size if isinstance(size, int) else -1 for size in (self.inputs | self.outputs)[name].shape)

    def create_execution_context(self, allocation: Enum) -> _Context:
        assert allocation is _Allocation.USER_MANAGED
        context = _Context(self)
        self.contexts.add(context)
        return context

    def complain(self, text: str) -> bool:
        self.logger.log(_Logger.ERROR, text)
        return False


class HostLibrary:
    """A module with the part of TensorRT's API that runs plans. `engines` are those loaded, in order."""

    __name__, __version__ = "host_tensorrt", "1.0"
    ILogger = _Logger
    TensorIOMode, DataType, ExecutionContextAllocationStrategy = _Mode, _Type, _Allocation

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self.engines: list[_Engine] = []

    def Runtime(self, logger: Any) -> HostLibrary:  # noqa: N802
        self.logger = logger
        return self

    def deserialize_cuda_engine(self, plan: bytes) -> _Engine | None:
        try:
            self.engines.append(_Engine(json.loads(plan), self))
        except ValueError:
            self.logger.log(_Logger.ERROR, "Serialization assertion failed")
            return None
        return self.engines[-1]


def write_plan(onnx: Path, profiles: Sequence[Profile], plan: Path) -> Path:
    """The "plan" of a graph."""
    described = [profile.model_dump(mode="json") for profile in profiles]
    plan.write_text(json.dumps({"onnx": str(onnx), "profiles": described}))
    return plan
