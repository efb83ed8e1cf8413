"""A stand-in for a GPU and TensorRT: host memory behind the device's protocol, ONNX Runtime behind the library's API.

Stricter than the real ones where that finds mistakes: everything happens as late as it may (at `synchronise`), new
memory is full of NaNs, an address outside what was allocated, tensors that overlap, copies that read what they write,
caches that are not written in place and shapes outside a profile are refused. A "plan" is a JSON text of an ONNX
graph, the folder of its weights, and its profiles.
"""

from __future__ import annotations

import base64
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

from lantern_rt.engines.device_graph import WORD
from lantern_rt.engines.profiles import Profile
from lantern_rt.engines.trt.cuda import ALIGNMENT, Lines

Array = np.ndarray[Any, Any]
_TYPES = {"float": "FLOAT", "float16": "HALF", "int32": "INT32", "int64": "INT64"}
_NUMPY = {"FLOAT": np.float32, "HALF": np.float16, "INT32": np.int32, "INT64": np.int64}
_NODES = ("rows", "nodes")
_AXES = {  # of a decoder's inputs; other graphs have rows only
    "embeddings": ("entries",),
    "hidden": (1, "entries"),
    "write": ("rows",),
    "seen": ("rows", "nodes", "words"),
    **dict.fromkeys(("token_ids", "hidden_ids", "position_ids", "logits", "hidden_states"), _NODES),
}


class HostMemory:
    """Host memory that is used as a device's: by address, late, in order."""

    stream = 7

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.blocks: dict[int, Array] = {}
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
        self.late.append(lambda: room.__setitem__(slice(None), source.reshape(-1).view(np.uint8)))

    def download(self, target: Array, source: int) -> None:
        assert target.flags.c_contiguous
        found, room = self.view(source, target.nbytes), target.reshape(-1).view(np.uint8)
        self.late.append(lambda: room.__setitem__(slice(None), found))

    def copy(self, target: Lines, source: Lines, width: int, height: int, depth: int = 1) -> None:
        assert width <= min(target.pitch, source.pitch)
        assert height <= min(target.height, source.height)
        self.copies += 1
        places = [(slice_, line) for slice_ in range(depth) for line in range(height)]
        goals, starts = (
            [one.address + (slice_ * one.height + line) * one.pitch for slice_, line in places]
            for one in (target, source)
        )
        ends = sorted([*((start, 0) for start in starts), *((goal, 1) for goal in goals)])
        for (first, kind), (second, other) in pairwise(ends):
            assert kind == other or first + width <= second, "a copy reads what it writes"
        views = [(self.view(goal, width), self.view(start, width)) for goal, start in zip(goals, starts, strict=True)]

        def copy() -> None:
            for goal, start in views:
                goal[:] = start

        self.late.append(copy)

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
    INT32 = 4


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
        profile, fixed = self.engine.profiles[self.profile], self.engine.inputs[name].shape
        rows, nodes, columns = ((one[0], one[2]) for one in (profile.rows, profile.nodes, profile.columns))
        words, entries = (columns[0] // WORD, columns[1] // WORD), (1, max(20_000, rows[1] * nodes[1]))
        sizes = {"rows": rows, "nodes": nodes, "words": words, "entries": entries, 1: (1, 1)}
        named = _AXES.get(name, ("rows",))
        bounds = [
            (size, size) if isinstance(size, int) else sizes[named[i] if i < len(named) else "rows"]
            for i, size in enumerate(fixed)
        ]
        if len(shape) != len(bounds) or not all(low <= n <= high for n, (low, high) in zip(shape, bounds, strict=True)):
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
        known: dict[str | int, int] = {}
        for one, shape in self.shapes.items():
            for axis, size in zip(_AXES.get(one, ("rows",)), shape, strict=False):
                assert axis == "entries" or known.setdefault(axis, size) == size, f"{one}: {axis}"
        named = _AXES.get(name, ("rows",))
        return tuple(
            size if isinstance(size, int) else known[named[i]] for i, size in enumerate(self.engine.outputs[name].shape)
        )

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
        for name, address in self.addresses.items():
            shape, dtype = self.get_tensor_shape(name), _NUMPY[engine.get_tensor_dtype(name).name]
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            views[name] = memory.view(address, size).view(dtype).reshape(shape)
            if name.startswith("present_"):
                assert address == self.addresses[name.replace("present", "past", 1)], f"{name}: not in place"
            else:
                spans.append((address, address + size, name))
        spans.sort()
        for (_, end, one), (start, _, other) in pairwise(spans):
            assert end <= start, f"{one} and {other} overlap"
        scratch = memory.view(*self.memory)

        def run() -> None:
            scratch.fill(0xA5)
            for name in engine.inputs.keys() - {"hidden"}:  # of which only some rows are read, and the others never set
                assert np.isfinite(views[name]).all(), name
            found = engine.session.run(list(engine.outputs), {name: views[name].copy() for name in engine.inputs})
            for name, array in zip(engine.outputs, found, strict=True):
                views[name][...] = array

        engine.runs.append((self.profile, dict(self.shapes)))
        memory.late.append(run)
        return True


class HostKernels:
    """A runtime cache: a word for every context that was made, and those that a test says were compiled later."""

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
        self.engine, self.strategy = engine, _Allocation.USER_MANAGED
        self.cache: HostKernels | None = None

    def set_execution_context_allocation_strategy(self, strategy: _Allocation) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> HostKernels:
        self.engine.caches.append(HostKernels())
        return self.engine.caches[-1]

    def set_runtime_cache(self, cache: HostKernels) -> bool:
        self.cache = cache
        return True


class _Engine:
    device_memory_size_v2 = 1000

    def __init__(self, plan: dict[str, Any], library: HostLibrary) -> None:
        self.memory, self.logger, self.caches = library.memory, library.logger, library.caches
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        graph = base64.b64decode(plan["graph"])
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", plan["folder"])
        self.session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
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
        return _Type[_TYPES[(self.inputs | self.outputs)[name].type[len("tensor(") : -1]]]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(size if isinstance(size, int) else -1 for size in (self.inputs | self.outputs)[name].shape)

    def create_runtime_config(self) -> _Config:
        return _Config(self)

    def create_execution_context(self, chosen: Enum | _Config) -> _Context:
        if isinstance(chosen, _Config):
            assert chosen.strategy is _Allocation.USER_MANAGED
            assert chosen.cache is not None
            chosen.cache.kernels.add(f"{len(self.inputs)} {len(self.contexts)}")
        else:
            assert chosen is _Allocation.USER_MANAGED
        context = _Context(self)
        self.contexts.add(context)
        return context

    def complain(self, text: str) -> bool:
        self.logger.log(_Logger.ERROR, text)
        return False


class HostLibrary:
    """A module with the part of TensorRT's API that runs plans. `engines` and `caches`: those made, in order."""

    __name__, __version__ = "host_tensorrt", "1.0"
    ILogger = _Logger
    TensorIOMode, DataType, ExecutionContextAllocationStrategy = _Mode, _Type, _Allocation

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self.engines: list[_Engine] = []
        self.caches: list[HostKernels] = []

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


def write_plan(onnx: Path, profiles: Sequence[Profile], plan: Path, model: bytes | None = None) -> Path:
    """The "plan" of a graph, or of a `model` with the graph's weights."""
    described = [profile.model_dump(mode="json") for profile in profiles]
    graph = base64.b64encode(model or onnx.read_bytes()).decode()
    plan.write_text(json.dumps({"graph": graph, "folder": str(onnx.parent), "profiles": described}))
    return plan
