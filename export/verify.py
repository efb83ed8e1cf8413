"""How far a bundle's graphs are from what they were made from, in numbers: differences, agreement, divergence.

Graphs run in ONNX Runtime as they do when images are made, with all its fusions. They are held against the torch
modules of the checkpoint, in float32; or, without one, against ONNX's reference evaluator on small inputs, which
shows what the runtime does to the graph but not what storing did to the weights.

Does not know checkpoint families, command lines or how a report is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from ..bundle.files import Bundle
from ..bundle.manifest import Manifest, Precision
from .graph.graphs import HIDDEN, Arrays, Case, Graph
from .parity import Sessions, narrowed, run_module, widened


@dataclass(frozen=True)
class Limits:
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
class TensorRow:
    """One output of a graph over all cases. `scaled` is the difference that limits are about.

    `largest_relative` is None where a number differs from 0, so that no ratio is finite.
    """

    graph: str
    tensor: str
    largest_absolute: float
    largest_relative: float | None
    scaled: float
    limit: float | None  # None: shown, not judged
    passed: bool


@dataclass(frozen=True)
class DistributionRow:
    """The token distributions of a decoder, over all nodes of all cases, at temperature 1 without guidance."""

    graph: str
    nodes: int
    agreement: float  # share of nodes whose likeliest token is the same, near ties included
    mean_divergence: float  # KL(reference || bundle), nats
    largest_divergence: float
    agreement_limit: float
    divergence_limit: float
    passed: bool


@dataclass(frozen=True)
class Verification:
    """The whole comparison."""

    bundle: str
    digest: str
    against: str
    precision: str
    tensors: tuple[TensorRow, ...]
    distributions: tuple[DistributionRow, ...]

    @property
    def passed(self) -> bool:
        """Whether everything is within its limits."""
        return all(row.passed for row in self.tensors) and all(row.passed for row in self.distributions)

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
    say = progress or (lambda _: None)
    tensors: list[TensorRow] = []
    distributions: list[DistributionRow] = []
    runs = _reference_runs(bundle) if graphs is None else _module_runs(bundle, graphs)
    for role, pairs in runs:
        say(f"comparing {role}.onnx")
        limits = LIMITS[_precision(bundle.manifest, role)]
        found, distribution = _compare(role, pairs, limits, exact=_precision(bundle.manifest, role) == "fp32")
        tensors += found
        distributions += [distribution] if distribution else []
    manifest = bundle.manifest
    return Verification(
        manifest.name, bundle.digest, against, manifest.target.precision, tuple(tensors), tuple(distributions)
    )


Pair = tuple[Arrays, Arrays]  # outputs of the bundle, and of what it is held against


def _module_runs(bundle: Bundle, graphs: Sequence[Graph]) -> Iterator[tuple[str, Iterator[Pair]]]:
    for graph in graphs:
        if graph.role in bundle.manifest.files:
            yield graph.role, _module_pairs(graph, bundle.path(graph.role))


def _module_pairs(graph: Graph, path: Path) -> Iterator[Pair]:
    sessions = Sessions(path)
    names = [value.name for value in graph.outputs]
    for case in graph.cases:
        yield sessions.run(case.inputs), dict(zip(names, run_module(graph, case.inputs), strict=True))


def _reference_runs(bundle: Bundle) -> Iterator[tuple[str, Iterator[Pair]]]:
    for role, entry in bundle.manifest.files.items():
        if entry.path.endswith(".onnx"):
            yield role, _reference_pairs(bundle.path(role), bundle.manifest)


def _reference_pairs(path: Path, manifest: Manifest) -> Iterator[Pair]:
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(str(path))
    sessions = Sessions(path)
    model = onnx.load(path, load_external_data=False)
    halves = {value.name for value in model.graph.input if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16}
    for case in small_cases(model.graph.input, manifest):
        found = map(widened, evaluator.run(None, narrowed(case.inputs, halves)))
        expected = dict(zip((o.name for o in model.graph.output), found, strict=True))
        yield sessions.run(case.inputs), expected


def small_cases(inputs: Iterable[onnx.ValueInfoProto], manifest: Manifest) -> Iterator[Case]:
    """One small case for a graph of a bundle, made from what the graph says of its inputs."""
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
            rows, _, nodes, columns = shape
            visible = np.tri(nodes, columns, columns - nodes, dtype=bool)
            arrays[value.name] = np.broadcast_to(np.where(visible, 0, HIDDEN), (rows, 1, nodes, columns)).astype("f4")
        else:
            arrays[value.name] = generator.standard_normal(shape, np.float32)
    yield Case("small", arrays)


def _precision(manifest: Manifest, role: str) -> Precision:
    """How a graph's weights were rounded; a condition follows its target in float16."""
    if role == "drafter":
        return manifest.drafter.precision if manifest.drafter else "fp32"
    if role == "condition":
        return "fp32" if manifest.target.precision == "fp32" else "bf16-safe"
    return manifest.target.precision if role == "target" else "fp32"


