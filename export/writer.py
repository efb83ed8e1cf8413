"""Writing a bundle: graphs, arrays and files into a folder beside the goal, checked, hashed, then renamed.

The goal appears whole or not at all, also after an error or Ctrl-C. Does not know families: graphs come as
torch modules with their names, and the manifest's fields come from the caller.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..bundle.manifest import FORMAT_VERSION, FileEntry, Manifest
from ..errors import OutputError
from ..output.folders import check_new_folder, folder_or_nothing
from ..progress import Progress
from .graph.graphs import Graph, in_half, plan_graph
from .graph.precision import Precisions
from .neighbours import Neighbours
from .parity import check_parity

_MANIFEST = "bundle.json"


def write_bundle(
    output: Path,
    *,
    graphs: Sequence[Graph],
    code_embeddings: NDArray[np.float32],
    fields: Mapping[str, Any],
    neighbours: Neighbours | None = None,
    files: Mapping[str, tuple[str, bytes]] | None = None,
    halve: bool = False,
    precisions: Precisions | None = None,
    force: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Write a bundle folder and return its path. Weights are read, rounded and written one at a time.

    `graphs` are written as `<role>.onnx` and compared with their modules. `code_embeddings [codes, width]`
    are the target's input rows for codes. `files` maps further roles to a file name and its content
    (`tokenizer`: `("tokenizer.json", ...)`). `fields` are those of `Manifest` but for `format_version`,
    `files`, `neighbors` and the decoders' `precision`, which are filled in here. `precisions`: how weights are
    rounded, by default not at all; `halve`: store weights that float16 holds without loss in that format.
    `progress` is told of every piece of work, and of bytes if it is a `Progress`.
    """
    say = progress or Progress()
    rounding = precisions or Precisions()
    check_output(output, force)
    if rounding.compute == "float16":
        graphs = [in_half(graph) if graph.role in ("target", "drafter") else graph for graph in graphs]
    plans = {graph.role: plan_graph(graph, "lossless" if halve else rounding.of(graph.role)) for graph in graphs}
    total = sum(plan.size for plan in plans.values())
    arrays = [code_embeddings] + ([] if neighbours is None else [neighbours.indices, neighbours.distances])
    _check_space(output, total + sum(array.nbytes for array in arrays))
    tell = _Meter(say, total)
    with folder_or_nothing(output, force, _MANIFEST, "bundle") as folder:
        paths: dict[str, Path] = {}
        for graph in graphs:
            say(f"writing {graph.role}.onnx")
            plan = plans.pop(graph.role)
            written = plan.write(folder / f"{graph.role}.onnx", tell.add)
            paths |= dict(zip((graph.role, f"{graph.role}.data"), written, strict=False))
            say(f"comparing {graph.role}.onnx with the checkpoint")
            check_parity(graph, written[0], graph.tolerance, plan=plan)
        paths["code_embeddings"] = folder / "code_embeddings.npy"
        np.save(paths["code_embeddings"], np.ascontiguousarray(code_embeddings, np.float32))
        if neighbours is not None:
            paths["neighbors"] = folder / "neighbors.npz"
            np.savez(paths["neighbors"], indices=neighbours.indices, distances=neighbours.distances)
        for role, (name, content) in (files or {}).items():
            paths[role] = folder / name
            paths[role].write_bytes(content)
        say("hashing")
        manifest = Manifest(
            **_with_precision(fields, rounding),
            format_version=FORMAT_VERSION,
            neighbors=0 if neighbours is None else neighbours.indices.shape[1],
            files={role: FileEntry.of(path) for role, path in paths.items()},
        )
        (folder / _MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", "utf-8")
    return output


def check_output(output: Path, force: bool) -> None:
    """Refuse a goal that is there already, or that `force` would replace without being a bundle."""
    check_new_folder(output, force, _MANIFEST, "bundle")


class _Meter:
    """Counts bytes for a progress report."""

    def __init__(self, report: object, total: int) -> None:
        self.report = report if isinstance(report, Progress) else Progress()
        self.done, self.total = 0, total

    def add(self, count: int) -> None:
        self.done += count
        self.report.bytes(self.done, self.total)


def _check_space(output: Path, needed: int) -> None:
    """Refuse to start what the disk cannot hold."""
    free = shutil.disk_usage(output.resolve().parent).free
    if needed > free:
        raise OutputError(
            f"{output}: the bundle takes about {needed / 1e9:.2f} GB, but the disk has {free / 1e9:.2f} GB free; "
            "free some, choose another place, or a smaller --precision"
        )


def _with_precision(fields: Mapping[str, Any], rounding: Precisions) -> dict[str, Any]:
    """The manifest's fields with the precision of each decoder."""
    known = dict(fields)
    for role in ("target", "drafter"):
        given: dict[str, Any] = {"precision": rounding.of(role)}
        if role == "target":
            given["dtype"] = rounding.compute
        if isinstance(part := known.get(role), Mapping):
            known[role] = {**part, **given}
        elif part is not None:
            known[role] = part.model_copy(update=given)
    return known
