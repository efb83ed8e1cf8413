"""Whether graphs compute what their torch modules compute, in ONNX Runtime on the CPU, and how far off they are.

`check_parity` is part of an export. Neither side ever holds all weights as float32: those of the module are converted
where they are used, and large graphs run from the mapped file. Weights that were rounded for storage are rounded in
the module too, so that what is compared is the graph.

`verify` measures a bundle with all fusions of the runtime: against the checkpoint's modules in float32; or, without
one, against ONNX's reference evaluator on small inputs, which does not show what storing did to the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime  # type: ignore[import-untyped]
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..bundle.files import Bundle
from ..bundle.manifest import Manifest, Precision
from ..checks import brief
from ..errors import ParityError
from .checkpoints.deferred import computed, deferred
from .graph.graphs import HIDDEN, Arrays, Graph
from .graph.precision import GraphFile, Precisions, fake_quantize

TOLERANCE = 1e-4  # absolute up to values of 1, relative to a tensor's largest value above
_LEAST_HALF = -6e4  # a mask's lowest number in float16
LARGE = 1 << 28  # bytes of weights above which a graph runs from the mapped file, on two cases


class Limits(NamedTuple):
    """What is accepted; decoders with rounded weights are judged by their distributions alone."""

    difference: float  # absolute up to values of 1, relative to a tensor's largest value above
    agreement: float
    divergence: float  # nats, mean over nodes


TIE = 0.8  # which of two almost equally likely tokens is ahead says nothing: that often as likely counts as the same

# Exact graphs differ by the order of sums. Of integers, the trained target of the scenes bundle shows an agreement
# of 1.000 and 0.951 and a divergence of 4e-4 and 3e-2 (docs/exporting.md); limits allow about five times that.
LIMITS: dict[Precision, Limits] = {
    "fp32": Limits(1e-4, 0.999, 1e-6),
    "fp16": Limits(1e-2, 0.99, 1e-4),
    "bf16-safe": Limits(1e-2, 0.99, 1e-4),
    "int8-weights": Limits(1e-2, 0.98, 2e-3),
    "int4-weights": Limits(1e-2, 0.85, 0.15),
}


def check_parity(graph: Graph, path: Path, tolerance: float = TOLERANCE, plan: GraphFile | None = None) -> float:
    """Compare `path` with `graph.module` on the graph's cases; returns the largest difference.

    plan: what the file was written from; without it, weights are taken to be as the module has them.
    Raises: ParityError that names every tensor that differs by more than the tolerance.
    """
    large = plan is not None and plan.size > LARGE
    integers = plan is not None and bool({"int8", "int4"} & set(plan.storages.values()))
    # Fused products of integer weights round activations as well: look at the graph without them.
    sessions = Sessions(path, lean=large or integers)
    cases = list(graph.cases.items())
    cases = [cases[0], cases[-1]] if large else cases
    results = []
    for case, inputs in cases:
        try:
            results.append(sessions.run(inputs))
        except Exception as error:  # ONNX Runtime's own exceptions share no base class
            raise ParityError(f"{path.name}: does not run in ONNX Runtime on {case}: {brief(error)}") from error
    del sessions  # and its memory, before the module takes as much
    worst: dict[str, tuple[float, str]] = {}  # per tensor, with the case
    for (case, inputs), found in zip(cases, results, strict=True):
        for name, expected in run_module(graph, inputs, plan).items():
            here = differences(found[name], expected)[2], case
            worst[name] = max(worst.get(name, here), here, key=lambda entry: entry[0])
    wrong = [f"{name} by {d:.3g} ({case})" for name, (d, case) in worst.items() if d > tolerance]
    if wrong:
        raise ParityError(f"{path.name}: differs from the checkpoint by more than {tolerance:g}: {', '.join(wrong)}")
    return max(difference for difference, _ in worst.values())


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
            for own in (part._parameters, part._buffers):
                for leaf, value in own.items():
                    if value is not None and value.is_floating_point():
                        undo.callback(own.__setitem__, leaf, value)
                        make = partial(_as_stored, f"{prefix}.{leaf}".removeprefix("."), value, plan)
                        own[leaf] = deferred(make, value.shape, torch.float32)
        yield


def _as_stored(name: str, weight: Tensor, plan: GraphFile | None) -> Tensor:
    """A module's weight in float32, rounded as the graph has it; the graph omits leading parts of its name."""
    for known in (name, name.partition(".")[2]):
        if plan is not None and known in plan.storages:
            return fake_quantize(weight, plan.storages[known], known in plan.matrices)
    return computed(weight).float()


