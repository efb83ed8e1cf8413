"""One ONNX graph in ONNX Runtime, checked when loaded: names, types and shapes of all its tensors."""

from __future__ import annotations

import io
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import BundleError, EngineError
from ...inputs import format_error, reading
from ..contracts import STORAGE_DTYPES, Array, Tensor, TensorView, numpy_types
from ..graph_writer import TYPES, convolution_graph
from ..host import import_onnxruntime, thread_count
from .providers import DEFAULT_PROVIDER, PROVIDERS, check_assignment, device_lock, find_provider, plugin_devices

_TYPES = {f"tensor({name})": name for name in ("float16", "bfloat16", "int32", "int64", "uint8")} | {
    "tensor(float)": "float32"
}
# Microseconds that a thread waits for the next operator before it sleeps. Operators of small models take about as long
# as waking up: passes of `scenes` took 1.35 ms instead of 2.1 ms with threads that sleep at once, of less processor
# time. Threads that spin for longer, as they do by default, hold up whatever else runs there.
SPIN = 10
PLAIN = 2  # runs of what is bound before it is recorded
_UNRECORDED = -1  # the number of passes that are run op by op
# Errors of ONNX Runtime that mean a damaged file; all others mean a graph that it cannot run.
_DAMAGE = {"InvalidProtobuf", "InvalidGraph", "NoSuchFile", "NoModel"}
_CURES = {"bad_alloc": "close other programs, there is too little memory", "procfs": "mount /proc"}  # by their words


class GraphSession:
    """A loaded graph; `run` may be called from several threads at once.

    Args:
        path: its file; its folder holds the weights.
        inputs: what the graph must take, no more.
        outputs: what it must give.
        threads: one per core by default.
        provider: by name.
        model: run instead of the file's graph, over the same weights.
        records: passes may be recorded as graphs, if the provider can.

    Raises:
        EngineError: the provider does not take the graph.
        BundleError: the file is damaged, or another graph than expected.
    """

    def __init__(
        self,
        path: Path,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        threads: int | None = None,
        provider: str = DEFAULT_PROVIDER,
        model: bytes | None = None,
        records: bool = False,
    ) -> None:
        self.path, self.provider = path, provider
        source, folder = (path, None) if model is None else (model, path.parent)
        self.session = load_session(source, thread_count(threads), provider, folder, records)
        with reading(path, "an ONNX graph", BundleError, "export the bundle again"):
            self.dtypes: dict[str, type[np.generic]] = {}
            for kind, tensors, expected in (
                ("input", self.session.get_inputs(), inputs),
                ("output", self.session.get_outputs(), outputs),
            ):
                found = {one.name: (_TYPES.get(one.type, one.type), one.shape) for one in tensors}
                refuse = partial(self._other, kind, "the graph is not the one bundle.json describes")
                self.dtypes |= numpy_types(found, expected, refuse, only=kind == "input")
        self.inputs, self.outputs = inputs, outputs
        self._numbers = iter(range(1, 1 + PROVIDERS[provider].max_recordings))  # of recordings
        self.output_names = [tensor.name for tensor in outputs]

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """The outputs, in the order in which they were declared. Contiguous inputs are read in place."""
        return list(self._call(self.session.run, self.output_names, dict(feeds)))

    def run_checked(self, feeds: Mapping[str, Array]) -> list[Array]:
        """As `run`. Raises: BundleError: an output is not of the shape that the graph declares."""
        outputs = self.run(feeds)
        for tensor, array in zip(self.outputs, outputs, strict=True):
            if not tensor.fits(array.shape):
                raise self.other_shape(tensor.name, array.shape, tensor)
        return outputs

    def other_shape(self, name: str, found: Sequence[int], expected: object) -> BundleError:
        """The error for an output of another shape than expected."""
        return self._other(
            "output", "the graph is damaged, export the bundle again", name, str(list(found)), str(expected)
        )

    def _other(self, kind: str, remedy: str, name: str, found: str, expected: str) -> BundleError:
        return BundleError(field=f"{self.path}: {kind} `{name}`", found=found, expected=expected, remedy=remedy)

    def bind(self, values: Mapping[str, Any], record: bool = False) -> Callable[[], None]:
        """As `Executable`, which may read arrays, too. Recorded is what ran `PLAIN` times, unless too much has been."""
        held = {name: np.ascontiguousarray(one) if isinstance(one, np.ndarray) else one for name, one in values.items()}
        binding, memory = self.session.io_binding(), PROVIDERS[self.provider].memory
        for tensors, one, part in (
            (self.inputs, binding.bind_ortvalue_input, binding.bind_input),
            (self.outputs, binding.bind_ortvalue_output, binding.bind_output),
        ):
            for name, kind in ((tensor.name, tensor.dtypes[0]) for tensor in tensors):
                if isinstance(value := held[name], np.ndarray):
                    binding.bind_cpu_input(name, value)
                elif isinstance(value, TensorView) or kind in STORAGE_DTYPES:
                    part(name, memory, 0, TYPES[kind], value.shape(), value.data_ptr())
                else:
                    one(name, value)
        number = next(self._numbers, None) if record else None
        plain, runs = run_options(_UNRECORDED), itertools.count()
        recorded, bound = plain if number is None else run_options(number), (binding, held)

        def run() -> None:
            self._call(self.session.run_with_iobinding, bound[0], recorded if next(runs) >= PLAIN else plain)

        if number is not None:
            weakref.finalize(run, self.session.release_captured_graph, number).atexit = False
        return run

    def _call(self, run: Callable[..., Any], *arguments: Any) -> Any:
        try:
            with device_lock(self.provider):
                return run(*arguments)
        except Exception as error:
            problem = f"ONNX Runtime failed to run the graph: {format_error(error, 200)}"
            remedy = "" if self.provider == DEFAULT_PROVIDER else "use another provider, or export in float32"
            raise EngineError(problem, field=str(self.path), remedy=remedy) from error


