"""From a model to a bundle: graphs, arrays and files into a folder beside the goal, checked, hashed, then renamed.

The goal appears whole or not at all, also after an error or Ctrl-C. A family reads its files into a `Model`;
`export_model` writes its bundle, `verify` compares a bundle with it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .. import __version__
from ..bundle.manifest import FORMAT_VERSION, FileEntry, Manifest, Provenance, Source, file_sha256
from ..engines.contracts import Progress
from ..errors import OutputError
from ..output.files import check_new_folder, existing_parent, folder_or_nothing
from .checkpoints.deferred import computed
from .graph.graphs import Graph, in_half, plan_graph
from .graph.precision import Precisions
from .neighbours import MOST, neighbour_table
from .parity import check_parity
from .progress import count_each, count_megabytes

_MANIFEST = "bundle.json"


@dataclass(frozen=True)
class Model:
    """All that a bundle is made from; weights are mapped or deferred until they are written.

    graphs: each becomes `<role>.onnx`. code_embeddings `[codes, hidden_size]`: the target's input rows for codes.
    codebook `[codes, code_dim]`: what neighbours are found by, `neighbors` of them. fields: those of `Manifest` that
    are not filled in here. sources: files by role, for the provenance. files: further roles with a file name and its
    content (`tokenizer`: `("tokenizer.json", ...)`).
    """

    graphs: Sequence[Graph]
    code_embeddings: Tensor
    codebook: NDArray[np.floating[Any]]
    fields: Mapping[str, Any]
    sources: Sequence[tuple[str, Path]] = ()
    files: Mapping[str, tuple[str, bytes]] = field(default_factory=dict)
    neighbors: int = MOST
    licence: str = "unknown (see the checkpoint's source)"


def export_model(
    model: Model,
    output: Path,
    *,
    name: str | None = None,
    precisions: Precisions | None = None,
    origins: Mapping[Path, str] | None = None,
    force: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> Path:
    """Write the bundle of a model and return its folder. Weights are read, rounded and written one at a time.

    Every graph is compared with its module. name: the output folder's by default. precisions: how weights are
    rounded, by default not at all. origins: where sources or their folders were fetched from. progress: told of every
    piece of work how much of it is done, at first nothing, and of how much.
    Raises: OutputError, ParityError, CheckpointError.
    """
    rounding = precisions or Precisions()
    check_output(output, force)
    graphs = model.graphs
    if rounding.compute == "float16":
        graphs = [in_half(graph) if graph.role in ("target", "drafter") else graph for graph in graphs]
    prepared = count_each("preparing graphs", graphs, progress)
    plans = {graph.role: plan_graph(graph, rounding.rule(graph.role)) for graph in prepared}
    total = sum(plan.size for plan in plans.values())
    free = shutil.disk_usage(existing_parent(output)).free
    if (needed := total + 4 * model.code_embeddings.numel()) > free:
        raise OutputError(
            f"{output}: the bundle takes about {needed / 1e9:.2f} GB, but the disk has {free / 1e9:.2f} GB free; "
            "free some, choose another place, or a smaller --precision"
        )
    with folder_or_nothing(output, force, _MANIFEST, "bundle") as folder:
        paths = {"neighbors": folder / "neighbors.npz"}
        neighbours = _write_neighbours(paths["neighbors"], model, progress)
        for graph in graphs:
            plan, file = plans.pop(graph.role), f"{graph.role}.onnx"
            files = plan.write(folder / file, count_megabytes(f"writing {file}", plan.size, progress))
            paths |= dict(zip((graph.role, f"{graph.role}.data"), files, strict=False))
            comparing = partial(progress, f"comparing {file} with the checkpoint")
            check_parity(graph, files[0], graph.tolerance, plan, comparing)
        paths["code_embeddings"] = folder / "code_embeddings.npy"
        np.save(paths["code_embeddings"], np.ascontiguousarray(computed(model.code_embeddings).float().numpy()))
        for role, (file, content) in model.files.items():
            paths[role] = folder / file
            paths[role].write_bytes(content)
        known, hashed = origins or {}, _hashed("checkpoints", [path for _, path in model.sources], progress)
        sources = tuple(
            Source(role=r, name=p.name, sha256=file_sha256(p, hashed), origin=known.get(p, known.get(p.parent)))
            for r, p in model.sources
        )
        target, drafter = model.fields["target"], model.fields.get("drafter")
        fields = {
            "name": name or output.resolve().name,
            **model.fields,
            "target": target.model_copy(update={"precision": rounding.of("target"), "dtype": rounding.compute}),
            "drafter": drafter and drafter.model_copy(update={"precision": rounding.of("drafter")}),
            "provenance": Provenance(exporter=f"lantern-rt {__version__}", sources=sources, licence=model.licence),
        }
        hashed = _hashed("files", paths.values(), progress)
        manifest = Manifest(
            **fields,
            format_version=FORMAT_VERSION,
            neighbors=neighbours,
            files={r: FileEntry.of(p, hashed) for r, p in paths.items()},
        )
        (folder / _MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", "utf-8")
    return output


def _write_neighbours(path: Path, model: Model, progress: Progress) -> int:
    """Write the table of neighbours, which is large and needed no more; returns how many every code has."""
    table = neighbour_table(model.codebook, model.neighbors, partial(progress, "sorting neighbours"))
    np.savez(path, **table._asdict())
    return len(table.indices[0])


def check_output(output: Path, force: bool) -> None:
    """Raises: OutputError for a goal that is there already, or that `force` would replace without being a bundle."""
    check_new_folder(output, force, _MANIFEST, "bundle")


def _hashed(what: str, paths: Iterable[Path], progress: Progress) -> Callable[[int], None]:
    """Counts what is hashed of these files."""
    return count_megabytes(f"hashing {what}", sum(path.stat().st_size for path in paths), progress)