class Sessions:
    """ONNX Runtime on one graph file, for calls with and without an empty past.

    ONNX Runtime 1.31 divides by zero in a fused product over an empty tensor: calls with one run without that fusion.

    lean: nothing is fused, folded or copied: weights are read where the file is mapped, and those stored in other
    types are decoded one at a time, if nodes run in the order they are written in (66 MB at the peak instead of 800).
    """

    def __init__(self, path: Path, lean: bool = False) -> None:
        self.path, self.lean = path, lean
        self._sessions: dict[bool, onnxruntime.InferenceSession] = {}

    def run(self, inputs: Arrays) -> Arrays:
        """All outputs by name. A graph of float16 is given float32 rounded, and its outputs come back as float32."""
        empty = not self.lean and any(array.size == 0 for array in inputs.values())
        if empty not in self._sessions:
            self._sessions[empty] = onnxruntime.InferenceSession(
                self.path,
                self._options(),
                providers=["CPUExecutionProvider"],
                disabled_optimizers=["MatmulTransposeFusion"] if empty else None,
            )
        session = self._sessions[empty]
        halves = {tensor.name for tensor in session.get_inputs() if tensor.type == "tensor(float16)"}
        found = session.run(None, narrowed(inputs, halves))
        return dict(zip((o.name for o in session.get_outputs()), map(widened, found), strict=True))

    def _options(self) -> onnxruntime.SessionOptions:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False  # which outlive the session
        if self.lean:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
            options.add_session_config_entry("session.disable_prepacking", "1")
        return options


def narrowed(inputs: Arrays, names: Collection[str]) -> Arrays:
    """The inputs, those named in float16."""
    return {
        name: np.maximum(array, _LEAST_HALF).astype(np.float16) if name in names else array
        for name, array in inputs.items()
    }


def widened(array: NDArray[Any]) -> NDArray[Any]:
    """The array in float32 if it is in float16."""
    return array.astype(np.float32) if array.dtype == np.float16 else array


@dataclass(frozen=True)
class Verification:
    """The whole comparison, with rows ready for JSON.

    tensors: outputs of graphs over all cases; `limit` is on `scaled`, None where that is shown but not judged;
    `largest_relative` is None where a number differs from 0. distributions: those of a decoder's tokens, over all
    `nodes` of all cases, at temperature 1 without guidance. `agreement`: the share of nodes whose likeliest token is
    the same, near ties included; divergences are KL(reference || bundle) in nats.
    """

    bundle: str
    digest: str
    against: str
    precision: str
    tensors: list[dict[str, Any]]
    distributions: list[dict[str, Any]]

    @property
    def passed(self) -> bool:
        """Whether everything is within its limits."""
        return all(row["passed"] for row in (*self.tensors, *self.distributions))

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"passed": self.passed, **asdict(self)}


def verify(
    bundle: Bundle,
    graphs: Sequence[Graph] | None = None,
    against: str = "ONNX reference evaluator",
    progress: Callable[[str], None] | None = None,
) -> Verification:
    """Compare a bundle's graphs with the modules of `graphs`, or each with the reference evaluator."""
    manifest, roles = bundle.manifest, bundle.manifest.files
    precisions = Precisions(manifest.target.precision, manifest.drafter.precision if manifest.drafter else None)
    if graphs is None:
        onnx_roles = [role for role, entry in roles.items() if entry.path.endswith(".onnx")]
        runs = {role: _against_reference(bundle.path(role), manifest) for role in onnx_roles}
    else:
        runs = {graph.role: _against_module(graph, bundle.path(graph.role)) for graph in graphs if graph.role in roles}
    result = Verification(manifest.name, bundle.digest, against, manifest.target.precision, [], [])
    for role, pairs in runs.items():
        if progress:
            progress(f"comparing {role}.onnx")
        _compare(role, pairs, precisions.of(role), result)
    return result


def _against_module(graph: Graph, path: Path) -> Iterator[tuple[Arrays, Arrays]]:
    sessions = Sessions(path)
    for inputs in graph.cases.values():
        yield sessions.run(inputs), run_module(graph, inputs)