def _compare(
    role: str, pairs: Iterator[Pair], limits: Limits, exact: bool
) -> tuple[list[TensorRow], DistributionRow | None]:
    """All tensors of one graph, and its distributions if it is a decoder."""
    worst: dict[str, NDArray[np.float64]] = {}  # per tensor: absolute, relative, scaled
    agreements: list[NDArray[np.bool_]] = []
    divergences: list[NDArray[np.float64]] = []
    for found, expected in pairs:
        for name, measured in _differences(found, expected).items():
            worst[name] = np.maximum(worst.get(name, np.zeros(3)), measured)
        if "logits" in expected:
            agreements.append(agree(expected["logits"], found["logits"]).ravel())
            divergences.append(divergence(expected["logits"], found["logits"]).ravel())
    limit = limits.difference if exact or not agreements else None
    rows = []
    for name, measured in worst.items():
        absolute, relative, scaled = (float(number) for number in measured)
        shown = relative if np.isfinite(relative) else None
        rows.append(TensorRow(role, name, absolute, shown, scaled, limit, limit is None or scaled <= limit))
    if not agreements:
        return rows, None
    same, apart = np.concatenate(agreements), np.concatenate(divergences)
    passed = bool(same.mean() >= limits.agreement and apart.mean() <= limits.divergence)
    return rows, DistributionRow(
        role,
        len(same),
        float(same.mean()),
        float(apart.mean()),
        float(apart.max()),
        limits.agreement,
        limits.divergence,
        passed,
    )


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


def _differences(found: Arrays, expected: Arrays) -> dict[str, NDArray[np.float64]]:
    """Per tensor the largest absolute and relative difference, as polygraphy measures them, and the scaled one."""
    from polygraphy.logger import G_LOGGER  # type: ignore[import-untyped]

    same = sorted(name for name, array in expected.items() if found[name].shape == array.shape and array.size)
    sides = [{name: np.ascontiguousarray(side[name]) for name in same} for side in (expected, found)]
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL), np.errstate(all="ignore"):
        from polygraphy.comparator import (  # type: ignore[import-untyped]
            IterationResult,
            SimpleCompareFunc,
        )

        compare = SimpleCompareFunc(check_error_stat="max", infinities_compare_equal=True)
        compared = compare(*(IterationResult(side) for side in sides))
    result = {}
    for name, array in expected.items():
        if name not in same:
            off = 0.0 if found[name].shape == array.shape else np.inf
            result[name] = np.full(3, off)
            continue
        absolute, relative = (float(np.asarray(x)) for x in (compared[name].max_absdiff, compared[name].max_reldiff))
        scaled = absolute / max(1.0, float(np.abs(array).max()))
        relative = relative if absolute else 0.0
        result[name] = np.nan_to_num(np.array([absolute, relative, scaled]), nan=np.inf, posinf=np.inf)
    return result
