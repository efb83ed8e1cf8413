"""Which files of a checkpoint's folder hold its weights, and reading them as one.

A folder holds one file of weights, or several with an index that says which weight is in which file (the
layout of Hugging Face), or several `.pt` or `.pth` files that share the weights between them. A weight that
the index names and no file holds, or that a file holds and the index does not name, is an error: nothing is
ignored.

Does not know model families, nor how a file is read (`checkpoints.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ...errors import CheckpointError
from .files import Weights, read_config, read_weights

SINGLE = ("model.safetensors", "pytorch_model.safetensors", "pytorch_model.bin")
INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_LOOSE = (".pt", ".pth")
_OTHERS = ("optimizer", "training_args", "scheduler", "rng_state")  # what training leaves beside the weights
_SHOWN = 6  # names listed in a message before the rest is counted


@dataclass(frozen=True)
class WeightFiles:
    """The files that hold a checkpoint's weights. `named`: with an index, the weights it expects in each file."""

    place: Path
    files: tuple[Path, ...]
    index: Path | None = None
    named: tuple[frozenset[str], ...] = ()

    @property
    def all_files(self) -> tuple[Path, ...]:
        """The files of weights, and the index if there is one."""
        return self.files if self.index is None else (self.index, *self.files)


def find_weights(place: Path) -> WeightFiles:
    """The weight files at `place`, a folder or a single file.

    Where a folder has the same weights in two formats, safetensors come first. Raises CheckpointError if there
    are none, or if the index names a file that is not there.
    """
    if not place.is_dir():
        return WeightFiles(place, (place,))
    names = {path.name for path in place.iterdir() if path.is_file()}
    chosen = choose_files(names)
    if not chosen:
        raise CheckpointError(
            f"{place}: found no weights, expected one of {', '.join(SINGLE)}, one of {', '.join(INDEX)} with its "
            "files, or .pt files"
        )
    if chosen[0] not in INDEX:
        return WeightFiles(place, tuple(place / name for name in chosen))
    index = place / chosen[0]
    shards = read_index(index)
    if missing := sorted(shards.keys() - names):
        raise CheckpointError(
            f"{place}: {index.name} tells of {len(shards)} files, missing: {listing(missing)}; "
            "download them into that folder"
        )
    ordered = sorted(shards)
    return WeightFiles(
        place, tuple(place / name for name in ordered), index, tuple(frozenset(shards[name]) for name in ordered)
    )


def choose_files(names: Collection[str]) -> list[str]:
    """Of the files in a folder, the one to read weights from: a single file, an index, or all `.pt` files."""
    for name in (SINGLE[0], INDEX[0], *SINGLE[1:], INDEX[1]):
        if name in names:
            return [name]
    loose = [name for name in names if name.endswith(_LOOSE) and not name.startswith(_OTHERS)]
    return sorted(loose)


def read_index(path: Path) -> dict[str, list[str]]:
    """The weights in each file, from an index; file names must be plain."""
    weight_map = read_config(path).get("weight_map")
    shards: dict[str, list[str]] = {}
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: has no weight_map, expected one that names a file for every weight")
    for weight, name in weight_map.items():
        if not isinstance(name, str) or name in ("", ".", "..") or "\\" in name or PurePosixPath(name).name != name:
            raise CheckpointError(f"{path}: weight {weight} is in {name!r}, expected the name of a file beside it")
        shards.setdefault(name, []).append(weight)
    return shards


def read_weight_files(
    found: WeightFiles, keep: Callable[[str], bool] = lambda name: True, optional: Collection[str] = ()
) -> Weights:
    """All weights whose name `keep` accepts, from all files; each must be in exactly the file it belongs to.

    `optional`: weights that an index may name though no file holds them, since they are another weight's second
    name and were dropped when the files were converted.
    """
    weights: Weights = {}
    for i, path in enumerate(found.files):
        part = {name: weight for name, weight in read_weights(path).items() if keep(name)}
        if found.named:
            _compare(path, part.keys(), {name for name in found.named[i] if keep(name)}, optional)
        for name in part:
            if name in weights:
                raise CheckpointError(
                    f"{found.place}: weight {name} is in {path.name} and in a file before it, expected it once; "
                    "leave the files of one checkpoint in the folder"
                )
            weights[name] = part[name]
    return weights


def _compare(path: Path, held: Collection[str], named: set[str], optional: Collection[str]) -> None:
    missing, unexpected = named - set(held) - set(optional), set(held) - named
    problems = [
        f"{word}: {listing(names)}" for word, names in (("missing", missing), ("unexpected", unexpected)) if names
    ]
    if problems:
        raise CheckpointError(
            f"{path}: does not hold what the index says; {'; '.join(problems)}; download the folder again"
        )


def listing(names: Collection[str]) -> str:
    """Names in order, the first six of them in full."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return ", ".join(ordered[:_SHOWN]) + more