def _against_reference(path: Path, manifest: Manifest) -> Iterator[tuple[Arrays, Arrays]]:
    from onnx.reference import ReferenceEvaluator

    graph = onnx.load(path, load_external_data=False).graph
    halves = {value.name for value in graph.input if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16}
    inputs = _small_inputs(graph.input, manifest)
    found = map(widened, ReferenceEvaluator(str(path)).run(None, narrowed(inputs, halves)))
    yield Sessions(path).run(inputs), dict(zip((o.name for o in graph.output), found, strict=True))


def _small_inputs(inputs: Iterable[onnx.ValueInfoProto], manifest: Manifest) -> Arrays:
    """Random inputs for a graph of a bundle, made from what the graph says of them."""
    sizes = {"rows": 2, "nodes": 3, "past": 4, "past + nodes": 7, "images": 1}
    ranges = {
        "codes": manifest.codebook_size,
        "input_ids": manifest.target.vocab_size,
        "position_ids": manifest.target.max_positions,
        "class_ids": manifest.condition.classes or 1,
    }
    generator = np.random.default_rng(0)
    arrays: Arrays = {}
    for value in inputs:
        kind = value.type.tensor_type
        shape = [axis.dim_value or sizes.get(axis.dim_param, 2) for axis in kind.shape.dim]
        if kind.elem_type == onnx.TensorProto.INT64:
            arrays[value.name] = generator.integers(ranges.get(value.name, 2), size=shape)
        elif value.name == "attention_mask":  # causal among the new nodes
            visible = np.tri(shape[2], shape[3], shape[3] - shape[2], dtype=bool)
            arrays[value.name] = np.broadcast_to(np.where(visible, 0, HIDDEN), shape).astype("f4")
        else:
            arrays[value.name] = generator.standard_normal(shape, np.float32)
    return arrays


def _compare(role: str, pairs: Iterable[tuple[Arrays, Arrays]], precision: Precision, result: Verification) -> None:
    """Add rows for all tensors of one graph, and for its distributions if it is a decoder.

    pairs: outputs of the bundle, and of what it is held against.
    """
    limits = LIMITS[precision]
    worst: dict[str, NDArray[np.float64]] = {}  # per tensor: absolute, relative, scaled
    agreements: list[NDArray[np.bool_]] = []
    divergences: list[NDArray[np.float64]] = []
    for found, expected in pairs:
        for name, array in expected.items():
            worst[name] = np.maximum(worst.get(name, 0), differences(found[name], array))
        if "logits" in expected:
            agreements.append(agree(expected["logits"], found["logits"]).ravel())
            divergences.append(divergence(expected["logits"], found["logits"]).ravel())
    limit = limits.difference if precision == "fp32" or not agreements else None
    for name, (absolute, relative, scaled) in worst.items():
        row = {
            "graph": role,
            "tensor": name,
            "largest_absolute": float(absolute),
            "largest_relative": float(relative) if np.isfinite(relative) else None,
            "scaled": float(scaled),
            "limit": limit,
            "passed": limit is None or bool(scaled <= limit),
        }
        result.tensors.append(row)
    if agreements:
        same, apart = np.concatenate(agreements), np.concatenate(divergences)
        row = {
            "graph": role,
            "nodes": len(same),
            "agreement": float(same.mean()),
            "mean_divergence": float(apart.mean()),
            "largest_divergence": float(apart.max()),
            "agreement_limit": limits.agreement,
            "divergence_limit": limits.divergence,
            "passed": bool(same.mean() >= limits.agreement and apart.mean() <= limits.divergence),
        }
        result.distributions.append(row)


def agree(expected: NDArray[Any], found: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether the likeliest token of `found [.., tokens]` is that of `expected`, or `TIE` times as likely there."""
    chosen = np.take_along_axis(expected, found.argmax(-1)[..., None], -1)[..., 0]
    close: NDArray[np.bool_] = chosen >= expected.max(-1) + np.log(TIE)
    return close


def divergence(expected: NDArray[Any], found: NDArray[Any]) -> NDArray[np.float64]:
    """KL(softmax(expected) || softmax(found)) over the last axis, in nats, in float64."""
    logs = []
    for logits in (expected, found):
        shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
        logs.append(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))
    total: NDArray[np.float64] = (np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1)
    return np.maximum(total, 0)
