"""From a model to a bundle: graphs, arrays and files into a folder beside the goal, checked, hashed, then renamed.

The goal appears whole or not at all, also after an error or Ctrl-C. A family reads its files into a `Model`;
`export_model` writes its bundle.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from .. import __version__
from ..bundle.manifest import FORMAT_VERSION, FileEntry, Manifest, Source, file_sha256
from ..engines.contracts import Progress
from ..errors import CheckpointError, OutputError
from ..output.files import atomic_folder, check_new_folder, existing_parent
from .checkpoints.deferred import computed
from .checkpoints.hub import cached_origin
from .convolutions import CALIBRATION, calibrate, quantise_convolutions
from .graph.graphs import in_half, plan_graph
from .graph.precision import Precisions
from .model import Model
from .neighbours import neighbour_table
from .progress import count_megabytes, silent
from .verify import check_images, check_parity

_MANIFEST = "bundle.json"
_LOG = logging.getLogger(__name__)


def export_model(
    model: Model,
    output: Path,
    *,
    name: str | None = None,
    precisions: Precisions | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> Path:
    """Write the bundle of a model and compare every graph with its module.

    Weights are read, rounded and written one at a time.

    Args:
        model: what the bundle is made from.
        output: the folder to write.
        name: of the bundle, by default the folder's.
        precisions: how weights are rounded, by default not at all.
        force: whether to replace a bundle.
        progress: how much of each piece of work is done, at first nothing.

    Returns:
        The folder.

    Raises:
        OutputError, ParityError, CheckpointError.
    """
    rounding = precisions or Precisions()
    check_output(output, force)
    graphs = model.graphs
    if rounding.compute != "float32":
        made = in_half if rounding.compute == "float16" else partial(replace, compute="bfloat16")
        graphs = [made(graph) if graph.role in ("target", "drafter") else graph for graph in graphs]
    if rounding.vq == "fp16":
        graphs = [replace(graph, compute="float16") if graph.role == "vq_decoder" else graph for graph in graphs]
    plans = {}
    for done, graph in enumerate(graphs):
        progress("preparing graphs", done, len(graphs))
        plans[graph.role] = plan_graph(graph, rounding.rule(graph.role))
    progress("preparing graphs", len(graphs), len(graphs))
    needed = sum(plan.size for plan in plans.values()) + 4 * model.code_embeddings.numel()
    free = shutil.disk_usage(existing_parent(output)).free
    if needed > free:
        raise OutputError(
            field=str(output),
            found=f"{free / 1e9:.2f} GB free on the disk",
            expected=f"{needed / 1e9:.2f} GB, which the bundle takes",
            remedy="free some, choose another place, or a smaller precision",
        )
    with atomic_folder(output, force, _MANIFEST) as folder:
        paths = {"neighbors": folder / "neighbors.npz"}
        table = neighbour_table(model.codebook, model.neighbors, partial(progress, "sorting neighbours"))
        np.savez(paths["neighbors"], indices=table)
        neighbors = table.shape[1]
        del table  # it is large
        for graph in graphs:
            plan, file = plans.pop(graph.role), f"{graph.role}.onnx"
            rounded = rounding.vq if graph.role == "vq_decoder" else "fp32"
            if rounded == "int8":
                quantise_convolutions(plan, calibrate(graph, len(model.codebook), progress))
            try:
                files = plan.write(folder / file, count_megabytes(f"writing {file}", plan.size, progress))
            except CheckpointError as error:  # about a weight by our name of it
                checkpoint = getattr(graph.module, "checkpoint", None)
                error.field = checkpoint.error(error.field).field if checkpoint else f"weight {error.field}"
                raise
            paths |= dict(zip((graph.role, f"{graph.role}.data"), files, strict=False))
            if rounded != "fp32":
                check_images(graph, files[0], rounded, progress)
            else:
                check_parity(graph, files[0], plan, progress)
        paths["code_embeddings"] = folder / "code_embeddings.npy"
        table = np.ascontiguousarray(computed(model.code_embeddings).float().numpy())
        half = table.astype(np.float16)
        np.save(paths["code_embeddings"], half if rounding.lossless and np.array_equal(half, table) else table)
        for role, (file, content) in model.files.items():
            paths[role] = folder / file
            paths[role].write_bytes(content)
        hashed = _hashed("checkpoints", [path for _, path in model.sources], progress)
        sources = tuple(
            Source(role=role, name=path.name, sha256=file_sha256(path, hashed), origin=cached_origin(path))
            for role, path in model.sources
        )
        target, drafter = model.fields["target"], model.fields.get("drafter")
        fields = {
            "name": name or output.resolve().name,
            **model.fields,
            "target": target.model_copy(update={"precision": rounding.of("target"), "dtype": rounding.compute}),
            "vq_precision": rounding.vq,
            "drafter": drafter and drafter.model_copy(update={"precision": rounding.of("drafter")}),
            "provenance": {
                "exporter": f"lantern-rt {__version__}",
                "sources": sources,
                "licence": model.licence,
                "weights": model.weights,
                "calibration": CALIBRATION if rounding.vq == "int8" else None,
            },
        }
        hashed = _hashed("files", paths.values(), progress)
        manifest = Manifest(
            **fields,
            format_version=FORMAT_VERSION,
            neighbors=neighbors,
            files={r: FileEntry.of(p, hashed) for r, p in paths.items()},
        )
        own = manifest.files.get("target.data", manifest.files["target"]).sha256
        if model.drafts_for not in (None, own):
            text = "the drafter learned from target weights %.12s..., not %.12s...: it may draft worse, as for another "
            _LOG.warning(text + "checkpoint or precision", model.drafts_for, own)
        (folder / _MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", "utf-8")
    return output


def check_output(output: Path, force: bool) -> None:
    """Raises: OutputError: the folder is there already, or `force` would replace what is no bundle."""
    check_new_folder(output, force, _MANIFEST)


def _hashed(what: str, paths: Iterable[Path], progress: Progress) -> Callable[[int], None]:
    return count_megabytes(f"hashing {what}", sum(path.stat().st_size for path in paths), progress)
