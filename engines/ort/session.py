"""ONNX Runtime sessions. When a graph is loaded, the names, types and shapes of its tensors are checked."""

from __future__ import annotations

import ctypes
import io
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import BundleError, EngineError
from ...inputs import convert_read_errors, format_error, reraise_error_of_signal_handler
from ..contracts import STORAGE_DTYPES, Array, TensorSpec, TensorView, check_graph_tensors
from ..graph_writer import TYPES, GraphWriter
from ..host import choose_thread_count, import_onnxruntime
from .providers import (
    DEFAULT_PROVIDER,
    PROVIDERS,
    check_node_assignment,
    find_available_provider,
    find_plugin_devices,
    get_device_lock,
)

_TYPES = {f"tensor({name})": name for name in ("float16", "bfloat16", "int32", "int64", "uint8")} | {
    "tensor(float)": "float32"
}
# Time in microseconds that a thread waits (spins) for the next operator before it sleeps. Waking a thread takes
# about as long as an operator of a small model. With threads that sleep at once, passes of the model `scenes` took
# 2.1 ms instead of 1.35 ms, and more processor time. Threads that spin longer, as by default, slow down other programs.
SPIN_MICROSECONDS = 10
RUNS_BEFORE_RECORDING = 2  # number of runs of a bound graph on a thread before the pass is recorded
_NO_RECORDING = -1  # graph id of forward passes that are run op by op
# Names of exceptions that ONNX Runtime raises for a damaged file. Others mean that it cannot run the graph.
_DAMAGED_FILE_ERRORS = {"InvalidProtobuf", "InvalidGraph", "NoSuchFile", "NoModel"}
# Remedies for errors by a word in the message of ONNX Runtime.
_REMEDY_OF_WORD = {"bad_alloc": "close other programs, there is too little memory", "procfs": "mount /proc"}
_open_sessions = weakref.WeakSet[Any]()  # for `_keep_sessions_after_fork`


