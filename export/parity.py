"""Whether a graph computes what its torch module computes, in ONNX Runtime on the CPU: part of every export.

A decoder's file is compared twice: as it stands, and in the layout that accelerators get from it. Neither side ever
holds all weights as float32: those of the module are converted where they are used, and large graphs run from the
mapped file. Weights that were rounded for storage are rounded in the module too, so that what is compared is the graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..bundle.manifest import DrafterSpec
from ..checks import brief
from ..engines.columns import ColumnCache, fill_up, node_count
from ..engines.device_graph import device_graph
from ..engines.host import import_onnxruntime
from ..errors import ParityError
from ..runtime.engine import Pass
from .checkpoints.deferred import computed, deferred
from .graph.graphs import Arrays, Graph
from .graph.precision import GraphFile, fake_quantize, round_nodes
from .models.decoder import LayerStack

onnxruntime: Any = import_onnxruntime()
TOLERANCE = 1e-4  # absolute up to values of 1, relative to a tensor's largest value above
# Of noise over signal: where activations are rounded to 8 bits, last bits decide which way some go, and layers add up.
# Found on random codes: 0.1 with the trained target of the scenes bundle.
INTEGER_TOLERANCE = 0.3
_LEAST_HALF = -6e4  # a mask's lowest number in float16
_SIZES = ("hidden_size", "num_layers", "num_kv_heads", "head_dim", "vocab_size")
LARGE = 1 << 28  # bytes of weights above which a graph runs from the mapped file, on two cases


def check_parity(
    graph: Graph,
    path: Path,
    tolerance: float = TOLERANCE,
    plan: GraphFile | None = None,
    counted: Callable[[int, int], None] = lambda done, total: None,
) -> float:
    """Compare `path` with `graph.module` on the graph's cases; returns the largest difference.

    plan: what the file was written from; without it, weights are taken to be as the module has them. counted: told how
    many runs are done, of how many.
    Raises: ParityError that names every tensor that differs by more than the tolerance.
    """
    large = plan is not None and plan.size > LARGE
    kinds = set(plan.storages.values()) if plan is not None else set()
    # Fused products of integer weights round activations as well: look at the graph without them.
    lean = large or bool({"int8", "int4"} & kinds)
    layouts = layouts_of(graph, path, integers="columns" in kinds)
    cases = list(graph.cases.items())
    cases = [cases[0], cases[-1]] if large else cases
    apart = noise if "columns" in kinds else scaled_difference
    tolerance = INTEGER_TOLERANCE if "columns" in kinds else tolerance
    done, total = itertools.count(), (len(layouts) + 1) * len(cases)
    results: dict[str, list[Arrays]] = {}  # per layout
    for layout, opened in layouts.items():
        sessions, results[layout] = opened(lean), []
        for case, inputs in cases:
            counted(next(done), total)
            try:
                results[layout].append(sessions.run(inputs))
            except Exception as error:  # ONNX Runtime's own exceptions share no base class
                where = f"on {case}{layout}: {brief(error)}"
                raise ParityError(f"{path.name}: does not run in ONNX Runtime {where}") from error
        del sessions  # and its memory, before the next or the module takes as much
    worst: dict[str, tuple[float, str]] = {}  # per tensor, with the case
    for (case, inputs), *found in zip(cases, *results.values(), strict=True):
        counted(next(done), total)
        for name, expected in run_module(graph, inputs, plan).items():
            for layout, arrays in zip(layouts, found, strict=True):
                here = apart(arrays[name], expected), f"{case}{layout}"
                worst[name] = max(worst.get(name, here), here, key=lambda entry: entry[0])
    counted(total, total)
    wrong = [f"{name} by {d:.3g} ({case})" for name, (d, case) in worst.items() if d > tolerance]
    if wrong:
        raise ParityError(f"{path.name}: differs from the checkpoint by more than {tolerance:g}: {', '.join(wrong)}")
    return max(difference for difference, _ in worst.values())


def layouts_of(
    graph: Graph, path: Path, integers: bool = False
) -> dict[str, Callable[[bool], Sessions | DeviceLayout]]:
    """What opens the file of a graph, lean or not, in each of its layouts, by how messages tell that from the first.

    integers: it multiplies integers, for which there is one layout.
    """
    found: dict[str, Callable[[bool], Sessions | DeviceLayout]] = {"": partial(Sessions, path)}
    if isinstance(graph.module, LayerStack) and not integers:
        found[", device layout"] = partial(DeviceLayout, graph, path)
    return found


def differences(found: NDArray[Any], expected: NDArray[Any]) -> tuple[float, float, float]:
    """The largest difference of two arrays: absolute, relative to each number, and scaled as limits are: absolute
    up to values of 1, relative to the largest value above.

    All are infinite where shapes, types or infinities differ, or one is not a number.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return np.inf, np.inf, np.inf
    if not expected.size:
        return 0.0, 0.0, 0.0
    wide = expected.astype(np.float64)
    with np.errstate(all="ignore"):
        apart = np.where(found == expected, 0, np.abs(found.astype(np.float64) - wide))
        relative = np.where(apart == 0, 0, apart / np.abs(wide))
    absolute = float(np.nan_to_num(apart, nan=np.inf, posinf=np.inf).max())
    # Of integers (codes) any difference counts whole.
    scale = 1.0 if np.issubdtype(expected.dtype, np.integer) else max(1.0, float(np.abs(wide).max()))
    scaled = absolute / scale if np.isfinite(scale) else absolute
    return absolute, float(np.nan_to_num(relative, nan=np.inf, posinf=np.inf).max()), scaled


