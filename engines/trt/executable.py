"""Load, check and run a TensorRT or TensorRT-RTX engine on device memory.

Each optimization profile has an execution context, which is made at the first run. Runs are queued on the CUDA stream
of ONNX Runtime, so that they run in order with the work of ONNX Runtime. TensorRT-RTX records passes as CUDA graphs
when their shapes recur. With TensorRT, passes are not recorded, as each shape would need an execution context.
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
from ...inputs import read_regular_file
from ...output.files import find_cache_folder, replace_file
from ..contracts import TensorSpec, check_graph_tensors
from ..engine_folder import EngineFolder
from ..gpu import find_gpu
from ..ort.providers import CUDA_STREAM
from ..profiles import ShapeProfile

_MAX_CACHE_BYTES = 1 << 30  # maximum size of a file with compiled kernels


def make_logger(library: Any, errors: list[str]) -> Any:
    """Return a TensorRT logger that prints nothing, and appends error messages to `errors`.

    The logger has no attributes, because builds of TensorRT-RTX 1.7 hung in 3 of 4 runs with a logger that had some.
    """
    severities = (library.ILogger.ERROR, library.ILogger.INTERNAL_ERROR)

    class Logger(library.ILogger):  # type: ignore[misc]
        def log(self, severity: Any, message: str) -> None:
            if severity in severities:
                errors.append(message)

    return Logger()


def format_first_error(errors: Sequence[str]) -> str:
    """Return the first error message as one line. Later errors are usually consequences of the first error."""
    return " ".join(errors[0].split())[:300] if errors else "no reason given"


class KernelCache:
    """Cache of the kernels that TensorRT-RTX compiles while engines run, a file for each engine folder and GPU.

    TensorRT does not use the cache, as it compiles kernels only during builds. Without a folder, kernels are not
    stored.
    """

    def __init__(self, folder: EngineFolder | None) -> None:
        self._cache: Any = None
        self._path: Path | None = None
        if folder is not None:
            name = hashlib.blake2b(
                f"{folder.manifest.model_dump_json()} {find_gpu()}".encode(), digest_size=16
            ).hexdigest()
            with suppress(OutputError):  # there is no home folder: kernels are not stored
                self._path = find_cache_folder() / "kernels" / f"{name}.bin"

    def make_execution_context(self, library: Any, engine: Any) -> Any:
        """Return an execution context that reads kernels from this cache, and adds newly compiled kernels to it.

        The context allocates memory for intermediate results when an optimization profile is chosen.
        """
        strategy = library.ExecutionContextAllocationStrategy.ON_PROFILE_CHANGE
        config = engine.create_runtime_config() if hasattr(engine, "create_runtime_config") else None
        if config is None or not hasattr(config, "create_runtime_cache"):  # TensorRT
            return engine.create_execution_context(strategy)
        config.set_execution_context_allocation_strategy(strategy)
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            if self._path is not None:
                with suppress(OSError, ValueError, RuntimeError):  # stored by another driver, or damaged
                    self._cache.deserialize(read_regular_file(self._path, _MAX_CACHE_BYTES))
        config.set_runtime_cache(self._cache)
        config.cuda_graph_strategy = library.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        return engine.create_execution_context(config)

    def save(self) -> None:
        """Write the kernels to their file. If this fails, the next process compiles the kernels again."""
        if self._path is not None and self._cache is not None:
            # The Python bindings raise TypeError or RuntimeError if the library returns a null pointer.
            with suppress(OSError, TypeError, RuntimeError):
                replace_file(self._path, bytes(memoryview(self._cache.serialize())))


class TensorRTExecutable:
    """TensorRT engine that is loaded on the GPU and implements `ExecutableGraph`. One thread may use it at a time."""

    def __init__(
        self,
        library: Any,
        path: Path,
        profiles: Sequence[ShapeProfile],
        rebuild_command: str,
        kernel_cache: KernelCache | None = None,
    ) -> None:
        self._library = library
        self.path = path
        self.profiles = profiles
        self._rebuild_command = rebuild_command
        self._kernels = kernel_cache or KernelCache(None)
        self._errors: list[str] = []
        self._logger = make_logger(library, self._errors)  # kept here, as the library holds no reference to it
        self._engine: Any = None
        try:
            self._runtime = library.Runtime(self._logger)
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
                self._engine = self._runtime.deserialize_cuda_engine(pages)  # hashing has left the pages in memory
        except (TypeError, RuntimeError, ValueError) as error:  # the library returned null, or the file is empty
            self._errors.append(str(error))
        except OSError as error:
            raise EngineError(f"cannot be read ({error.strerror or error})", field=str(path)) from error
        self._require_success(self._engine is not None, "load this engine")
        num_profiles = self._engine.num_optimization_profiles
        if num_profiles != len(profiles):
            raise self.make_mismatch_error(f"{num_profiles} profiles", f"{len(profiles)}, as in engine.json")
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        self._inputs = [name for name in names if self._engine.get_tensor_mode(name) == library.TensorIOMode.INPUT]
        self._outputs = [name for name in names if name not in self._inputs]
        self.dtypes: dict[str, type[np.generic]] = {}
        self._contexts: dict[int, Any] = {}  # execution contexts by index of the profile
        # The binding that each execution context ran last. If it runs again, addresses and shapes are already set.
        self._last_binding: dict[int, object] = {}

    def make_mismatch_error(self, actual: str, expected: str, options: str = "") -> EngineError:
        """Return the error for an engine that does not fit; `options`, after a space, extend the rebuild command."""
        remedy = f"rebuild with `{self._rebuild_command}{options}`"
        return EngineError(field=str(self.path), found=actual, expected=expected, remedy=remedy)

    def check_tensors(self, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
        """Compare the tensors of the engine with their declarations, and store the types."""
        for declared, names in ((inputs, self._inputs), (outputs, self._outputs)):
            actual = {name: self._read_dtype_and_shape(name) for name in names}
            self.dtypes |= check_graph_tensors(actual, declared, self._make_tensor_error, reject_undeclared=True)

    def _read_dtype_and_shape(self, name: str) -> tuple[str, list[object]]:
        types = self._library.DataType
        names = {types.FLOAT: "float32", types.HALF: "float16", types.BF16: "bfloat16"}
        names |= {types.INT32: "int32", types.INT64: "int64"}
        dtype = self._engine.get_tensor_dtype(name)
        sizes = ["any" if size == -1 else size for size in self._engine.get_tensor_shape(name)]
        return names.get(dtype, str(dtype)), sizes

    def _make_tensor_error(self, name: str, actual: str, expected: str) -> EngineError:
        return self.make_mismatch_error(f"tensor `{name}`: {actual}", expected)

    def check_axis_fits_profile(self, axis_name: str, size: int) -> None:
        """Raise EngineError if no profile supports this number of `rows`, `nodes` per row, or cache `columns`."""
        max_size = max(getattr(profile, axis_name)[2] for profile in self.profiles)
        if size > max_size:
            noun = {"rows": "rows", "nodes": "nodes in one pass", "columns": "columns of a cache"}[axis_name]
            options = "" if axis_name == "columns" else f" --max-{axis_name} {size}"
            raise self.make_mismatch_error(f"{size} {noun}", f"at most {max_size}, the limit of the engine", options)

    def bind_tensors(self, values: Mapping[str, Any], capture_graph: bool = False) -> Callable[[], None]:
        """Bind tensors as in `ExecutableGraph`. The smallest profile that supports the number of nodes is used."""
        nodes = values["token_ids"].shape()[1] if "token_ids" in values else 0
        _, profile = min((ranges.nodes[2], i) for i, ranges in enumerate(self.profiles) if ranges.nodes[2] >= nodes)
        tensors = dict(values)
        binding = object()

        def run() -> None:
            self._errors.clear()
            context = self._get_context(profile)
            if self._last_binding.pop(profile, None) is not binding:
                self._set_tensor_addresses(context, tensors)
            self._require_success(context.execute_async_v3(CUDA_STREAM), "run this engine")
            self._last_binding[profile] = binding  # not reached after an exception, when tensors may be set in part

        return run

    def _set_tensor_addresses(self, context: Any, values: Mapping[str, Any]) -> None:
        shapes = {name: tuple(values[name].shape()) for name in (*self._inputs, *self._outputs)}
        for name in self._inputs:
            self._require_success(
                context.set_input_shape(name, shapes[name]), f"accept shape {list(shapes[name])} of `{name}`"
            )
        for name, shape in shapes.items():
            actual = tuple(context.get_tensor_shape(name))
            if actual != shape:
                raise self.make_mismatch_error(f"`{name}` as {list(actual)}", f"{list(shape)}")
            self._require_success(
                context.set_tensor_address(name, values[name].data_ptr()), f"accept the address of `{name}`"
            )

    def _get_context(self, profile_index: int) -> Any:
        if profile_index not in self._contexts:
            context = self._kernels.make_execution_context(self._library, self._engine)
            self._require_success(context is not None, "make an execution context (is the device's memory full?)")
            chosen = context.set_optimization_profile_async(profile_index, CUDA_STREAM)
            self._require_success(chosen, f"choose profile `{self.profiles[profile_index].name}`")
            self._contexts[profile_index] = context
        return self._contexts[profile_index]

    def _require_success(self, success: bool, action: str) -> None:
        """Raise EngineError, which says that the library does not `action`, unless a call of the library succeeded."""
        if not success:
            library = f"{self._library.__name__} {self._library.__version__}"
            problem = f"{library} does not {action}: {format_first_error(self._errors)}"
            raise EngineError(problem, field=str(self.path), remedy=f"rebuild with `{self._rebuild_command}`")
