"""How far a bundle's graphs are from what they were made from, in numbers: differences, agreement, divergence.

Graphs run in ONNX Runtime as they do when images are made, with all its fusions. They are held against the torch
modules of the checkpoint, in float32; or, without one, against ONNX's reference evaluator on small inputs, which
shows what the runtime does to the graph but not what storing did to the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray

from ..bundle.files import Bundle
from ..bundle.manifest import Manifest, Precision
from .graph.graphs import HIDDEN, Arrays, Graph
from .graph.precision import Precisions
from .parity import Sessions, differences, narrowed, run_module, widened


class Limits(NamedTuple):
    """What is accepted. `difference` is absolute up to values of 1, relative to a tensor's largest value above.

    Where a decoder's weights were rounded, it is judged by its distributions, and single numbers are only shown.
    """

    difference: float
    agreement: float
    divergence: float  # nats, mean over nodes


# Which of two almost equally likely tokens is ahead says nothing: that often as likely counts as the same.
TIE = 0.8

# Exact graphs differ by the order of sums. Of integers, the trained target of the scenes bundle shows an agreement
# of 1.000 and 0.951 and a divergence of 4e-4 and 3e-2 (docs/exporting.md); limits allow about five times that.
LIMITS: dict[Precision, Limits] = {
    "fp32": Limits(1e-4, 0.999, 1e-6),
    "fp16": Limits(1e-2, 0.99, 1e-4),
    "bf16-safe": Limits(1e-2, 0.99, 1e-4),
    "int8-weights": Limits(1e-2, 0.98, 2e-3),
    "int4-weights": Limits(1e-2, 0.85, 0.15),
}


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
