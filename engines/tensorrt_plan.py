"""One TensorRT or TensorRT-RTX plan, loaded: its tensors checked, and run on device memory by address.

A plan has optimisation profiles, ranges of shapes it was built for. Each has an execution context of its own, made
when first needed; within a profile, shapes and addresses are set again only where they differ from the last run.

Does not know what a graph is for, nor where its tensors lie.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import EngineError
from .cuda_memory import DeviceMemory
from .onnxruntime_session import Tensor
from .profiles import Profile
from .tensorrt_library import Messages, make_logger

Shape = tuple[int, ...]
Place = tuple[Shape, int]  # a tensor's shape and its address


@dataclass(frozen=True)
class PlanSource:
    """Where a plan comes from: its file, the ranges it was built for, and the command that builds it again."""

    path: Path
    profiles: tuple[Profile, ...]
    rebuild: str


class Plan:
    """A plan on a device. Several threads may run it; each run waits for its turn in the device's stream.

    EngineError if the library does not load the plan, or if its tensors are others than expected.
    """

    def __init__(
        self,
        library: Any,
        memory: DeviceMemory,
        source: PlanSource,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> None:
        self.source, self.memory = source, memory
        self._library, self._messages = library, Messages()
        self._logger = make_logger(library, self._messages)  # the library keeps no reference of its own
        self._lock = threading.Lock()
        memory.use()
        try:
            self._runtime = library.Runtime(self._logger)
            self._engine = self._runtime.deserialize_cuda_engine(source.path.read_bytes())
        except (TypeError, RuntimeError) as error:  # what the bindings raise where the library returns nothing
            raise self._failure(f"does not load this plan ({' '.join(str(error).split())[:200]})") from error
        except OSError as error:
            raise EngineError(f"{source.path}: cannot be read ({error.strerror or error})") from error
        if self._engine is None:
            raise self._failure("does not load this plan")
        if (found := self._engine.num_optimization_profiles) != len(source.profiles):
            raise self._other(f"{found} profiles", f"{len(source.profiles)}, those of engine.json")
        self.dtypes = self._check(inputs, outputs)
        self._inputs, self._outputs = [t.name for t in inputs], [t.name for t in outputs]
        self._contexts: dict[int, Any] = {}
        self._set: dict[int, dict[str, Place]] = {}

    def enqueue(self, profile: int, inputs: Mapping[str, Place], outputs: Mapping[str, Place]) -> None:
        """Ask for one run within a profile; it happens in the order of the memory's stream."""
        with self._lock:
            self._messages.errors.clear()
            context = self._context(profile)
            last = self._set.pop(profile, {})  # kept only if everything below succeeds
            reshaped = False
            for name, (shape, address) in inputs.items():
                shape_before, address_before = last.get(name, (None, None))
                if shape != shape_before:
                    reshaped = True
                    self._do(context.set_input_shape(name, shape), f"take `{name}` as {list(shape)}")
                if address != address_before:
                    self._do(context.set_tensor_address(name, address), f"take an address for `{name}`")
            for name, (shape, address) in outputs.items():
                if reshaped and (found := tuple(context.get_tensor_shape(name))) != shape:
                    raise self._other(f"`{name}` as {list(found)}", f"{list(shape)}")
                if address != last.get(name, (None, None))[1]:
                    self._do(context.set_tensor_address(name, address), f"take an address for `{name}`")
            self._do(context.execute_async_v3(self.memory.stream), "run this plan")
            self._set[profile] = {**inputs, **outputs}

    def _context(self, profile: int) -> Any:
        if profile not in self._contexts:
            self.memory.use()
            strategy = self._library.ExecutionContextAllocationStrategy.ON_PROFILE_CHANGE  # this profile's need only
            context = self._engine.create_execution_context(strategy)
            if context is None:
                raise self._failure("makes no execution context (is the device's memory full?)")
            name = self.source.profiles[profile].name
            self._do(context.set_optimization_profile_async(profile, self.memory.stream), f"choose profile `{name}`")
            self._contexts[profile] = context
        return self._contexts[profile]

    def _check(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> dict[str, type[np.generic]]:
        """Compare the plan's tensors with what is expected of them; NumPy types by name."""
        engine, modes, kinds = self._engine, self._library.TensorIOMode, self._library.DataType
        names = {kinds.FLOAT: "float32", kinds.HALF: "float16", kinds.INT64: "int64"}
        found = {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)}
        expected = {tensor.name for tensor in (*inputs, *outputs)}
        if found != expected:
            odd = sorted(found ^ expected)[0]
            raise self._other(f"{'a' if odd in found else 'no'} tensor `{odd}`", f"{len(expected)} tensors")
        dtypes: dict[str, type[np.generic]] = {}
        for mode, tensors in ((modes.INPUT, inputs), (modes.OUTPUT, outputs)):
            for tensor in tensors:
                kind, shape = engine.get_tensor_dtype(tensor.name), tuple(engine.get_tensor_shape(tensor.name))
                dtype = names.get(kind, str(kind))
                fits = len(shape) == len(tensor.shape) and all(
                    size in (-1, want) or want is None for size, want in zip(shape, tensor.shape, strict=True)
                )
                if engine.get_tensor_mode(tensor.name) != mode or dtype not in tensor.dtypes or not fits:
                    sizes = ", ".join("any" if size is None else str(size) for size in tensor.shape)
                    raise self._other(
                        f"`{tensor.name}` as {dtype} {list(shape)}", f"{' or '.join(tensor.dtypes)} [{sizes}]"
                    )
                dtypes[tensor.name] = np.dtype(dtype).type
        return dtypes

    def _do(self, success: bool, what: str) -> None:
        if not success:
            raise self._failure(f"does not {what}")

    def _failure(self, what: str) -> EngineError:
        return EngineError(
            f"{self.source.path}: {self._library.__name__} {self._library.__version__} {what}: "
            f"{self._messages.brief()}; rebuild with `{self.source.rebuild}`"
        )

    def _other(self, found: str, expected: str) -> EngineError:
        return EngineError(
            f"{self.source.path}: found {found}, expected {expected}; rebuild with `{self.source.rebuild}`"
        )
