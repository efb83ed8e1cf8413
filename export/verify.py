"""How far a bundle is from the checkpoint it was made from: sizes, arrays, and graphs with all fusions of the runtime.

Graphs are compared with the checkpoint's modules in float32, decoders both as they stand and in the layout that
accelerators get; or, without a checkpoint, with ONNX's reference evaluator on small inputs, which does not show what
storing did to the weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from pydantic import BaseModel

from ..bundle.files import Bundle
from ..bundle.manifest import Manifest, Precision
from ..engines.contracts import Progress
from ..errors import BundleError, CheckpointError
from ..inputs import reading, short
from .checkpoints.deferred import computed
from .graph.graphs import HIDDEN, Arrays, Graph
from .graph.precision import Precisions
from .neighbours import neighbour_table
from .parity import (
    LEAST_PSNR,
    MOST_LEVELS,
    Sessions,
    compare,
    difference,
    narrowed,
    picture_difference,
    tolerance_of,
    widened,
)
from .progress import silent
from .writer import Model

_ARRAY_LIMIT = 1e-5  # of arrays that are stored as they are, or computed in a few float32 operations
_LARGEST_INPUT = 1 << 28  # numbers of a random input; a damaged graph may ask for any
# What a checkpoint determines of a manifest: fields, and parts with fields, but for those that are chosen.
_SIZES = ("grid_rows", "grid_columns", "codebook_size", "image_height", "image_width", "sizes", "row_end")
_PARTS = ("target", "drafter", "condition")
_CHOSEN = {"precision", "dtype", "head_codes"}


class Limits(NamedTuple):
    """What is accepted; decoders with rounded weights are judged by their distributions alone."""

    difference: float  # absolute up to values of 1, relative to a tensor's largest value above
    agreement: float
    divergence: float  # nats, mean over nodes


TIE = 0.8  # which of two almost equally likely tokens is ahead says nothing: that often as likely counts as the same

# Exact graphs differ by the order of sums. Of integers, the trained target of the scenes bundle shows an agreement of
# 1.000, 0.922 and 0.998 and a divergence of 9e-4, 5e-2 and 3e-3 (docs/exporting.md); limits allow two to three times
# that.
LIMITS: dict[Precision, Limits] = {
    "fp32": Limits(1e-4, 0.999, 1e-6),
    "fp16": Limits(1e-2, 0.99, 1e-4),
    "bf16-safe": Limits(1e-2, 0.99, 1e-4),
    "bf16": Limits(1e-2, 0.99, 1e-4),
    "int8-weights": Limits(1e-2, 0.98, 2e-3),
    "int4-weights": Limits(1e-2, 0.85, 0.15),
    "int8": Limits(1e-2, 0.98, 8e-3),
}


@dataclass(frozen=True)
class Verification:
    """The whole comparison, with rows ready for JSON.

    tensors: the largest `difference` of each output of a graph over all cases, and of each array; `limit` is None
    where it is shown but not judged. distributions: those of a decoder's tokens, over all `nodes` of all cases, at
    temperature 1 without guidance. `agreement`: the share of nodes whose likeliest token is the same, near ties
    included; divergences are KL(reference || bundle) in nats. pictures: those of an image decoder in int8 or fp16, as
    `picture_difference` has them.
    """

    bundle: str
    digest: str
    against: str
    precision: str
    tensors: list[dict[str, Any]] = field(default_factory=list)
    distributions: list[dict[str, Any]] = field(default_factory=list)
    pictures: list[dict[str, Any]] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether everything is within its limits."""
        return all(row["passed"] for row in (*self.tensors, *self.distributions, *self.pictures))

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"passed": self.passed, **asdict(self)}

    def add(self, graph: str, tensor: str, difference: float, limit: float | None) -> None:
        """Add a row about a tensor."""
        passed = limit is None or difference <= limit
        row = {"graph": graph, "tensor": tensor, "difference": difference, "limit": limit, "passed": passed}
        self.tensors.append(row)


