"""Writing of bundles from `BundleContents`, into which each model family reads its checkpoints.

Graphs, arrays and files are written to a temporary folder, checked and hashed. Then the folder is renamed. So the
output folder is written completely or not at all, also after an error or Ctrl-C.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from .. import __version__
from ..bundle.manifest import DECODERS, FORMAT_VERSION, CheckpointFileRecord, FileEntry, Manifest, compute_sha256
from ..engines.contracts import Progress
from ..engines.host import EXPORT_BYTES, check_space
from ..errors import CheckpointError
from ..output.files import check_new_folder, write_folder_atomically
from .checkpoints.deferred import list_concatenated_tensors
from .checkpoints.hub import find_hub_reference
from .convolutions import CALIBRATION, measure_activation_ranges, quantize_convolutions
from .graph.graph_file import GraphFile
from .graph.graphs import Graph, convert_to_float16, make_graph_file
from .graph.precision import Precisions, iter_float32_chunks, resolve_storage_type
from .model import BundleContents
from .neighbours import compute_neighbour_table
from .progress import ignore_progress, make_megabyte_counter
from .torch_settings import default_torch_settings
from .verify import check_decoded_images, check_graph_parity

_MANIFEST = "bundle.json"
_LOG = logging.getLogger(__name__)


@default_torch_settings()
def export_model(
    model: BundleContents,
    output: Path,
    *,
    name: str | None = None,
    precisions: Precisions | None = None,
    force: bool = False,
    progress: Progress = ignore_progress,
) -> Path:
    """Write the bundle of a model to a folder, and compare every graph with its module.

    Weights are read, rounded and written one at a time, so that large models need little memory. The name of the bundle
    is by default that of the folder. Without `precisions`, weights are not rounded.

    Raises:
        OutputError: the folder exists, cannot be written, or does not fit on the disk.
        RequestError: there is too little memory.
        ParityError: a graph differs from its module.
        CheckpointError: a weight cannot be stored in the precision.
    """
    precisions = precisions or Precisions()
    check_output_folder(output, force)
    graphs = _convert_graphs(model.graphs, precisions)
    graph_files: dict[str, GraphFile] = {}
    for done, graph in enumerate(graphs):
        progress("preparing graphs", done, len(graphs))
        rule = precisions.choose_storage_rule(graph.role)
        graph_files[graph.role] = make_graph_file(graph, rule, graph_files.get("target"))
    progress("preparing graphs", len(graphs), len(graphs))
    size = 4 * model.code_embeddings.numel()  # the output layer has as many weights
    bundle_bytes = sum(file.weight_bytes for file in graph_files.values()) + size
    check_space(max(min(EXPORT_BYTES, bundle_bytes), size), [(output, bundle_bytes)])  # logits are compared in float32
    with write_folder_atomically(output, force, _MANIFEST) as folder:
        paths = {"neighbors": folder / "neighbors.npz"}
        table = compute_neighbour_table(model.codebook, model.num_neighbors, partial(progress, "sorting neighbours"))
        np.savez(paths["neighbors"], indices=table)
        neighbors = table.shape[1]
        del table  # frees memory for the graphs
        for graph in graphs:
            vq = precisions.vq if graph.role == "vq_decoder" else "fp32"
            graph_file = graph_files.pop(graph.role)
            if vq == "int8":
                quantize_convolutions(graph_file, measure_activation_ranges(graph, len(model.codebook), progress))
            files = _write_graph(graph, graph_file, folder, progress)
            paths |= dict(zip((graph.role, f"{graph.role}.data"), files, strict=False))
            if vq != "fp32":
                check_decoded_images(graph, files[0], vq, progress)
            else:
                check_graph_parity(graph, files[0], graph_file, progress)
            del graph_file  # frees the memory of its weights
        paths["code_embeddings"] = folder / "code_embeddings.npy"
        _write_embedding_table(paths["code_embeddings"], model.code_embeddings, precisions.lossless)
        for role, (file, content) in model.extra_files.items():
            paths[role] = folder / file
            paths[role].write_bytes(content)
        fields = _make_manifest_fields(model, precisions, progress)
        count = _make_hashing_counter("files", paths.values(), progress)
        manifest = Manifest(
            **{"name": name or output.resolve().name, **fields},
            format_version=FORMAT_VERSION,
            neighbors=neighbors,
            files={role: FileEntry.from_file(path, count) for role, path in paths.items()},
        )
        target_hash = manifest.files.get("target.data", manifest.files["target"]).sha256
        if model.target_sha256 not in (None, target_hash):
            text = "the drafter learned from target weights %.12s..., not %.12s...: it may draft worse, as for another "
            _LOG.warning(text + "checkpoint or precision", model.target_sha256, target_hash)
        (folder / _MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", "utf-8")
    return output


def check_output_folder(output: Path, force: bool) -> None:
    """Raise OutputError if the folder exists, or if `force` would replace a folder that is not a bundle."""
    check_new_folder(output, force, _MANIFEST)


def _convert_graphs(graphs: Sequence[Graph], precisions: Precisions) -> Sequence[Graph]:
    if precisions.compute_type != "float32":
        convert = (
            convert_to_float16 if precisions.compute_type == "float16" else partial(replace, compute_type="bfloat16")
        )
        graphs = [convert(graph) if graph.role in DECODERS else graph for graph in graphs]
    if precisions.vq == "fp16":
        graphs = [replace(graph, compute_type="float16") if graph.role == "vq_decoder" else graph for graph in graphs]
    return graphs


def _write_graph(graph: Graph, graph_file: GraphFile, folder: Path, progress: Progress) -> list[Path]:
    file = f"{graph.role}.onnx"
    try:
        return graph_file.write(
            folder / file, make_megabyte_counter(f"writing {file}", graph_file.weight_bytes, progress)
        )
    except CheckpointError as error:  # the message should name the weight as in the checkpoint, not as in the graph
        checkpoint = getattr(graph.module, "checkpoint", None)
        error.field = checkpoint.make_error(error.field).field if checkpoint else f"weight {error.field}"
        raise


def _write_embedding_table(path: Path, table: Tensor, try_float16: bool) -> None:
    """Write an embedding table as an `.npy` file, chunk by chunk, in float16 if that is wished and loses nothing."""
    parts = list_concatenated_tensors(table)
    half = try_float16 and all(
        resolve_storage_type(path.name, part, "float16", "lossless") == "float16" for part in parts
    )
    with path.open("wb") as file:
        header = {"descr": "<f2" if half else "<f4", "fortran_order": False, "shape": tuple(table.shape)}
        np.lib.format.write_array_header_1_0(file, header)
        for part in parts:
            for chunk in iter_float32_chunks(part):
                file.write((chunk.half() if half else chunk).numpy().tobytes())


def _make_manifest_fields(model: BundleContents, precisions: Precisions, progress: Progress) -> dict[str, Any]:
    count = _make_hashing_counter("checkpoints", [path for _, path in model.sources], progress)
    sources = tuple(
        CheckpointFileRecord(
            role=role, name=path.name, sha256=compute_sha256(path, count), origin=find_hub_reference(path)
        )
        for role, path in model.sources
    )
    target = model.manifest_fields["target"]
    drafter = model.manifest_fields.get("drafter")
    return {
        **model.manifest_fields,
        "target": target.model_copy(
            update={"precision": precisions.get_precision("target"), "dtype": precisions.compute_type}
        ),
        "vq_precision": precisions.vq,
        "drafter": drafter and drafter.model_copy(update={"precision": precisions.get_precision("drafter")}),
        "provenance": {
            "exporter": f"lantern-rt {__version__}",
            "sources": sources,
            "licence": model.licence,
            "weights": model.weights,
            "calibration": CALIBRATION if precisions.vq == "int8" else None,
        },
    }


def _make_hashing_counter(files_name: str, paths: Iterable[Path], progress: Progress) -> Callable[[int], None]:
    return make_megabyte_counter(f"hashing {files_name}", sum(path.stat().st_size for path in paths), progress)