def scaled_difference(found: NDArray[Any], expected: NDArray[Any]) -> float:
    """The third of `differences`."""
    return differences(found, expected)[2]


def noise(found: NDArray[Any], expected: NDArray[Any]) -> float:
    """The root mean square of the difference over that of what is expected; infinite if shapes differ."""
    if found.shape != expected.shape or not np.isfinite(found).all():
        return np.inf
    wide, signal = found.astype(np.float64) - expected, float(np.linalg.norm(expected.astype(np.float64)))
    return float(np.linalg.norm(wide)) / max(signal, 1e-30)


def run_module(graph: Graph, inputs: Arrays, plan: GraphFile | None = None) -> Arrays:
    """The module's outputs for a case by name; weights rounded as in `plan`."""
    with torch.no_grad(), computing(graph.module, plan):
        result = graph.module(*(torch.from_numpy(inputs[value.name]) for value in graph.inputs))
    tensors = (result,) if isinstance(result, Tensor) else result
    return {value.name: tensor.numpy() for value, tensor in zip(graph.outputs, tensors, strict=True)}


@contextmanager
def computing(module: nn.Module, plan: GraphFile | None = None) -> Iterator[None]:
    """The module computes in float32, whatever its weights are stored as, converting each where it is used.

    Of a table that rows are looked up in, only the rows found are converted.
    """
    with ExitStack() as undo:
        for prefix, part in module.named_modules():
            if isinstance(part, nn.Embedding):
                stored = partial(_as_stored, f"{prefix}.weight", plan=plan)
                undo.callback(part.register_forward_hook(lambda *call, stored=stored: stored(call[-1])).remove)
                continue
            if plan is not None and isinstance(part, nn.Linear) and _multiplies_integers(f"{prefix}.weight", plan):
                undo.callback(part.register_forward_pre_hook(lambda _, given: round_nodes(*given)).remove)
            for own in (part._parameters, part._buffers):
                for leaf, value in own.items():
                    if value is not None and value.is_floating_point():
                        undo.callback(own.__setitem__, leaf, value)
                        make = partial(_as_stored, f"{prefix}.{leaf}".removeprefix("."), value, plan)
                        own[leaf] = deferred(make, value.shape, torch.float32)
        yield


def _multiplies_integers(name: str, plan: GraphFile) -> bool:
    """Whether a module's weight is multiplied as integers, with what it is applied to rounded as well."""
    known = _in_plan(name, plan)
    return known is not None and plan.storages[known] == "columns"


def _as_stored(name: str, weight: Tensor, plan: GraphFile | None) -> Tensor:
    """A module's weight in float32, rounded as the graph has it."""
    known = None if plan is None else _in_plan(name, plan)
    if plan is None or known is None:
        return computed(weight).float()
    return fake_quantize(weight, plan.storages[known], known in plan.matrices)


def _in_plan(name: str, plan: GraphFile) -> str | None:
    """What the graph calls a module's weight: it may omit the leading part of its name; None: the graph has none."""
    return next((known for known in (name, name.partition(".")[2]) if known in plan.storages), None)


