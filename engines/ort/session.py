"""One ONNX graph in ONNX Runtime, checked when loaded: names, types and shapes of all its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...checks import brief
from ...errors import BundleError, EngineError
from ...user_files import reading
from ..contracts import Array, DTypes, Tensor
from ..graph_bytes import convolution_graph
from ..host import import_onnxruntime, thread_count
from .providers import DEFAULT_PROVIDER, PROVIDERS, attach, check_taken, find_provider, preload, turn

_TYPES = {f"tensor({name})": name for name in ("float16", "int32", "int64")} | {"tensor(float)": "float32"}
# Microseconds that a thread waits for the next operator before it sleeps. Operators of small models take about as long
# as waking up: passes of `scenes` took 1.35 ms instead of 2.1 ms with threads that sleep at once, of less processor
# time. Threads that spin for longer, as they do by default, hold up whatever else runs there.
SPIN = 10
# Errors of ONNX Runtime that mean a damaged file; all others mean a graph that it cannot run.
_UNRECORDED = -1  # the number of passes that are run op by op
_DAMAGE = {"InvalidProtobuf", "InvalidGraph", "NoSuchFile", "NoModel"}


class GraphSession:
    """A loaded graph, `optimised` if `save_optimised` wrote it. `run` may be called from several threads at once.

    expand_weights: integer weights become float32, and their products those of float32. model: run instead of the
    file, whose folder holds its weights. records: passes may be recorded as graphs, if the provider can.

    Raises: EngineError if the provider does not take the graph, BundleError if the file is damaged or another graph
    than expected.
    """

    def __init__(
        self,
        path: Path,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        threads: int | None = None,
        provider: str = DEFAULT_PROVIDER,
        optimised: bool = False,
        expand_weights: bool = False,
        model: bytes | None = None,
        records: bool = False,
    ) -> None:
        self.path, self.provider, source = path, provider, path if model is None else model
        folder = path.parent if model is not None else None
        count = thread_count(threads)
        self.session = load_session(source, count, provider, optimised, expand_weights, folder=folder, records=records)
        with reading(path, "an ONNX graph", BundleError, "export the bundle again"):
            self.dtypes: DTypes = {
                **_check(path, "input", self.session.get_inputs(), inputs),
                **_check(path, "output", self.session.get_outputs(), outputs),
            }
        self.inputs, self.outputs = inputs, outputs
        self.output_names = [tensor.name for tensor in outputs]

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """The outputs, in the order in which they were declared. Contiguous inputs are read in place."""
        return list(self._call(self.session.run, self.output_names, dict(feeds)))

    def run_checked(self, feeds: Mapping[str, Array]) -> list[Array]:
        """As `run`. Raises: BundleError: an output is not of the shape that the graph declares."""
        found = self.run(feeds)
        for tensor, array in zip(self.outputs, found, strict=True):
            if not tensor.fits(array.shape):
                raise self.other_shape(tensor.name, array.shape, tensor)
        return found

    def other_shape(self, name: str, found: Sequence[int], expected: object) -> BundleError:
        """The error for an output of another shape than expected."""
        shapes = f"gave {list(found)}, expected {expected}"
        return BundleError(f"{self.path}: output `{name}`: {shapes}; the graph is damaged, export the bundle again")

    def bind(self, values: Mapping[str, Any], record: int | None) -> Callable[[bool], None]:
        """As `Executable`."""
        binding = self.session.io_binding()
        for tensor in self.inputs:
            binding.bind_ortvalue_input(tensor.name, values[tensor.name])
        for name in self.output_names:
            binding.bind_ortvalue_output(name, values[name])
        options = [import_onnxruntime().RunOptions() for _ in range(2)]
        for one, number in zip(options, (_UNRECORDED, record or _UNRECORDED), strict=True):
            one.add_run_config_entry("gpu_graph_id", str(number))
        return lambda recorded: self._call(self.session.run_with_iobinding, binding, options[recorded])

    def forget(self, record: int) -> None:
        """As `Executable`."""
        self.session.release_captured_graph(record)

    def _call(self, run: Callable[..., Any], *arguments: Any) -> Any:
        try:
            with turn(self.provider):
                return run(*arguments)
        except Exception as error:
            raise EngineError(f"{self.path}: ONNX Runtime failed to run the graph: {brief(error, 200)}") from error


def save_optimised(path: Path, provider: str, goal: Path) -> list[Path]:
    """Write the graph as ONNX Runtime rewrites it for this processor, weights to `<goal>.data`; returns the files."""
    load_session(path, 1, provider, save_to=goal)
    return [file for file in (goal, goal.with_name(f"{goal.name}.data")) if file.is_file()]


def load_session(
    source: Path | bytes,
    threads: int,
    provider: str,
    optimised: bool = False,
    expand_weights: bool = False,
    save_to: Path | None = None,
    folder: Path | None = None,
    records: bool = False,
) -> Any:
    """A session of a file, or of a graph given as bytes, its weights in `folder`. Raises: EngineError, BundleError."""
    runtime = import_onnxruntime()
    chosen = find_provider(provider, runtime)
    preload(chosen, runtime)
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN))
    options.add_session_config_entry("session.force_spinning_stop", "1")  # between runs; all that older releases know
    options.add_session_config_entry("session.record_ep_graph_assignment_info", str(int(provider != DEFAULT_PROVIDER)))
    if expand_weights:  # DequantizeLinear is then computed once, not fused into products that round what they multiply
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    if folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    if save_to is not None:
        options.optimized_model_filepath, initializers = str(save_to), "session.optimized_model_external_initializers_"
        options.add_session_config_entry(f"{initializers}file_name", f"{save_to.name}.data")
        options.add_session_config_entry(f"{initializers}min_size_in_bytes", "1024")
        if provider == DEFAULT_PROVIDER:  # weights as its products want them, shared by processes that map the file
            options.add_session_config_entry("session.save_external_prepacked_constant_initializers", "1")
    levels = runtime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_DISABLE_ALL if optimised else levels.ORT_ENABLE_ALL
    options.log_severity_level = 4  # errors arrive as exceptions; do not print them as well
    graph, where = (source, folder or "a helper graph") if isinstance(source, bytes) else (str(source), source)
    try:
        given = attach(options, chosen, runtime, records)
        with turn(provider):
            session = runtime.InferenceSession(graph, options, enable_fallback=False, **given)
    except Exception as error:
        what = brief(error, 200)
        if type(error).__name__ in _DAMAGE:
            raise BundleError(f"{where}: not a graph that can be loaded: {what}; export the bundle again") from error
        what = f"ONNX Runtime {runtime.__version__} does not take this graph: {what}"
        raise EngineError(f"{where}: {what}; update onnxruntime") from error
    check_taken(where, chosen, session)
    return session


def check_convolutions(provider: str) -> None:
    """Raises: EngineError unless the provider runs one, which some do only with a library of their own.

    Image decoders are made of them, and would fail when a whole image has been decoded.
    """
    session = load_session(convolution_graph(), 1, provider)
    try:
        session.run(None, {"image": np.zeros((1, 1, 2, 2), np.float32), "kernel": np.zeros((1, 1, 1, 1), np.float32)})
    except Exception as error:
        found = f"provider {provider}: ONNX Runtime cannot run a convolution ({brief(error, 200)})"
        chosen = PROVIDERS[provider]
        raise EngineError(f"{found}; install {chosen.library}: {chosen.package}") from error


def _check(path: Path, kind: str, found: Sequence[Any], expected: Sequence[Tensor]) -> DTypes:
    """Compare a graph's tensors with what is expected of it; NumPy types by name."""
    tensors = {tensor.name: tensor for tensor in found}
    names = [tensor.name for tensor in expected]
    if missing := [name for name in names if name not in tensors]:
        raise BundleError(f"{path}: {kind} `{missing[0]}`: not in the graph, which has {', '.join(sorted(tensors))}")
    if kind == "input" and (extra := sorted(tensors.keys() - set(names))):
        raise BundleError(f"{path}: {kind} `{extra[0]}`: not expected; expected {', '.join(names)}")
    dtypes: dict[str, type[np.generic]] = {}
    for tensor in expected:
        kind_of, sizes = tensors[tensor.name].type, tensors[tensor.name].shape
        dtype = _TYPES.get(kind_of, kind_of)
        # a free size is only given by a free one; a fixed size by itself, or by one the graph leaves open
        fits = len(sizes) == len(tensor.shape) and all(
            not isinstance(have, int) or have == want for have, want in zip(sizes, tensor.shape, strict=True)
        )
        if dtype not in tensor.dtypes or not fits:
            differs = f"found {dtype} [{', '.join(map(str, sizes))}], expected {tensor}"
            cause = "the graph is not the one bundle.json describes"
            raise BundleError(f"{path}: {kind} `{tensor.name}`: {differs}; {cause}")
        dtypes[tensor.name] = np.dtype(dtype).type
    return dtypes
