"""Whether a graph file computes what its torch module computes, in ONNX Runtime on the CPU.

`compare` runs both: `check_parity` is part of every export, `verify` reports on bundles. A decoder's file runs twice:
as it stands, and in the layout that accelerators get from it. Neither side ever holds all weights as float32: those of
the module are converted where they are used, and large graphs run from the mapped file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..bundle.manifest import DrafterSpec
from ..engines.columns import Places, fill_up, node_count
from ..engines.contracts import Progress
from ..engines.device_graph import device_graph
from ..engines.host import import_onnxruntime
from ..errors import BundleError, ParityError
from ..inputs import reading
from ..output.images import to_image
from ..runtime.engine import Pass
from .checkpoints.deferred import computed, deferred
from .graph.graphs import Arrays, Graph
from .graph.onnx_ops import FINE
from .graph.precision import GraphFile, fake_quantize, round_nodes
from .models.decoder import LayerStack
from .progress import silent

onnxruntime: Any = import_onnxruntime()
# Of noise over signal: where activations are rounded to 8 bits, last bits decide which way some go, and layers add up.
# Found on random codes: 0.1 with the trained target of the scenes bundle.
INTEGER_TOLERANCE = 0.3
_LEAST_TOLERANCE = 1e-4  # absolute up to values of 1, relative to a tensor's largest value above
_ROUNDINGS = 32  # random encoders of 8 to 16 layers were up to 10 times as far apart in ONNX Runtime and PyTorch
_LEAST_HALF = -6e4  # a mask's lowest number in float16
_SIZES = ("hidden_size", "num_layers", "num_kv_heads", "head_dim", "vocab_size")
MOST_LEVELS, LEAST_PSNR = 1.0, 40.0  # of rounded decoders' pictures: see `picture_difference`
LARGE = 1 << 28  # bytes of weights above which a graph runs from the mapped file, on two cases


def check_parity(graph: Graph, path: Path, plan: GraphFile | None = None, progress: Progress = silent) -> float:
    """Compare a graph that was just written with its module, on the graph's cases.

    Args:
        graph: with the module, and what `difference` is tolerated; products of integers have a limit of `noise`.
        path: the file.
        plan: what the file was written from, so that the module's weights are rounded as there.
        progress: runs done, of how many.

    Returns: the largest difference.
    Raises: ParityError: some tensors, all named, differ by more than the tolerance. BundleError, as `compare`.
    """
    kinds = set(plan.storages.values()) if plan is not None else set()
    integers = "columns" in kinds
    large = plan is not None and plan.size > LARGE
    cases = list(graph.cases)
    cases = [cases[0], cases[-1]] if large else cases
    # Fused products of integer weights round activations as well: look at the graph without them.
    lean = large or bool({"int8", "int4"} & kinds)
    measure, tolerance = (noise, INTEGER_TOLERANCE) if integers else (difference, tolerance_of(graph, plan))
    worst: dict[str, tuple[float, str]] = {}  # per tensor, with the case
    for case, results, expected in compare(graph, path, cases, plan, lean, progress):
        for name, array in expected.items():
            here = measure(results[name], array), case
            worst[name] = max(worst.get(name, here), here, key=lambda entry: entry[0])
    wrong = [f"{name} by {apart:.3g} ({case})" for name, (apart, case) in worst.items() if apart > tolerance]
    if wrong:
        raise ParityError(
            f"differs from the checkpoint by more than {tolerance:g}: {', '.join(wrong)}", field=path.name
        )
    return max(apart for apart, _ in worst.values())


def check_pictures(graph: Graph, path: Path, precision: str, progress: Progress = silent) -> None:
    """As `check_parity`, of an image decoder in int8 or fp16, by its pictures. Raises: ParityError, BundleError."""
    levels, psnr = picture_difference(compare(graph, path, [*graph.cases], progress=progress))
    if levels > MOST_LEVELS or psnr < LEAST_PSNR:
        raise ParityError(
            field=f"{path.name} in {precision}",
            found=f"pictures {levels:.2f} levels of 255 apart from the checkpoint's, {psnr:.1f} dB",
            expected=f"at most {MOST_LEVELS:g}, and {LEAST_PSNR:g} dB",
            remedy="export it with --vq-precision fp32",
        )


def picture_difference(pairs: Iterable[tuple[str, Arrays, Arrays]]) -> tuple[float, float]:
    """Mean difference in levels, and peak signal-to-noise ratio in dB, of pictures; pairs: as of `compare`."""
    apart = [
        np.asarray(to_image(one), np.float64).ravel() - np.asarray(to_image(other), np.float64).ravel()
        for _, outputs, expected in pairs
        for one, other in zip(outputs["images"], expected["images"], strict=True)
    ]
    levels = np.concatenate(apart)
    error = max(float(np.square(levels).mean()), 1e-9)
    return float(np.abs(levels).mean()), float(10 * np.log10(255**2 / error))


def compare(
    graph: Graph,
    path: Path,
    cases: Sequence[str],
    plan: GraphFile | None = None,
    lean: bool = False,
    progress: Progress = silent,
) -> Iterator[tuple[str, Arrays, Arrays]]:
    """Run a graph file, in each of its layouts, and its module.

    Args:
        graph: with the module.
        path: the file.
        cases: names of the graph's cases to run.
        plan: as `check_parity` has it, and so is progress.
        lean: as `Sessions` has it.

    Yields: the name of a case and layout, outputs of the file, outputs of the module.
    Raises: BundleError: the file does not run.
    """
    layouts: dict[str, Callable[[], Sessions | DeviceLayout]] = {"": partial(Sessions, path, lean)}
    if isinstance(graph.module, LayerStack):
        layouts[", device layout"] = partial(DeviceLayout, graph, path, lean)
    what, total, done = f"comparing {path.name}", (len(layouts) + 1) * len(cases), 0
    results: dict[str, list[Arrays]] = {}
    for layout, open_layout in layouts.items():
        results[layout] = []
        with reading(path, "a graph that runs", BundleError, "export the bundle again"):
            sessions = open_layout()
            for case in cases:
                progress(what, done, total)
                results[layout].append(sessions.run(graph.cases[case]))
                done += 1
            del sessions  # and its memory, before the next or the module takes as much
    for i, case in enumerate(cases):
        progress(what, done, total)
        expected = run_module(graph, graph.cases[case], plan)
        done += 1
        for layout in layouts:
            yield f"{case}{layout}", results[layout][i], expected
    progress(what, done, total)


def difference(result: NDArray[Any], expected: NDArray[Any]) -> float:
    """The largest difference of two arrays: absolute up to values of 1, relative to the largest value above.

    Infinite where shapes, types or infinities differ, or a number is none. Of integers any difference counts whole.
    """
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return np.inf
    if not expected.size:
        return 0.0
    wide = expected.astype(np.float64)
    with np.errstate(all="ignore"):
        apart = np.where(result == expected, 0, np.abs(result.astype(np.float64) - wide))
    largest = float(np.nan_to_num(apart, nan=np.inf, posinf=np.inf).max())
    scale = 1.0 if np.issubdtype(expected.dtype, np.integer) else max(1.0, float(np.abs(wide).max()))
    return largest / scale if np.isfinite(scale) else largest


def noise(result: NDArray[Any], expected: NDArray[Any]) -> float:
    """The root mean square of the difference over that of what is expected; infinite if shapes differ."""
    if result.shape != expected.shape or not np.isfinite(result).all():
        return np.inf
    wide = result.astype(np.float64) - expected
    signal = float(np.linalg.norm(expected.astype(np.float64)))
    return float(np.linalg.norm(wide)) / max(signal, 1e-30)


def tolerance_of(graph: Graph, plan: GraphFile | None = None) -> float:
    """How far outputs may lie from the module's, as `difference` has it; plan: as `check_parity` has it.

    Where the graph leaves it open, `_ROUNDINGS` times as far as those in float32 lie from those in float64.
    """
    if graph.tolerance is not None:
        return graph.tolerance
    apart = [_LEAST_TOLERANCE]
    for inputs in graph.cases.values():
        single, double = (run_module(graph, inputs, plan, dtype) for dtype in (torch.float32, torch.float64))
        apart += [_ROUNDINGS * difference(single[name], array.astype(np.float32)) for name, array in double.items()]
    return max(apart)


def run_module(
    graph: Graph, inputs: Arrays, plan: GraphFile | None = None, dtype: torch.dtype = torch.float32
) -> Arrays:
    """The module's outputs for a case by name, computed in `dtype`; weights rounded as in `plan`."""
    with torch.no_grad(), computing(graph.module, plan, dtype):
        result = graph.module(*(torch.from_numpy(inputs[value.name]) for value in graph.inputs))
    tensors = (result,) if isinstance(result, Tensor) else result
    return {value.name: tensor.numpy() for value, tensor in zip(graph.outputs, tensors, strict=True)}


