"""One ONNX graph in ONNX Runtime, checked when loaded: names, types and shapes of all its tensors.

Does not know what a graph is for; callers say which tensors they expect. ONNX Runtime is imported when the
first graph is loaded.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import BundleError, EngineError
from ..host import conflict_line, installed_runtimes, usable_cores
from .providers import check_taken, find_provider

Array = NDArray[Any]

_TYPES = {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(int64)": "int64"}
# Errors of ONNX Runtime that mean a damaged file; all others mean a graph that it cannot run.
_DAMAGE = {"InvalidProtobuf", "InvalidGraph", "NoSuchFile", "NoModel"}


@dataclass(frozen=True)
class ThreadOptions:
    """Threads of one graph.

    `intra_op`: threads that share one operator, by default the physical cores this process may use.
    `spinning`: whether idle threads wait busily; faster on a quiet machine, ruinous on a shared one.
    """

    intra_op: int = field(default_factory=usable_cores)
    spinning: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.intra_op <= 1024:
            raise EngineError(f"threads: found {self.intra_op}, expected 1 .. 1024")


@dataclass(frozen=True)
class Tensor:
    """What a graph's input or output must be. `None` is a size that differs from pass to pass."""

    name: str
    dtypes: tuple[str, ...]
    shape: tuple[int | None, ...]


class GraphSession:
    """A loaded graph. `run` may be called from several threads at once.

    `optimised`: the file is one that `save_optimised` wrote, so nothing is left to rewrite. EngineError if the
    provider does not take the graph, BundleError if the file is damaged or another graph than expected.
    """

    def __init__(
        self,
        path: Path,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        threads: ThreadOptions | None = None,
        provider: str = "cpu",
        optimised: bool = False,
    ) -> None:
        self.path, self.provider = path, provider
        self.session = _load(path, threads or ThreadOptions(), provider, optimised)
        self.dtypes = _check(path, "input", self.session.get_inputs(), inputs)
        self.dtypes |= _check(path, "output", self.session.get_outputs(), outputs)
        self.output_names = [tensor.name for tensor in outputs]

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """The outputs, in the order in which they were declared. Contiguous inputs are read in place."""
        try:
            return list(self.session.run(self.output_names, dict(feeds)))
        except Exception as error:
            raise EngineError(f"{self.path}: ONNX Runtime failed to run the graph: {_brief(error)}") from error

    def run_bound(self, binding: Any) -> None:
        """Run on inputs and outputs that were bound before (`session.io_binding()`)."""
        try:
            self.session.run_with_iobinding(binding)
        except Exception as error:
            raise EngineError(f"{self.path}: ONNX Runtime failed to run the graph: {_brief(error)}") from error


def save_optimised(path: Path, provider: str, goal: Path) -> list[Path]:
    """Write the graph as ONNX Runtime rewrites it for this processor and provider; returns the files written.

    Weights go beside `goal` into `<goal>.data`, from which they are mapped when loaded.
    """
    data = goal.with_name(goal.name + ".data")
    options = {
        "session.optimized_model_external_initializers_file_name": data.name,
        "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
    }
    _load(path, ThreadOptions(intra_op=1), provider, save_to=goal, entries=options)
    return [file for file in (goal, data) if file.is_file()]


def load_helper(content: bytes, provider: str) -> Any:
    """A session of a small graph given as bytes; one thread."""
    runtime = import_onnxruntime()
    chosen = find_provider(provider, runtime)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    return runtime.InferenceSession(
        content, options, providers=[(chosen.execution_provider, chosen.options)], enable_fallback=False
    )


def _load(
    path: Path,
    threads: ThreadOptions,
    provider: str,
    optimised: bool = False,
    save_to: Path | None = None,
    entries: Mapping[str, str] | None = None,
) -> Any:
    runtime = import_onnxruntime()
    chosen = find_provider(provider, runtime)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads.intra_op
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(threads.spinning)))
    options.add_session_config_entry("session.record_ep_graph_assignment_info", str(int(provider != "cpu")))
    for key, value in (entries or {}).items():
        options.add_session_config_entry(key, value)
    levels = runtime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_DISABLE_ALL if optimised else levels.ORT_ENABLE_ALL
    if save_to is not None:
        options.optimized_model_filepath = str(save_to)
    options.log_severity_level = 4  # errors arrive as exceptions; do not print them as well
    try:
        session = runtime.InferenceSession(
            str(path), options, providers=[(chosen.execution_provider, chosen.options)], enable_fallback=False
        )
    except Exception as error:
        if type(error).__name__ in _DAMAGE:
            raise BundleError(
                f"{path}: not a graph that can be loaded: {_brief(error)}; export the bundle again"
            ) from error
        raise EngineError(
            f"{path}: ONNX Runtime {runtime.__version__} does not take this graph: {_brief(error)}; update onnxruntime"
        ) from error
    check_taken(path, chosen, session)
    return session


_import_lock = threading.Lock()


def import_onnxruntime() -> Any:
    """The onnxruntime module, or an error that says what to install."""
    with _import_lock:
        try:
            import onnxruntime  # type: ignore[import-untyped]

            _ = onnxruntime.InferenceSession
        except (ImportError, AttributeError) as error:
            if len(found := installed_runtimes()) > 1:
                raise EngineError(conflict_line(found)) from error
            raise EngineError(
                f"onnxruntime cannot be imported ({_brief(error)}); install it with `pip install 'lantern-rt[cpu]'`"
            ) from error
    return onnxruntime


def _check(path: Path, kind: str, found: Sequence[Any], expected: Sequence[Tensor]) -> dict[str, type[np.generic]]:
    """Compare a graph's tensors with what is expected of it; NumPy types by name."""
    tensors = {tensor.name: tensor for tensor in found}
    names = [tensor.name for tensor in expected]
    if missing := [name for name in names if name not in tensors]:
        raise BundleError(f"{path}: {kind} `{missing[0]}`: not in the graph, which has {', '.join(sorted(tensors))}")
    if kind == "input" and (extra := sorted(tensors.keys() - set(names))):
        raise BundleError(f"{path}: {kind} `{extra[0]}`: not expected; expected {', '.join(names)}")
    dtypes: dict[str, type[np.generic]] = {}
    for tensor in expected:
        actual = tensors[tensor.name]
        dtype = _TYPES.get(actual.type, actual.type)
        if dtype not in tensor.dtypes or not _fits(actual.shape, tensor.shape):
            shape = ", ".join("any" if size is None else str(size) for size in tensor.shape)
            raise BundleError(
                f"{path}: {kind} `{tensor.name}`: found {dtype} [{', '.join(map(str, actual.shape))}], "
                f"expected {' or '.join(tensor.dtypes)} [{shape}]; the graph is not the one bundle.json describes"
            )
        dtypes[tensor.name] = np.dtype(dtype).type
    return dtypes


def _fits(found: Sequence[int | str | None], expected: Sequence[int | None]) -> bool:
    """A free size is only given by a free one; a fixed size by itself, or by one the graph leaves open."""
    return len(found) == len(expected) and all(
        not isinstance(have, int) or have == want for have, want in zip(found, expected, strict=True)
    )


def _brief(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
