"""Verification of graphs against their checkpoints, in every export, and of whole bundles and engine folders."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel

from ..bundle.files import Bundle
from ..bundle.manifest import Manifest, Precision
from ..engines.contracts import Progress
from ..engines.engine_folder import EngineFolder
from ..engines.gpu import find_gpu
from ..errors import BundleError, CheckpointError, ParityError
from ..inputs import convert_read_errors, format_value
from .checkpoints.deferred import compute_deferred_tensor
from .compare import CaseResult, compare_graph_with_module, compare_graph_with_onnx_reference, run_torch_module
from .compare_engines import compare_engines
from .graph.graph_file import GraphFile
from .graph.graphs import Graph
from .graph.precision import Precisions
from .measures import (
    compare_top_tokens,
    measure_image_difference,
    measure_kl_divergence,
    measure_max_difference,
    measure_relative_error,
)
from .model import BundleContents
from .neighbours import compute_neighbour_table
from .progress import ignore_progress
from .torch_settings import default_torch_settings

# Maximum ratio of noise to signal if activations are rounded to 8 bits. A difference in the last bit may round an
# activation to another integer, and these errors add up over the layers. The target of `scenes` reaches 0.1 on random
# codes.
INT8_TOLERANCE = 0.3
_MIN_TOLERANCE = 1e-4  # minimum tolerance of `measure_max_difference` between a graph and its module
# Tolerance as a multiple of the module's rounding errors. For random encoders of 8 to 16 layers, ONNX Runtime and
# PyTorch differed by up to 10 times these errors.
_ROUNDING_FACTOR = 32
# Limits of images from rounded image decoders; see `measure_image_difference`.
MAX_LEVELS = 1.0
MIN_PSNR = 40.0
LARGE_GRAPH = 1 << 28  # bytes of weights above which a graph runs from the memory-mapped file, on two test cases only
_ARRAY_LIMIT = 1e-5  # maximum difference of arrays, which are stored unchanged or computed in a few float32 ops
# Fields of a manifest and of its parts that the user or the exporter chooses. A checkpoint determines all others.
_CHOSEN_FIELDS = {"family", "sampling", "decoding", "presets", "precision", "dtype", "head_codes"}


class VerificationLimits(NamedTuple):
    """Limits of the differences between a graph and its reference, for one precision.

    For decoders with rounded weights, only the limits of the token distributions apply.
    """

    max_difference: float  # maximum `max_difference` of a tensor
    min_token_agreement: float  # minimum share of nodes with the same likeliest token
    max_kl_divergence: float  # maximum of the mean KL over nodes, in nats


# Graphs without rounded weights differ only because sums are added in another sequence. In int8-weights, int4-weights
# and int8, the target of `scenes` has a token agreement of 1.000, 0.922 and 0.998, and a divergence of 9e-4, 5e-2 and
# 3e-3 (docs/exporting.md). The limits allow two to three times these differences.
LIMITS: dict[Precision, VerificationLimits] = {
    "fp32": VerificationLimits(1e-4, 0.999, 1e-6),
    "fp16": VerificationLimits(1e-2, 0.99, 1e-4),
    "bf16-safe": VerificationLimits(1e-2, 0.99, 1e-4),
    "bf16": VerificationLimits(1e-2, 0.99, 1e-4),
    "int8-weights": VerificationLimits(1e-2, 0.98, 2e-3),
    "int4-weights": VerificationLimits(1e-2, 0.80, 0.15),
    "int8": VerificationLimits(1e-2, 0.98, 8e-3),
}


@dataclass(frozen=True)
class VerificationReport:
    """Report of a comparison, with one dict per result that can be written as JSON."""

    bundle: str
    digest: str
    against: str  # name of the reference
    precision: str
    # Largest difference of each array, and of each output of a graph over all test cases. A `limit` of None means that
    # the difference is reported but not limited.
    tensors: list[dict[str, Any]] = field(default_factory=list)
    # Differences of the token distributions of each decoder, over all nodes of all test cases, at temperature 1 without
    # guidance. `agreement` is the share of nodes with the same most probable token, near ties included. The divergences
    # are KL(expected || bundle) in nats.
    distributions: list[dict[str, Any]] = field(default_factory=list)
    # Difference of the decoded images, for each image decoder in int8 or fp16.
    pictures: list[dict[str, Any]] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(row["passed"] for row in (*self.tensors, *self.distributions, *self.pictures))

    def as_dict(self) -> dict[str, Any]:
        return {"passed": self.passed, **asdict(self)}

    def add_tensor_result(self, role: str, tensor_name: str, difference: float, limit: float | None) -> None:
        """Add the difference of a tensor; a limit of None does not limit it."""
        passed = limit is None or difference <= limit
        row = {"graph": role, "tensor": tensor_name, "difference": difference, "limit": limit, "passed": passed}
        self.tensors.append(row)

    def add_image_results(self, role: str, case_results: Iterable[CaseResult]) -> None:
        levels, psnr = measure_image_difference(case_results)
        row = {
            "graph": role,
            "levels": levels,
            "psnr": psnr,
            "levels_limit": MAX_LEVELS,
            "psnr_limit": MIN_PSNR,
            "passed": levels <= MAX_LEVELS and psnr >= MIN_PSNR,
        }
        self.pictures.append(row)

    def add_graph_results(
        self, role: str, case_results: Iterable[CaseResult], precision: Precision, tolerance: float = 0.0
    ) -> None:
        """Add the differences of a graph's outputs, and of the token distributions of a decoder.

        A tolerance above the limit of the precision replaces that limit.
        """
        limits = LIMITS[precision]
        worst: dict[str, float] = {}
        agreements: list[NDArray[np.bool_]] = []
        divergences: list[NDArray[np.float64]] = []
        for _, outputs, expected in case_results:
            for name, array in expected.items():
                worst[name] = max(worst.get(name, 0.0), measure_max_difference(outputs[name], array))
            if "logits" in expected:
                agreements.append(compare_top_tokens(expected["logits"], outputs["logits"]).ravel())
                divergences.append(measure_kl_divergence(expected["logits"], outputs["logits"]).ravel())
        limit = max(limits.max_difference, tolerance) if precision == "fp32" or not agreements else None
        for name, largest in worst.items():
            self.add_tensor_result(role, name, largest, limit)
        if not agreements:
            return
        same = np.concatenate(agreements)
        divergent = np.concatenate(divergences)
        row = {
            "graph": role,
            "nodes": len(same),
            "agreement": float(same.mean()),
            "mean_divergence": float(divergent.mean()),
            "largest_divergence": float(divergent.max()),
            "agreement_limit": limits.min_token_agreement,
            "divergence_limit": limits.max_kl_divergence,
            "passed": bool(same.mean() >= limits.min_token_agreement and divergent.mean() <= limits.max_kl_divergence),
        }
        self.distributions.append(row)


@default_torch_settings()
def verify_bundle(
    bundle: Bundle,
    model: BundleContents | None = None,
    reference_name: str = "ONNX reference evaluator",
    progress: Progress = ignore_progress,
) -> VerificationReport:
    """Compare a bundle's arrays and graphs with its checkpoint, or each graph with ONNX's reference evaluator.

    `model` is the checkpoint that the bundle was made from. `reference_name` is for the report.

    Raises:
        CheckpointError: the checkpoint has other sizes than the bundle.
        BundleError: a graph does not run.
    """
    manifest = bundle.manifest
    precisions = Precisions(manifest.target.precision)
    report = VerificationReport(manifest.name, bundle.digest, reference_name, manifest.target.precision)
    graphs: dict[str, Graph | None]
    if model is None:
        graphs = {role: None for role, entry in manifest.files.items() if entry.path.endswith(".onnx")}
    else:
        _check_model_sizes(manifest, model)
        _compare_arrays(bundle, model, report, progress)
        graphs = {
            graph.role: replace(graph, compute_type=manifest.target.dtype)  # read by device layouts of decoders alone
            for graph in model.graphs
            if graph.role in manifest.files
        }
    for role, graph in graphs.items():
        path = bundle.path(role)
        with (
            np.errstate(all="ignore"),
            warnings.catch_warnings(action="ignore"),
            convert_read_errors(path, "a graph that runs", BundleError, "export the bundle again"),
        ):
            if graph is None:
                progress(f"comparing {path.name}", 0, 1)
                results: Iterable[CaseResult] = [compare_graph_with_onnx_reference(path, manifest)]
            else:
                results = compare_graph_with_module(graph, path, progress=progress)
            if role == "vq_decoder" and manifest.vq_precision != "fp32":
                report.add_image_results(role, results)
            else:
                report.add_graph_results(
                    role, results, precisions.get_precision(role), choose_tolerance(graph) if graph else 0.0
                )
    return report


def verify_engines(bundle: Bundle, folder: EngineFolder, progress: Progress) -> tuple[VerificationReport, str | None]:
    """Compare the graphs of an engine folder with the bundle's graphs, and the engines with the folder's graphs.

    The engines run only if this host has the GPU that they were built for. Otherwise the second result is the reason.

    Raises:
        EngineError: the folder belongs to another bundle, or a file has changed since the build.
        BundleError: a graph does not run.
    """
    manifest = folder.manifest
    folder.check_compatibility(bundle, manifest.builder_version)
    gpu = find_gpu()
    names = {gpu.name, gpu.compute_capability} if gpu else set()
    reason = None
    if names.isdisjoint([manifest.gpu] if manifest.gpu else manifest.compute_capabilities):
        wanted = manifest.gpu or f"a GPU of {', '.join(manifest.compute_capabilities)}"
        reason = f"they need {wanted}, and here is {gpu.name if gpu else 'none, or no driver'}"
    report = VerificationReport(
        bundle.manifest.name, bundle.digest, str(folder.folder), bundle.manifest.target.precision
    )
    for precision, result in compare_engines(bundle, folder, reason is None, progress):
        report.add_graph_results(result.case_name, [result], precision)
    return report, reason


def _check_model_sizes(manifest: Manifest, model: BundleContents) -> None:
    expected = dict(_iter_checkpoint_fields(vars(manifest)))
    files = dict(model.sources)
    for name, value in _iter_checkpoint_fields(model.manifest_fields):
        part = "drafter" if name.startswith("drafter.") else "target"
        if value != expected.get(name) and (part == "target" or manifest.drafter):
            raise CheckpointError(
                field=f"{files[part]}: {name}",
                found=format_value(value),
                expected=f"{format_value(expected.get(name))}, as the bundle has",
                remedy="give the checkpoint that the bundle was made from",
            )


def _iter_checkpoint_fields(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the manifest fields that a checkpoint determines, nested fields as `target.head_dim`."""
    for name, value in fields.items():
        if name in _CHOSEN_FIELDS:
            continue
        if isinstance(value, BaseModel):
            yield from _iter_checkpoint_fields(dict(value), prefix if name == "architecture" else f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _compare_arrays(bundle: Bundle, model: BundleContents, report: VerificationReport, progress: Progress) -> None:
    embeddings = compute_deferred_tensor(model.code_embeddings).float().numpy()
    report.add_tensor_result(
        "code_embeddings", "rows", measure_max_difference(bundle.code_embeddings, embeddings), _ARRAY_LIMIT
    )
    if bundle.manifest.neighbors:
        table = compute_neighbour_table(
            model.codebook, bundle.manifest.neighbors, partial(progress, "sorting neighbours")
        )
        report.add_tensor_result(
            "neighbors", "indices", measure_max_difference(bundle.neighbor_table.astype(table.dtype), table), 0.0
        )
    for role, (_, content) in model.extra_files.items():
        report.add_tensor_result(role, "bytes", 0.0 if bundle.path(role).read_bytes() == content else np.inf, 0.0)


def check_graph_parity(
    graph: Graph, path: Path, graph_file: GraphFile | None = None, progress: Progress = ignore_progress
) -> float:
    """Compare a graph that was just written with its module; return the largest difference of an output.

    With int8 matmul, `INT8_TOLERANCE` limits the relative error instead of the graph's tolerance.

    Raises:
        ParityError: some outputs differ by more than the tolerance; the message names all of them.
        CheckpointError: outputs of the module are NaN or infinite.
        BundleError: the file does not run.
    """
    storage_types = set(graph_file.storage_types.values()) if graph_file is not None else set()
    large = graph_file is not None and graph_file.weight_bytes > LARGE_GRAPH
    test_cases = [*graph.test_cases]
    if large:
        test_cases = [test_cases[0], test_cases[-1]]
    # Runtimes fuse products of integer weights and then round activations too. The check should show only errors of the
    # file, so it runs without fusions.
    low_memory = large or bool({"int8", "int4"} & storage_types)
    if "columns" in storage_types:
        measure = measure_relative_error
        tolerance = INT8_TOLERANCE
    else:
        measure = measure_max_difference
        tolerance = choose_tolerance(graph, graph_file)
    worst: dict[str, tuple[float, str]] = {}  # largest difference of each tensor, and its case
    for case, outputs, expected in compare_graph_with_module(graph, path, test_cases, graph_file, low_memory, progress):
        for name, array in expected.items():
            if not np.isfinite(array).all():
                checkpoint = getattr(graph.module, "checkpoint", None)
                field = checkpoint.make_error().field if checkpoint else path.name
                values = f"NaN or infinite {name} ({case})"
                remedy = "give weights that PyTorch computes with in float32"
                raise CheckpointError("the weights overflow float32", field=field, found=values, remedy=remedy)
            measured = (measure(outputs[name], array), case)
            worst[name] = max(worst.get(name, measured), measured, key=lambda entry: entry[0])
    wrong = [f"{name} by {largest:.3g} ({case})" for name, (largest, case) in worst.items() if largest > tolerance]
    if wrong:
        raise ParityError(
            f"differs from the checkpoint by more than {tolerance:g}: {', '.join(wrong)}", field=path.name
        )
    return max(largest for largest, _ in worst.values())


def check_decoded_images(graph: Graph, path: Path, precision: str, progress: Progress = ignore_progress) -> None:
    """Raise ParityError if images of a new decoder in int8 or fp16 (`precision`) differ too much from its module's."""
    levels, psnr = measure_image_difference(compare_graph_with_module(graph, path, progress=progress))
    if levels > MAX_LEVELS or psnr < MIN_PSNR:
        raise ParityError(
            field=f"{path.name} in {precision}",
            found=f"images {levels:.2f} levels of 255 apart from the checkpoint's, {psnr:.1f} dB",
            expected=f"at most {MAX_LEVELS:g}, and {MIN_PSNR:g} dB",
            remedy="export the bundle with --vq-precision fp32",
        )


def choose_tolerance(graph: Graph, graph_file: GraphFile | None = None) -> float:
    """Return the maximum difference that is allowed between the outputs of a graph and of its module.

    Without a tolerance of the graph, it is a multiple of the module's own differences between float32 and float64.
    """
    if graph.tolerance is not None:
        return graph.tolerance
    differences = [_MIN_TOLERANCE]
    for inputs in graph.test_cases.values():
        single, double = (
            run_torch_module(graph, inputs, graph_file, dtype) for dtype in (torch.float32, torch.float64)
        )
        differences += [
            _ROUNDING_FACTOR * measure_max_difference(single[name], array.astype(np.float32))
            for name, array in double.items()
        ]
    return max(differences)