@contextmanager
def computing(module: nn.Module, plan: GraphFile | None = None, dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """The module computes in `dtype`, whatever its weights are stored as, converting each where it is used.

    Of a table that rows are looked up in, only the rows found are converted.
    """
    with ExitStack() as undo:
        for prefix, part in module.named_modules():
            if isinstance(part, nn.Embedding):
                stored = partial(_as_stored, f"{prefix}.weight", plan=plan, dtype=dtype)
                undo.callback(part.register_forward_hook(lambda *call, stored=stored: stored(call[-1])).remove)
                continue
            if plan is not None and isinstance(part, nn.Linear) and _multiplies_integers(f"{prefix}.weight", plan):
                undo.callback(part.register_forward_pre_hook(lambda _, given: round_nodes(*given)).remove)
            for own in (part._parameters, part._buffers):
                for leaf, value in own.items():
                    if value is not None and value.is_floating_point():
                        undo.callback(own.__setitem__, leaf, value)
                        make = partial(_as_stored, f"{prefix}.{leaf}".removeprefix("."), value, plan, dtype)
                        own[leaf] = deferred(make, value.shape, dtype)
        yield


def _multiplies_integers(name: str, plan: GraphFile) -> bool:
    """Whether a module's weight is multiplied as integers, with what it is applied to rounded to 8 bits as well."""
    known = _in_plan(name, plan)
    return known is not None and plan.storages[known] == "columns" and not name.endswith(FINE)


def _as_stored(name: str, weight: Tensor, plan: GraphFile | None, dtype: torch.dtype) -> Tensor:
    known = None if plan is None else _in_plan(name, plan)
    if plan is None or known is None:
        return computed(weight).float().to(dtype)
    return fake_quantize(weight, plan.storages[known], known in plan.matrices, plan.compute).to(dtype)


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
            for what in ("prepacking", "quant_qdq"):  # which would turn all weights back first
                options.add_session_config_entry(f"session.disable_{what}", "1")
        return options


class DeviceLayout:
    """A decoder's file in the device layout, given the inputs of the file's own graph: past entries lie anywhere."""

    def __init__(self, graph: Graph, path: Path, lean: bool = False) -> None:
        sizes = {name: getattr(graph.module.config, name) for name in _SIZES}
        make = partial(device_graph, path, DrafterSpec(**sizes), drafts=graph.role == "drafter")
        made = make()
        made = make(plain=True) if made.dtype == "bfloat16" else made  # which CPUs do not compute in
        self._sessions, self._heads = Sessions(path, lean, made.model), (sizes["num_kv_heads"], sizes["head_dim"])

    def run(self, inputs: Arrays) -> Arrays:
        """All outputs by the names and in the shapes that the file's own graph has."""
        (rows, nodes), (heads, width) = inputs["position_ids"].shape, self._heads
        past, row = inputs["attention_mask"].shape[3] - nodes, np.arange(rows)[:, None]
        cache, generator = Places(np.full(rows, past), past + nodes), np.random.default_rng(0)
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