def run_options(number: int = _UNRECORDED) -> Any:
    """Of a run that does not wait for the device, recorded as the graph of a number."""
    options = import_onnxruntime().RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(number))
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options


def load_session(
    source: Path | bytes,
    threads: int,
    provider: str,
    folder: Path | None = None,
    records: bool = False,
) -> Any:
    """A session of a file, or of a graph as bytes with its weights in `folder`. Raises: EngineError, BundleError."""
    runtime = import_onnxruntime()
    chosen = find_provider(provider, runtime)
    if chosen.library:  # CUDA's and cuDNN's come as packages whose folders no loader searches; what lacks shows later
        with redirect_stdout(io.StringIO()):
            runtime.preload_dlls()
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN))
    options.add_session_config_entry("session.force_spinning_stop", "1")  # between runs; all that older releases know
    options.add_session_config_entry("session.record_ep_graph_assignment_info", str(int(provider != DEFAULT_PROVIDER)))
    if folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 4  # errors arrive as exceptions; do not print them as well
    graph, where = (source, folder or "a helper graph") if isinstance(source, bytes) else (str(source), source)
    try:
        own = {**chosen.options, **(chosen.recording if records else {})}
        providers = [] if chosen.plugin else [(chosen.execution_provider, own)]
        if chosen.plugin:  # the first device it lists
            options.add_provider_for_devices(plugin_devices(chosen, runtime)[:1], own)
        with device_lock(provider):
            session = runtime.InferenceSession(graph, options, providers=providers or None, enable_fallback=False)
    except Exception as error:
        what = format_error(error, 200)
        if type(error).__name__ in _DAMAGE:
            raise BundleError(
                f"not a graph that can be loaded: {what}", field=str(where), remedy="export the bundle again"
            ) from error
        other = "update onnxruntime" if provider == DEFAULT_PROVIDER else f"check the driver, or use {DEFAULT_PROVIDER}"
        remedy = next((cure for word, cure in _CURES.items() if word in str(error)), other)
        problem = f"ONNX Runtime {runtime.__version__} does not take this graph: {what}"
        raise EngineError(problem, field=str(where), remedy=remedy) from error
    check_assignment(where, chosen, session)
    return session


def check_provider(name: str) -> None:
    """Raises: EngineError: the provider is not installed, its device does not work, or it has no convolutions.

    Image decoders are made of convolutions, and would fail when a whole image has been decoded.
    """
    provider = find_provider(name, import_onnxruntime())
    if provider.memory == "cpu":
        return
    session = load_session(convolution_graph(), 1, name)
    try:
        session.run(None, {"image": np.zeros((1, 1, 2, 2), np.float32), "kernel": np.zeros((1, 1, 1, 1), np.float32)})
    except Exception as error:
        raise EngineError(
            f"ONNX Runtime cannot run a convolution ({format_error(error, 200)})",
            field=f"provider {name}",
            remedy=f"install {provider.library or 'its driver'}: {provider.package}",
        ) from error
