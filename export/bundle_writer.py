"""Writing a bundle: graphs, arrays and files into a folder beside the goal, checked, hashed, then renamed.

The goal appears whole or not at all, also after an error or Ctrl-C. Does not know families: graphs come as
torch modules with their names, and the manifest's fields come from the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..folders import check_new_folder, folder_or_nothing
from ..manifest import FORMAT_VERSION, FileEntry, Manifest
from .checkpoints import sha256
from .graphs import Graph, write_graph
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
    force: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Write a bundle folder and return its path.

    `graphs` are written as `<role>.onnx` and compared with their modules. `code_embeddings [codes, width]`
    are the target's input rows for codes. `files` maps further roles to a file name and its content
    (`tokenizer`: `("tokenizer.json", ...)`). `fields` are those of `Manifest` but for `format_version`,
    `files` and `neighbors`, which are filled in here. `halve`: store weights that float16 holds without loss
    in that format.
    """
    say = progress or (lambda _: None)
    check_output(output, force)
    with folder_or_nothing(output, force, _MANIFEST, "bundle") as folder:
        paths: dict[str, Path] = {}
        for graph in graphs:
            say(f"writing {graph.role}.onnx")
            written = write_graph(graph, folder, halve)
            paths |= dict(zip((graph.role, f"{graph.role}.data"), written, strict=False))
            say(f"comparing {graph.role}.onnx with the checkpoint")
            check_parity(graph, written[0], graph.tolerance)
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
            **fields,
            format_version=FORMAT_VERSION,
            neighbors=0 if neighbours is None else neighbours.indices.shape[1],
            files={role: _entry(path) for role, path in paths.items()},
        )
        (folder / _MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", "utf-8")
    return output


def check_output(output: Path, force: bool) -> None:
    """Refuse a goal that is there already, or that `force` would replace without being a bundle."""
    check_new_folder(output, force, _MANIFEST, "bundle")


def _entry(path: Path) -> FileEntry:
    return FileEntry(path=path.name, sha256=sha256(path), bytes=path.stat().st_size)
