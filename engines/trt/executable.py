"""One TensorRT or TensorRT-RTX plan: loaded, checked, and run on device memory by address.

Each profile has an execution context, made when first needed. Runs are on ONNX Runtime's stream, in turn with its own.
TensorRT-RTX records passes whose shapes come again; TensorRT does not: a recording would need a context for each shape.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import EngineError, OutputError
from ...inputs import read_plain_file
from ...output.files import cache_folder, replace_file
from ..contracts import Tensor, numpy_types
from ..engine_folder import EngineFolder
from ..gpu import find_gpu
from ..ort.providers import CUDA_STREAM
from ..profiles import Profile

_MAX_CACHE_BYTES = 1 << 30  # bytes of kernels


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


def first_error(errors: Sequence[str]) -> str:
    """The first error, which explains a failure, on one line; later ones usually follow from it."""
    return " ".join(errors[0].split())[:300] if errors else "no reason given"


class KernelCache:
    """Kernels that TensorRT-RTX compiles while plans of a folder run, kept in this user's cache folder, by GPU.

    TensorRT compiles none. plans: none where nothing is kept.
    """

    def __init__(self, plans: EngineFolder | None) -> None:
        self._cache: Any = None
        self._path: Path | None = None
        if plans is not None:
            name = hashlib.blake2b(
                f"{plans.manifest.model_dump_json()} {find_gpu()}".encode(), digest_size=16
            ).hexdigest()
            with suppress(OutputError):  # no home folder
                self._path = cache_folder() / "kernels" / f"{name}.bin"

    def make_context(self, library: Any, engine: Any) -> Any:
        """A context of a plan that uses and adds kernels; memory for intermediate results is of the profile chosen."""
        strategy = library.ExecutionContextAllocationStrategy.ON_PROFILE_CHANGE
        config = engine.create_runtime_config() if hasattr(engine, "create_runtime_config") else None
        if config is None or not hasattr(config, "create_runtime_cache"):
            return engine.create_execution_context(strategy)
        config.set_execution_context_allocation_strategy(strategy)
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            if self._path is not None:
                with suppress(OSError, ValueError, RuntimeError):  # of another driver, or damaged
                    self._cache.deserialize(read_plain_file(self._path, _MAX_CACHE_BYTES))
        config.set_runtime_cache(self._cache)
        config.cuda_graph_strategy = library.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        return engine.create_execution_context(config)

    def save(self) -> None:
        """Write the file; where it cannot be written, kernels are compiled again."""
        if self._path is not None and self._cache is not None:
            with suppress(
                OSError, TypeError, RuntimeError
            ):  # what the bindings raise where the library returns nothing
                replace_file(self._path, bytes(memoryview(self._cache.serialize())))


class TensorRTExecutable:
    """A plan on a device, as an `Executable`, for threads that take turns.

    profiles: the ranges it was built for. rebuild: the command that builds it again. kernels: shared with other plans.

    Raises: EngineError if the library does not load the plan.
    """

    def __init__(
        self,
        library: Any,
        path: Path,
        profiles: Sequence[Profile],
        rebuild: str,
        kernels: KernelCache | None = None,
    ) -> None:
        self._library, self.path, self.profiles, self._rebuild = library, path, profiles, rebuild
        self._kernels = kernels or KernelCache(None)
        self._errors: list[str] = []
        self._logger = make_logger(library, self._errors)  # the library keeps no reference of its own
        self._engine: Any = None
        try:
            self._runtime = library.Runtime(self._logger)
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
                self._engine = self._runtime.deserialize_cuda_engine(pages)  # those that were hashed; no copy of them
        except (TypeError, RuntimeError, ValueError) as error:  # nothing returned by the library; an empty file
            self._errors.append(str(error))
        except OSError as error:
            raise EngineError(f"cannot be read ({error.strerror or error})", field=str(path)) from error
        self._check(self._engine is not None, "load this plan")
        if (found := self._engine.num_optimization_profiles) != len(profiles):
            raise self.mismatch_error(f"{found} profiles", f"{len(profiles)}, those of engine.json")
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        self._inputs = [one for one in names if self._engine.get_tensor_mode(one) == library.TensorIOMode.INPUT]
        self._outputs = [name for name in names if name not in self._inputs]
        self.dtypes: dict[str, type[np.generic]] = {}
        self._contexts: dict[int, Any] = {}  # by profile
        self._last: dict[int, object] = {}  # whose values each context ran on last

    def mismatch_error(self, found: str, expected: str, more: str = "") -> EngineError:
        """The error for a plan that is not the one expected; `more` goes to the command that builds it again."""
        remedy = f"rebuild with `{self._rebuild}{more}`"
        return EngineError(field=str(self.path), found=found, expected=expected, remedy=remedy)

    def check_tensors(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Take the types of these tensors into `dtypes`. Raises: EngineError if the plan has others."""
        engine, kinds = self._engine, self._library.DataType
        names = {kinds.FLOAT: "float32", kinds.HALF: "float16", kinds.BF16: "bfloat16"}
        names |= {kinds.INT32: "int32", kinds.INT64: "int64"}
        for tensors, own in ((inputs, self._inputs), (outputs, self._outputs)):
            types = {name: names.get(kind := engine.get_tensor_dtype(name), str(kind)) for name in own}
            shapes = {name: ["any" if n == -1 else n for n in engine.get_tensor_shape(name)] for name in own}
            found = {name: (types[name], shapes[name]) for name in own}
            self.dtypes |= numpy_types(found, tensors, self._tensor_error, only=True)

    def _tensor_error(self, name: str, found: str, expected: str) -> EngineError:
        return self.mismatch_error(f"tensor `{name}`: {found}", expected)

    def check_size(self, name: str, wanted: int) -> None:
        """Raises: EngineError unless a profile takes so many `rows`, `nodes` or `columns`."""
        if wanted > (most := max(getattr(profile, name)[2] for profile in self.profiles)):
            what = {"rows": "rows", "nodes": "nodes in one pass", "columns": "columns of a cache"}[name]
            more = "" if name == "columns" else f" --max-{name} {wanted}"
            raise self.mismatch_error(f"{wanted} {what}", f"at most {most}, which it was built for", more)

    def bind(self, values: Mapping[str, Any], record: bool = False) -> Callable[[], None]:
        """As `Executable`, in the smallest profile that takes as many nodes; what is recorded, the library decides."""
        nodes = values["token_ids"].shape()[1] if "token_ids" in values else 0
        _, profile = min((one.nodes[2], i) for i, one in enumerate(self.profiles) if one.nodes[2] >= nodes)
        held, own = dict(values), object()

        def run() -> None:
            self._errors.clear()
            context = self._context(profile)
            if self._last.pop(profile, None) is not own:
                self._place(context, held)
            self._check(context.execute_async_v3(CUDA_STREAM), "run this plan")
            self._last[profile] = own  # only if everything succeeded

        return run

    def _place(self, context: Any, values: Mapping[str, Any]) -> None:
        shapes = {name: tuple(values[name].shape()) for name in (*self._inputs, *self._outputs)}
        for name in self._inputs:
            self._check(context.set_input_shape(name, shapes[name]), f"take `{name}` as {list(shapes[name])}")
        for name, shape in shapes.items():
            if (found := tuple(context.get_tensor_shape(name))) != shape:
                raise self.mismatch_error(f"`{name}` as {list(found)}", f"{list(shape)}")
            self._check(context.set_tensor_address(name, values[name].data_ptr()), f"take the place of `{name}`")

    def _context(self, profile: int) -> Any:
        if profile not in self._contexts:
            context = self._kernels.make_context(self._library, self._engine)
            self._check(context is not None, "make an execution context (is the device's memory full?)")
            chosen = context.set_optimization_profile_async(profile, CUDA_STREAM)
            self._check(chosen, f"choose profile `{self.profiles[profile].name}`")
            self._contexts[profile] = context
        return self._contexts[profile]

    def _check(self, success: bool, what: str) -> None:
        if not success:
            library = f"{self._library.__name__} {self._library.__version__}"
            problem = f"{library} does not {what}: {first_error(self._errors)}"
            raise EngineError(problem, field=str(self.path), remedy=f"rebuild with `{self._rebuild}`")