def verify(
    bundle: Bundle,
    model: Model | None = None,
    against: str = "ONNX reference evaluator",
    progress: Progress = silent,
) -> Verification:
    """Compare a bundle's arrays and graphs with a checkpoint's, or each graph with the reference evaluator.

    Args:
        bundle: whose files are those of its manifest.
        model: that of the checkpoint.
        against: what the bundle is compared with, for the report.
        progress: how much of each piece of work is done.

    Raises:
        CheckpointError: the model has other sizes.
        BundleError: a graph does not run.
    """
    manifest = bundle.manifest
    precisions = Precisions(manifest.target.precision, manifest.drafter.precision if manifest.drafter else None)
    result = Verification(manifest.name, bundle.digest, against, manifest.target.precision)
    graphs: dict[str, Graph | None]
    if model is None:
        graphs = {role: None for role, entry in manifest.files.items() if entry.path.endswith(".onnx")}
    else:
        _check_sizes(manifest, model)
        _compare_arrays(bundle, model, result, progress)
        graphs = {graph.role: graph for graph in model.graphs if graph.role in manifest.files}
    for role, graph in graphs.items():
        path, precision = bundle.path(role), precisions.of(role)
        with (
            np.errstate(all="ignore"),
            warnings.catch_warnings(action="ignore"),
            reading(path, "a graph that runs", BundleError, "export the bundle again"),
        ):
            if graph is None:
                progress(f"comparing {path.name}", 0, 1)
                pairs: Iterable[tuple[str, Arrays, Arrays]] = [_evaluate(path, manifest)]
            else:
                pairs = compare(graph, path, [*graph.cases], progress=progress)
            if role == "vq_decoder" and manifest.vq_precision != "fp32":
                levels, psnr = picture_difference(pairs)
                limits = {"levels_limit": MOST_LEVELS, "psnr_limit": LEAST_PSNR}
                passed = levels <= MOST_LEVELS and psnr >= LEAST_PSNR
                result.pictures.append({"graph": role, "levels": levels, "psnr": psnr, **limits, "passed": passed})
                continue
            add_graph(role, pairs, precision, 0 if graph is None else tolerance_of(graph), result)
    return result


def _check_sizes(manifest: Manifest, model: Model) -> None:
    own, files = _determined(vars(manifest)), dict(model.sources)
    for name, value in _determined(model.fields).items():
        if value != own[name]:
            expected, remedy = f"{short(own[name])}, as the bundle has", "give the checkpoint that it was made from"
            place = files["drafter" if name.startswith("drafter.") else "target"]
            raise CheckpointError(field=f"{place}: {name}", found=short(value), expected=expected, remedy=remedy)


