"""One TensorRT or TensorRT-RTX plan: loaded, checked, and run on device memory by address.

Each profile has an execution context, made when first needed; within a profile, shapes and addresses are set again only
where they differ from the last run. All contexts of a plan keep intermediate results in the same memory: their runs
follow each other in one stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import EngineError
from ..contracts import Array, DTypes, Tensor
from ..kv_cache import round_up
from ..profiles import Profile
from .cuda import ALIGNMENT, Block, CudaMemory
from .kernels import Kernels

Shape = tuple[int, ...]
Places = Mapping[str, tuple[Shape, int]]  # tensors' shapes and addresses, by name


def make_logger(library: Any, errors: list[str]) -> Any:
    """A logger that prints nothing and adds errors to the list.

    It has no attributes of its own: with some, builds of TensorRT-RTX 1.7 hung in 3 of 4 runs.
    """
    bad = (library.ILogger.ERROR, library.ILogger.INTERNAL_ERROR)

    class Logger(library.ILogger):  # type: ignore[misc]
        def log(self, severity: Any, message: str) -> None:
            if severity in bad:
                errors.append(message)

    return Logger()


def first(errors: Sequence[str]) -> str:
    """The first error, which explains a failure, on one line; later ones usually follow from it."""
    return " ".join(errors[0].split())[:300] if errors else "no reason given"


class Plan:
    """A plan on a device. Several threads may run it; each run waits for its turn in the device's stream.

    profiles: the ranges it was built for. rebuild: the command that builds it again. kernels: shared with other plans.

    Raises: EngineError if the library does not load the plan.
    """

    def __init__(
        self,
        library: Any,
        memory: CudaMemory,
        path: Path,
        profiles: Sequence[Profile],
        rebuild: str,
        kernels: Kernels | None = None,
    ) -> None:
        self._library, self.memory, self.path, self.profiles, self._rebuild = library, memory, path, profiles, rebuild
        self._kernels = kernels or Kernels(None)
        self._errors: list[str] = []
        self._logger = make_logger(library, self._errors)  # the library keeps no reference of its own
        self._engine: Any = None
        memory.use()
        try:
            self._runtime = library.Runtime(self._logger)
            self._engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        except (TypeError, RuntimeError) as error:  # what the bindings raise where the library returns nothing
            self._errors.append(str(error))
        except OSError as error:
            raise EngineError(f"{path}: cannot be read ({error.strerror or error})") from error
        self._check(self._engine is not None, "load this plan")
        if (found := self._engine.num_optimization_profiles) != len(profiles):
            raise self.other(f"{found} profiles", f"{len(profiles)}, those of engine.json")
        self.dtypes: DTypes = {}
        self._inputs: set[str] = set()
        self._activations: Block | None = None
        self._contexts: dict[int, Any] = {}  # by profile
        self._bound: dict[int, Places] = {}  # what each context ran on last

    def other(self, found: str, expected: str, more: str = "") -> EngineError:
        """The error for a plan that is not the one expected; `more` goes to the command that builds it again."""
        return EngineError(f"{self.path}: found {found}, expected {expected}; rebuild with `{self._rebuild}{more}`")

    def check_tensors(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Take the types of these tensors into `dtypes`. Raises: EngineError if the plan has others."""
        engine, modes, kinds = self._engine, self._library.TensorIOMode, self._library.DataType
        names = {kinds.FLOAT: "float32", kinds.HALF: "float16", kinds.INT32: "int32", kinds.INT64: "int64"}
        found = {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)}
        expected = {tensor.name: modes.INPUT for tensor in inputs} | {tensor.name: modes.OUTPUT for tensor in outputs}
        if odd := sorted(found ^ expected.keys()):
            which = "a" if odd[0] in found else "no"
            raise self.other(f"{which} tensor `{odd[0]}`", f"{len(expected)} tensors")
        dtypes: dict[str, type[np.generic]] = {}
        for tensor in (*inputs, *outputs):
            name, shape = tensor.name, tuple(engine.get_tensor_shape(tensor.name))
            dtype = names.get(kind := engine.get_tensor_dtype(name), str(kind))
            fits = len(shape) == len(tensor.shape) and all(
                size in (-1, want) or want is None for size, want in zip(shape, tensor.shape, strict=True)
            )
            if engine.get_tensor_mode(name) != expected[name] or dtype not in tensor.dtypes or not fits:
                raise self.other(f"`{name}` as {dtype} {list(shape)}", str(tensor))
            dtypes[name] = np.dtype(dtype).type
        self.dtypes, self._inputs = dtypes, {tensor.name for tensor in inputs}

    def run(self, profile: int, arrays: Mapping[str, Array], placed: Places) -> None:
        """Upload `arrays` and run on them and on what is `placed` on the device, all other inputs and every output."""
        sent = {name: np.ascontiguousarray(array, self.dtypes[name]) for name, array in arrays.items()}
        *offsets, end = accumulate((round_up(array.nbytes, ALIGNMENT) for array in sent.values()), initial=0)
        staging, room = np.zeros(end, np.uint8), Block(self.memory, end)
        places = dict(placed)
        for (name, array), offset in zip(sent.items(), offsets, strict=True):
            staging[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
            places[name] = array.shape, room.address + offset
        self.memory.upload(room.address, staging)
        with self.memory.lock:
            self._bind_and_run(profile, places)
        del room  # given back in the order of the stream
        self.memory.synchronise()

    def _bind_and_run(self, profile: int, places: Places) -> None:
        self._errors.clear()
        if profile not in self._contexts:
            self._contexts[profile] = self._make_context(profile)
        context = self._contexts[profile]
        last = self._bound.pop(profile, {})  # what is bound now is kept only if everything below succeeds
        changed = {name: shape for name, (shape, _) in places.items() if shape != last.get(name, (None,))[0]}
        for name, shape in changed.items():
            if name in self._inputs:
                self._check(context.set_input_shape(name, shape), f"take `{name}` as {list(shape)}")
        for name, shape in changed.items():
            if name not in self._inputs and (found := tuple(context.get_tensor_shape(name))) != shape:
                raise self.other(f"`{name}` as {list(found)}", f"{list(shape)}")
        for name, (_, address) in places.items():
            if address != last.get(name, (None, None))[1]:
                self._check(context.set_tensor_address(name, address), f"take an address for `{name}`")
        self._check(context.execute_async_v3(self.memory.stream), "run this plan")
        self._bound[profile] = places

    def _make_context(self, profile: int) -> Any:
        self.memory.use()
        strategy = self._library.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._kernels.make_context(self._engine, strategy)
        self._check(context is not None, "make an execution context (is the device's memory full?)")
        if self._activations is None:
            self._activations = Block(self.memory, self._engine.device_memory_size_v2)  # enough for every profile
        context.set_device_memory(self._activations.address, self._activations.size)
        chosen = context.set_optimization_profile_async(profile, self.memory.stream)
        self._check(chosen, f"choose profile `{self.profiles[profile].name}`")
        self._kernels.save()
        return context

    def _check(self, success: bool, what: str) -> None:
        """Raises: EngineError with the library's words unless it did `what`."""
        if not success:
            library = f"{self._library.__name__} {self._library.__version__}"
            reason = first(self._errors)
            raise EngineError(f"{self.path}: {library} does not {what}: {reason}; rebuild with `{self._rebuild}`")
