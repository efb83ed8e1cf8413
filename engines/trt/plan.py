"""One TensorRT or TensorRT-RTX plan: loaded, checked, and run on device memory by address.

Each profile has an execution context, made when first needed; within a profile, shapes and addresses are set again only
where they differ from the last run. All contexts of a plan keep intermediate results in the same memory: their runs
follow each other in one stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...checks import brief
from ...errors import EngineError
from ..contracts import DTypes, Tensor
from ..profiles import Profile
from .cuda import Block, CudaMemory
from .library import first, make_logger

Shape = tuple[int, ...]
Place = tuple[Shape, int]  # a tensor's shape and its address


@dataclass(frozen=True)
class PlanSource:
    """Where a plan comes from: its file, the ranges it was built for, and the command that builds it again."""

    path: Path
    profiles: tuple[Profile, ...]
    rebuild: str

    def other(self, found: str, expected: str, more: str = "") -> EngineError:
        """The error for a plan that is not the one expected; `more` goes to the command that builds it again."""
        return EngineError(f"{self.path}: found {found}, expected {expected}; rebuild with `{self.rebuild}{more}`")


@dataclass
class Context:
    """An execution context, and what was last bound to its inputs and outputs."""

    handle: Any
    bound: Mapping[str, Place] = field(default_factory=dict)


class Plan:
    """A plan on a device. Several threads may run it; each run waits for its turn in the device's stream.

    Raises: EngineError if the library does not load the plan, or if its tensors are others than expected.
    """

    def __init__(
        self,
        library: Any,
        memory: CudaMemory,
        source: PlanSource,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> None:
        self._library, self._memory, self._source = library, memory, source
        self._errors: list[str] = []
        self._logger = make_logger(library, self._errors)  # the library keeps no reference of its own
        memory.use()
        try:
            self._runtime = library.Runtime(self._logger)
            self._engine = self._runtime.deserialize_cuda_engine(source.path.read_bytes())
        except (TypeError, RuntimeError) as error:  # what the bindings raise where the library returns nothing
            raise self._failure("load this plan", brief(error, 200)) from error
        except OSError as error:
            raise EngineError(f"{source.path}: cannot be read ({error.strerror or error})") from error
        self._check(self._engine is not None, "load this plan")
        if (found := self._engine.num_optimization_profiles) != len(source.profiles):
            raise source.other(f"{found} profiles", f"{len(source.profiles)}, those of engine.json")
        self.dtypes = self._check_tensors(inputs, outputs)
        self._activations: Block | None = None
        self._contexts: dict[int, Context] = {}  # by profile

    def enqueue(self, profile: int, inputs: Mapping[str, Place], outputs: Mapping[str, Place]) -> None:
        """Ask for one run within a profile; it happens in the order of the memory's stream."""
        with self._memory.lock:
            self._errors.clear()
            if profile not in self._contexts:
                self._contexts[profile] = self._make_context(profile)
            self._bind_and_run(self._contexts[profile], inputs, outputs)

    def _bind_and_run(self, context: Context, inputs: Mapping[str, Place], outputs: Mapping[str, Place]) -> None:
        handle, reshaped, places = context.handle, False, {**inputs, **outputs}
        last, context.bound = context.bound, {}  # what is bound now is kept only if everything below succeeds
        for name, (shape, address) in places.items():
            shape_before, address_before = last.get(name, (None, None))
            if name in inputs and shape != shape_before:
                reshaped = True
                self._check(handle.set_input_shape(name, shape), f"take `{name}` as {list(shape)}")
            elif reshaped and name in outputs and (found := tuple(handle.get_tensor_shape(name))) != shape:
                raise self._source.other(f"`{name}` as {list(found)}", f"{list(shape)}")
            if address != address_before:
                self._check(handle.set_tensor_address(name, address), f"take an address for `{name}`")
        self._check(handle.execute_async_v3(self._memory.stream), "run this plan")
        context.bound = places

    def _make_context(self, profile: int) -> Context:
        memory = self._memory
        memory.use()
        strategy = self._library.ExecutionContextAllocationStrategy.USER_MANAGED
        handle = self._engine.create_execution_context(strategy)
        self._check(handle is not None, "make an execution context (is the device's memory full?)")
        if self._activations is None:
            self._activations = Block(memory, self._engine.device_memory_size_v2)  # enough for every profile
        handle.set_device_memory(self._activations.address, self._activations.size)
        self._check(not self._errors, "take memory for intermediate results")
        name = self._source.profiles[profile].name
        self._check(handle.set_optimization_profile_async(profile, memory.stream), f"choose profile `{name}`")
        return Context(handle)

    def _check_tensors(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> DTypes:
        """Compare the plan's tensors with what is expected of them; NumPy types by name."""
        engine, modes, kinds = self._engine, self._library.TensorIOMode, self._library.DataType
        names = {kinds.FLOAT: "float32", kinds.HALF: "float16", kinds.INT64: "int64"}
        found = {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)}
        expected = {tensor.name: modes.INPUT for tensor in inputs} | {tensor.name: modes.OUTPUT for tensor in outputs}
        if odd := sorted(found ^ expected.keys()):
            which = "a" if odd[0] in found else "no"
            raise self._source.other(f"{which} tensor `{odd[0]}`", f"{len(expected)} tensors")
        dtypes: dict[str, type[np.generic]] = {}
        for tensor in (*inputs, *outputs):
            name, shape = tensor.name, tuple(engine.get_tensor_shape(tensor.name))
            dtype = names.get(kind := engine.get_tensor_dtype(name), str(kind))
            fits = len(shape) == len(tensor.shape) and all(
                size in (-1, want) or want is None for size, want in zip(shape, tensor.shape, strict=True)
            )
            if engine.get_tensor_mode(name) != expected[name] or dtype not in tensor.dtypes or not fits:
                raise self._source.other(f"`{name}` as {dtype} {list(shape)}", str(tensor))
            dtypes[name] = np.dtype(dtype).type
        return dtypes

    def _check(self, success: bool, what: str) -> None:
        """Raises: EngineError unless the library did `what`."""
        if not success:
            raise self._failure(what)

    def _failure(self, what: str, reason: str = "", cure: str = "") -> EngineError:
        """The library does not do `what`: by its own words, and to be built again, unless another reason is given."""
        return EngineError(
            f"{self._source.path}: {self._library.__name__} {self._library.__version__} does not {what}: "
            f"{reason or first(self._errors)}; {cure or f'rebuild with `{self._source.rebuild}`'}"
        )