def _determined(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint determines, of the fields of a manifest; those of its parts by dotted names."""
    values = {name: fields[name] for name in _SIZES if name in fields}
    for part in _PARTS:
        content = fields.get(part)
        own = content.model_dump(exclude=_CHOSEN) if isinstance(content, BaseModel) else {}
        values |= {f"{part}.{name}": value for name, value in own.items()}
    return values


def _compare_arrays(bundle: Bundle, model: Model, result: Verification, progress: Progress) -> None:
    embeddings = computed(model.code_embeddings).float().numpy()
    result.add("code_embeddings", "rows", difference(bundle.code_embeddings, embeddings), _ARRAY_LIMIT)
    if bundle.manifest.neighbors:
        sorting = partial(progress, "sorting neighbours")
        table = neighbour_table(model.codebook, bundle.manifest.neighbors, sorting)
        result.add("neighbors", "indices", difference(bundle.neighbors.astype(table.dtype), table), 0.0)
    for role, (_, content) in model.files.items():
        result.add(role, "bytes", 0.0 if bundle.path(role).read_bytes() == content else np.inf, 0.0)


def _evaluate(path: Path, manifest: Manifest) -> tuple[str, Arrays, Arrays]:
    from onnx.reference import ReferenceEvaluator

    graph = onnx.load(path, load_external_data=False).graph
    halves = {value.name for value in graph.input if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16}
    inputs = _small_inputs(graph.input, manifest)
    outputs = map(widened, ReferenceEvaluator(str(path)).run(None, narrowed(inputs, halves)))
    expected = dict(zip((output.name for output in graph.output), outputs, strict=True))
    return "", Sessions(path).run(inputs), expected


def _small_inputs(inputs: Iterable[onnx.ValueInfoProto], manifest: Manifest) -> Arrays:
    pixels = 2 * manifest.image_height // manifest.grid_rows  # of two codes
    sizes = {"rows": 2, "nodes": 3, "past": 4, "past + nodes": 7, "images": 1, "height": pixels, "width": pixels}
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
        if prod(shape) > _LARGEST_INPUT:
            raise ValueError(f"input {short(value.name)} of sizes {short(shape)}")
        if kind.elem_type == onnx.TensorProto.INT64:
            arrays[value.name] = generator.integers(ranges.get(value.name, 2), size=shape)
        elif value.name == "attention_mask":  # causal among the new nodes
            visible = np.tri(shape[2], shape[3], shape[3] - shape[2], dtype=bool)
            arrays[value.name] = np.broadcast_to(np.where(visible, 0, HIDDEN), shape).astype("f4")
        else:
            arrays[value.name] = generator.standard_normal(shape, np.float32)
    return arrays


def add_graph(
    role: str,
    pairs: Iterable[tuple[str, Arrays, Arrays]],
    precision: Precision,
    tolerance: float,
    result: Verification,
) -> None:
    """Add rows for all tensors of one graph, and for its distributions if it is a decoder; pairs as of `compare`.

    tolerance: of the graph, where it is more than what its precision allows.
    """
    limits = LIMITS[precision]
    worst: dict[str, float] = {}
    agreements: list[NDArray[np.bool_]] = []
    divergences: list[NDArray[np.float64]] = []
    for _, outputs, expected in pairs:
        for name, array in expected.items():
            worst[name] = max(worst.get(name, 0.0), difference(outputs[name], array))
        if "logits" in expected:
            agreements.append(agree(expected["logits"], outputs["logits"]).ravel())
            divergences.append(divergence(expected["logits"], outputs["logits"]).ravel())
    limit = max(limits.difference, tolerance) if precision == "fp32" or not agreements else None
    for name, apart in worst.items():
        result.add(role, name, apart, limit)
    if agreements:
        same, far = np.concatenate(agreements), np.concatenate(divergences)
        row = {
            "graph": role,
            "nodes": len(same),
            "agreement": float(same.mean()),
            "mean_divergence": float(far.mean()),
            "largest_divergence": float(far.max()),
            "agreement_limit": limits.agreement,
            "divergence_limit": limits.divergence,
            "passed": bool(same.mean() >= limits.agreement and far.mean() <= limits.divergence),
        }
        result.distributions.append(row)


def agree(expected: NDArray[Any], logits: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether the likeliest token of `logits [.., tokens]` is that of `expected`, or `TIE` times as likely there."""
    chosen = np.take_along_axis(expected, logits.argmax(-1)[..., None], -1)[..., 0]
    close: NDArray[np.bool_] = chosen >= expected.max(-1) + np.log(TIE)
    return close


def divergence(expected: NDArray[Any], logits: NDArray[Any]) -> NDArray[np.float64]:
    """KL(softmax(expected) || softmax(logits)) over the last axis, in nats, in float64."""
    logs = []
    for values in (expected, logits):
        shifted = values.astype(np.float64) - values.max(-1, keepdims=True)
        logs.append(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))
    total: NDArray[np.float64] = (np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1)
    return np.maximum(total, 0)