class Sessions:
    """ONNX Runtime on one graph file, for calls with and without an empty past.

    ONNX Runtime 1.31 divides by zero in a fused product over an empty tensor: calls with one run without that fusion.

    lean: nothing is fused, folded or copied: weights are read where the file is mapped, and those stored in other
    types are decoded one at a time, if nodes run in the order they are written in (66 MB at the peak instead of 800).
    model: run instead of the file, whose folder holds its weights.
    """

    def __init__(self, path: Path, lean: bool = False, model: bytes | None = None) -> None:
        self.path, self.lean, self.model = path, lean, model
        self._sessions: dict[bool, Any] = {}

    def run(self, inputs: Arrays) -> Arrays:
        """All outputs by name. A graph of float16 is given float32 rounded, and its outputs come back as float32."""
        empty = not self.lean and any(array.size == 0 for array in inputs.values())
        if empty not in self._sessions:
            self._sessions[empty] = onnxruntime.InferenceSession(
                self.path if self.model is None else self.model,
                self._options(),
                providers=["CPUExecutionProvider"],
                disabled_optimizers=["MatmulTransposeFusion"] if empty else None,
            )
        session = self._sessions[empty]
        halves = {tensor.name for tensor in session.get_inputs() if tensor.type == "tensor(float16)"}
        found = session.run(None, narrowed(inputs, halves))
        return dict(zip((o.name for o in session.get_outputs()), map(widened, found), strict=True))

    def _options(self) -> Any:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        folder = str(self.path.parent)  # taken only where no file says it
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False  # which outlive the session
        if self.lean:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
            options.add_session_config_entry("session.disable_prepacking", "1")
        return options


class DeviceLayout:
    """A decoder's file in the device layout, given the inputs of the file's own graph: past entries lie anywhere."""

    def __init__(self, graph: Graph, path: Path, lean: bool = False) -> None:
        sizes = {name: getattr(graph.module.config, name) for name in _SIZES}
        made = device_graph(path, DrafterSpec(**sizes), drafts=graph.role == "drafter")
        self._sessions, self._heads = Sessions(path, lean, made.model), (sizes["num_kv_heads"], sizes["head_dim"])

    def run(self, inputs: Arrays) -> Arrays:
        """All outputs by the names and in the shapes that the file's own graph has."""
        (rows, nodes), (heads, width) = inputs["position_ids"].shape, self._heads
        past, row = inputs["attention_mask"].shape[3] - nodes, np.arange(rows)[:, None]
        cache, generator = ColumnCache(np.full(rows, past), past + nodes), np.random.default_rng(0)
        places = cache.column_of[:, :past] = generator.permutation(cache.columns - 1)[:past]
        count = node_count(nodes)
        feeds = cache.encode(Pass(inputs["position_ids"], inputs["attention_mask"][:, 0] == 0), count)
        ids = fill_up(np.arange(rows * nodes).reshape(rows, nodes), count, np.int32)
        if "input_ids" in inputs:
            tokens = fill_up(inputs["input_ids"], count, np.int32)
            feeds |= {"token_ids": tokens, "hidden": inputs["target_hidden"], "hidden_ids": ids}
        else:
            embeds = inputs["input_embeds"]
            feeds |= {"token_ids": ids, "embeddings": embeds.reshape(-1, embeds.shape[2])}
        feeds["column_ids"] = np.arange(cache.columns, dtype=np.int32)
        for name in [name for name in inputs if name.startswith("past_")]:
            feeds[name] = np.zeros((rows, cache.columns, heads * width), np.float32)
            feeds[name][:, places] = inputs[name].transpose(1, 0, 2, 3).reshape(rows, past, heads * width)
        found, written = self._sessions.run(feeds), feeds["write"][:, :nodes, 1]
        results = {name: found.pop(name)[:, :nodes] for name in ("logits", "hidden_states")}
        for name, array in found.items():
            new = array[row, written].reshape(rows, nodes, heads, width)
            results[name.replace("present", "new", 1)] = new.transpose(1, 0, 2, 3)
        return results


def narrowed(inputs: Arrays, names: Collection[str]) -> Arrays:
    """The inputs, those named in float16."""
    return {
        name: np.maximum(array, _LEAST_HALF).astype(np.float16) if name in names else array
        for name, array in inputs.items()
    }


def widened(array: NDArray[Any]) -> NDArray[Any]:
    """The array in float32 if it is in float16."""
    return array.astype(np.float32) if array.dtype == np.float16 else array