class GraphSession:
    """Graph that is loaded in an ONNX Runtime session. Several threads may call `run` at once.

    Args:
        outputs: declarations of the outputs to return; the graph may have further outputs.
        threads: number of threads; None: one per core.
        model_bytes: serialized graph to run instead of the graph in the file; it reads the same weights.
        allow_graph_capture: whether passes may be recorded as graphs, if the provider supports it.
        prepack: whether the CPU copies weights to a faster layout. If not, they stay in the memory-mapped file.

    Raises:
        EngineError: the provider cannot run the graph.
        BundleError: the file is damaged, or a tensor differs from its declaration.
    """

    def __init__(
        self,
        path: Path,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        threads: int | None = None,
        provider: str = DEFAULT_PROVIDER,
        model_bytes: bytes | None = None,
        allow_graph_capture: bool = False,
        prepack: bool = True,
    ) -> None:
        self.path = path
        self.provider = provider
        self._lock = get_device_lock(provider)
        count = choose_thread_count(threads)
        self.session = load_session(path, count, provider, model_bytes, allow_graph_capture, prepack)
        with convert_read_errors(path, "an ONNX graph", BundleError, "export the bundle again"):
            self.dtypes: dict[str, type[np.generic]] = {}
            for direction, tensors, expected in (
                ("input", self.session.get_inputs(), inputs),
                ("output", self.session.get_outputs(), outputs),
            ):
                actual = {tensor.name: (_TYPES.get(tensor.type, tensor.type), tensor.shape) for tensor in tensors}
                make_error = partial(self._make_tensor_error, direction, "the graph differs from bundle.json")
                self.dtypes |= check_graph_tensors(actual, expected, make_error, reject_undeclared=direction == "input")
        self.inputs = inputs
        self.outputs = outputs
        self._graph_ids = iter(range(1, 1 + PROVIDERS[provider].max_captured_graphs))
        self.output_names = [tensor.name for tensor in outputs]

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """Run the graph, and return the outputs in the declared order. Contiguous inputs are not copied."""
        return list(self._call_session(self.session.run, self.output_names, dict(feeds)))

    def run_and_check(self, feeds: Mapping[str, Array]) -> list[Array]:
        """Run the graph, and raise BundleError if an output does not have its declared shape.

        An axis of an output has the size of the inputs' axes of the same name.
        """
        outputs = self.run(feeds)
        axes = (pair for tensor in self.inputs for pair in zip(tensor.shape, feeds[tensor.name].shape, strict=True))
        sizes = {axis: size for axis, size in axes if isinstance(axis, str)}
        for tensor, array in zip(self.outputs, outputs, strict=True):
            expected = replace(tensor, shape=tuple(sizes.get(str(axis), axis) for axis in tensor.shape))
            if array.ndim != len(expected.shape) or any(
                isinstance(axis, int) and axis != size for axis, size in zip(expected.shape, array.shape, strict=True)
            ):
                remedy = "the graph is damaged, export the bundle again"
                raise self._make_tensor_error("output", remedy, tensor.name, str(list(array.shape)), str(expected))
        return outputs

    def _make_tensor_error(self, direction: str, remedy: str, name: str, actual: str, expected: str) -> BundleError:
        return BundleError(field=f"{self.path}: {direction} `{name}`", found=actual, expected=expected, remedy=remedy)

    def bind_tensors(
        self, values: Mapping[str, Any], capture_graph: bool = False, wait: bool = False
    ) -> Callable[[], None]:
        """Bind inputs and outputs as `ExecutableGraph.bind_tensors` does; inputs may also be arrays.

        A pass is recorded, such as in a CUDA graph, after `RUNS_BEFORE_RECORDING` runs of a thread. A session records
        at most `max_captured_graphs` passes. With `wait`, a run waits until the device is done; other Python threads
        can run meanwhile.
        """
        values = {
            name: np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value
            for name, value in values.items()
        }
        binding = self.session.io_binding()
        memory_device = PROVIDERS[self.provider].memory_device
        for tensors, bind_value, bind_address in (
            (self.inputs, binding.bind_ortvalue_input, binding.bind_input),
            (self.outputs, binding.bind_ortvalue_output, binding.bind_output),
        ):
            for name, dtype in ((tensor.name, tensor.dtypes[0]) for tensor in tensors):
                value = values[name]
                if isinstance(value, np.ndarray):
                    binding.bind_cpu_input(name, value)
                elif isinstance(value, TensorView) or dtype in STORAGE_DTYPES:
                    bind_address(name, memory_device, 0, TYPES[dtype], value.shape(), value.data_ptr())
                else:
                    bind_value(name, value)
        graph_id = next(self._graph_ids, None) if capture_graph else None
        without_recording = _make_run_options(_NO_RECORDING, wait)
        with_recording = without_recording if graph_id is None else _make_run_options(graph_id, wait)
        # Runs are counted per thread: cuDNN plans attention once in each thread, but not while a pass is recorded.
        thread = threading.local()
        bound = (binding, values)  # `run` refers to this tuple, so the memory of the values is not released

        def run() -> None:
            thread.runs = getattr(thread, "runs", 0) + 1
            options = with_recording if thread.runs > RUNS_BEFORE_RECORDING else without_recording
            self._call_session(self.session.run_with_iobinding, bound[0], options)

        if graph_id is not None:
            weakref.finalize(run, self.session.release_captured_graph, graph_id).atexit = False
        return run

    def _call_session(self, run: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the session with the device lock, and convert exceptions to EngineError."""
        try:
            with self._lock:
                return run(*arguments)
        except Exception as error:
            reraise_error_of_signal_handler(error)
            problem = f"ONNX Runtime failed to run the graph: {format_error(error, 200)}"
            remedy = "" if self.provider == DEFAULT_PROVIDER else "use another provider, or export in float32"
            raise EngineError(problem, field=str(self.path), remedy=remedy) from error


def _make_run_options(graph_id: int, wait: bool) -> Any:
    options = import_onnxruntime().RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph_id))
    options.add_run_config_entry("disable_synchronize_execution_providers", str(int(not wait)))
    return options


def open_session(
    source: Path | bytes,
    threads: int,
    configure_options: Callable[[Any], None],
    providers: Any = None,
    **arguments: Any,
) -> Any:
    """Open an ONNX Runtime session that logs nothing. Exceptions of ONNX Runtime are not converted.

    `providers` are those of `InferenceSession`. None: the CPU; an empty list: `configure_options` adds them.
    """
    runtime = import_onnxruntime()
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # errors arrive as exceptions; do not print them as well
    configure_options(options)
    graph = source if isinstance(source, bytes) else str(source)
    providers = ["CPUExecutionProvider"] if providers is None else providers or None
    session = runtime.InferenceSession(graph, options, providers=providers, **arguments)
    _open_sessions.add(session)
    return session


def _keep_sessions_after_fork() -> None:
    """Keep the sessions of the parent process alive in a forked process.

    Freeing a session waits for its threads, which do not exist in the forked process.
    """
    for session in _open_sessions:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))  # at exit, Python drops all other references


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_sessions_after_fork)


def load_session(
    path: Path,
    threads: int,
    provider: str,
    model_bytes: bytes | None = None,
    allow_graph_capture: bool = False,
    prepack: bool = True,
) -> Any:
    """Load a graph on a provider, and check that the provider runs the whole graph.

    `model_bytes` is a serialized graph to load instead of the file, with weights in the folder of `path`.

    Raises:
        EngineError: the provider is not installed or cannot run the graph.
        BundleError: the file is damaged.
    """
    runtime = import_onnxruntime()
    chosen = find_available_provider(provider, runtime)
    # The dynamic linker does not find the libraries in the packages of CUDA and cuDNN, so they are loaded here. If this
    # fails, `check_node_assignment` raises an error.
    if chosen.extra_library:
        with redirect_stdout(io.StringIO()):
            runtime.preload_dlls()
    source = path if model_bytes is None else model_bytes
    provider_options = {**chosen.options, **(chosen.graph_capture_options if allow_graph_capture else {})}

    def configure_options(options: Any) -> None:
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.disable_prepacking", str(int(not prepack)))
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_MICROSECONDS))
        options.add_session_config_entry("session.force_spinning_stop", "1")  # for releases that ignore the entry above
        on_device = str(int(provider != DEFAULT_PROVIDER))
        options.add_session_config_entry("session.record_ep_graph_assignment_info", on_device)
        if model_bytes is not None:
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
        if chosen.is_plugin:
            first_device = find_plugin_devices(chosen, runtime)[:1]
            options.add_provider_for_devices(first_device, provider_options)

    try:
        providers = [] if chosen.is_plugin else [(chosen.execution_provider, provider_options)]
        with get_device_lock(provider):
            session = open_session(source, threads, configure_options, providers, enable_fallback=False)
    except Exception as error:
        reraise_error_of_signal_handler(error)
        reason = format_error(error, 200)
        if type(error).__name__ in _DAMAGED_FILE_ERRORS:
            raise BundleError(
                f"not a graph that can be loaded: {reason}", field=str(path), remedy="export the bundle again"
            ) from error
        on_cpu = provider == DEFAULT_PROVIDER
        default = "update onnxruntime" if on_cpu else f"check the driver, or use provider {DEFAULT_PROVIDER}"
        remedy = next((remedy for word, remedy in _REMEDY_OF_WORD.items() if word in str(error)), default)
        problem = f"ONNX Runtime {runtime.__version__} cannot load this graph: {reason}"
        raise EngineError(problem, field=str(path), remedy=remedy) from error
    check_node_assignment(path, chosen, session)
    return session


def check_provider(name: str) -> None:
    """Raise EngineError if a provider cannot run a convolution: else only the VQ decoder would fail, at the end."""
    provider = find_available_provider(name, import_onnxruntime())
    if provider.memory_device == "cpu":
        return
    graph = GraphWriter()
    graph.op("Conv", "image", "kernel", name="result")
    image, kernel = (TensorSpec(name, ("float32",), (1, 1, n, n)) for name, n in (("image", 2), ("kernel", 1)))
    model = graph.to_bytes([image, kernel], [TensorSpec("result", image.dtypes, image.shape)])
    session = load_session(Path("a helper graph"), 1, name, model)
    try:
        session.run(None, {"image": np.zeros((1, 1, 2, 2), np.float32), "kernel": np.zeros((1, 1, 1, 1), np.float32)})
    except Exception as error:
        reraise_error_of_signal_handler(error)
        raise EngineError(
            f"ONNX Runtime cannot run a convolution ({format_error(error, 200)})",
            field=f"provider {name}",
            remedy=f"install {provider.extra_library or 'its driver'}: {provider.package}",
        ) from error
