"""A checkpoint's weights as one, from a file or a folder.

A folder holds one file of weights, or several with an index that says which weight is in which file (the layout of
Hugging Face), or several `.pt` or `.pth` files that share the weights between them. Nothing is ignored: a weight
that only the index or only a file has is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from torch import Tensor, nn

from ...checks import short
from ...errors import CheckpointError
from ..progress import count_read
from .files import SHOWN, Weights, listing, read_config, read_weights, refusing

SINGLE = ("model.safetensors", "pytorch_model.safetensors", "pytorch_model.bin")
INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_LOOSE = (".pt", ".pth")
_OTHERS = ("optimizer", "training_args", "scheduler", "rng_state")  # what training leaves beside the weights
_FLOATS = "floating-point numbers"
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass
class Checkpoint:
    """Weights by the names that readers give them; messages use those of the files, which `names` maps to.

    In `names`, `*` stands for the number of a layer. `prefix`: what files put before all names.
    """

    place: Path
    weights: Weights
    files: tuple[Path, ...] = ()
    index: Path | None = None
    names: dict[str, str] = field(default_factory=dict)
    prefix: str = ""

    def error(self, text: str) -> CheckpointError:
        """An error about this checkpoint."""
        return CheckpointError(f"{self.place}: {text}")

    def sources(self, role: str) -> list[tuple[str, Path]]:
        """The files with roles: `role`, and `role_index` for the index if there is one."""
        index = [] if self.index is None else [(f"{role}_index", self.index)]
        return [*index, *((role, file) for file in self.files)]

    def shown(self, name: str) -> str:
        """A weight's name in the files."""
        return self.prefix + _translate(name, self.names)

    def rename(self, names: Mapping[str, str]) -> None:
        """Give weights the names that are keys of `names`; its values are those of the files. Others stay."""
        back = {theirs: ours for ours, theirs in names.items()}
        self.weights = {_translate(name, back): weight for name, weight in self.weights.items()}
        self.names.update(names)

    def shape(self, name: str, dimensions: int = 2) -> tuple[int, ...]:
        """Shape of a weight that must be there, with so many dimensions. Raises: CheckpointError."""
        if name not in self.weights:
            raise self.error(f"missing weight {self.shown(name)}")
        shape = tuple(self.weights[name].shape)
        if len(shape) != dimensions or 0 in shape:
            raise self.error(f"weight {self.shown(name)} has shape {list(shape)}, expected {dimensions} sizes")
        if not self.weights[name].is_floating_point():
            raise self.error(f"weight {self.shown(name)} holds {_kind(self.weights[name])}, expected {_FLOATS}")
        return shape

    def count(self, prefix: str) -> int:
        """How many consecutive numbers 0, 1, ... follow `prefix` in the names."""
        found = {name[len(prefix) :].split(".")[0] for name in self.weights if name.startswith(prefix)}
        return next(i for i in range(len(found) + 1) if str(i) not in found)

    def take(self, prefix: str) -> Checkpoint:
        """Remove the weights with a prefix and return them without it."""
        names = [name for name in self.weights if name.startswith(prefix)]
        weights = {name.removeprefix(prefix): self.weights.pop(name) for name in names}
        return Checkpoint(self.place, weights, prefix=prefix)

    def load_strict(self, module: nn.Module) -> None:
        """Give a module the tensors themselves, in their type: every weight with its shape, and nothing else.

        Raises: CheckpointError that lists what is missing, unexpected or of another shape.
        """
        wanted, weights = module.state_dict(), self.weights
        problems = _differences(wanted.keys(), weights.keys(), self.shown)
        problems += [
            f"{self.shown(name)} has shape {list(weights[name].shape)}, expected {list(value.shape)}"
            for name, value in wanted.items()
            if name in weights and weights[name].shape != value.shape
        ][:SHOWN]
        problems += [
            f"{self.shown(name)} holds {_kind(weights[name])}, expected {_kind(value)}"
            for name, value in wanted.items()
            if name in weights and weights[name].is_floating_point() != value.is_floating_point()
        ][:SHOWN]
        if problems:
            raise self.error(f"the weights do not fit the model; {'; '.join(problems)}")
        module.requires_grad_(False).eval().load_state_dict(weights, assign=True)


@refusing
def read_checkpoint(
    place: Path, keep: Callable[[str], bool] = lambda name: True, optional: Collection[str] = ()
) -> Checkpoint:
    """All weights whose name `keep` accepts, from a file or all files of a folder.

    Where a folder has the same weights in two formats, safetensors come first. optional: weights that an index may
    name though no file holds them, since they are another weight's second name and were dropped when the files were
    converted. Raises: CheckpointError.
    """
    if not place.is_dir():
        read = read_weights(place, _count(place, [place]))
        return Checkpoint(place, {name: weight for name, weight in read.items() if keep(name)}, (place,))
    files = choose_files({path.name for path in place.iterdir() if path.is_file()})
    if not files:
        raise CheckpointError(
            f"{place}: found no weights, expected one of {', '.join(SINGLE)}, one of {', '.join(INDEX)} with its "
            "files, or .pt files"
        )
    index = place / files[0] if files[0] in INDEX else None
    shards = read_index(index) if index else {}
    if absent := [name for name in shards if not (place / name).is_file()]:
        raise CheckpointError(
            f"{place}: {files[0]} tells of {len(shards)} files, missing: {listing(absent)}; "
            "download them into that folder"
        )
    weights: Weights = {}
    files = sorted(shards) or files
    counted = _count(place, [place / name for name in files])
    for name in files:
        part = {key: weight for key, weight in read_weights(place / name, counted).items() if keep(key)}
        if index:
            named = {key for key in shards[name] if keep(key)}
            if problems := _differences(named - (set(optional) - part.keys()), part.keys()):
                raise CheckpointError(
                    f"{place / name}: does not hold what the index says; {'; '.join(problems)}; "
                    "download the folder again"
                )
        if twice := sorted(part.keys() & weights):
            raise CheckpointError(
                f"{place}: weight {twice[0]} is in {name} and in a file before it, expected it once; "
                "leave the files of one checkpoint in the folder"
            )
        weights |= part
    return Checkpoint(place, weights, tuple(place / name for name in files), index)


def _count(place: Path, files: Sequence[Path]) -> Callable[[int], None]:
    """Counts what is read of the files of a place."""
    return count_read(f"reading {place.name}", sum(file.stat().st_size for file in files if file.is_file()))


def choose_files(names: Collection[str]) -> list[str]:
    """Of the files in a folder, the one to read weights from: a single file, an index, or all `.pt` files."""
    for name in (SINGLE[0], INDEX[0], *SINGLE[1:], INDEX[1]):
        if name in names:
            return [name]
    return sorted(name for name in names if name.endswith(_LOOSE) and not name.startswith(_OTHERS))


def read_index(path: Path) -> dict[str, list[str]]:
    """The weights in each file, from an index; file names must be plain. Raises: CheckpointError."""
    config = read_config(path)
    weight_map = config.get("weight_map")
    shards: dict[str, list[str]] = {}
    if not isinstance(weight_map, dict) or not weight_map:
        raise config.error("has no weight_map, expected one that names a file for every weight")
    for weight, name in weight_map.items():
        if not isinstance(name, str) or name in ("", ".", "..") or "\\" in name or PurePosixPath(name).name != name:
            raise config.error(f"weight {short(weight)} is in {short(name)}, expected the name of a file beside it")
        shards.setdefault(name, []).append(weight)
    return shards


def _kind(weight: Tensor) -> str:
    return _FLOATS if weight.is_floating_point() else f"{str(weight.dtype).removeprefix('torch.')} numbers"


def _differences(wanted: Set[str], found: Set[str], shown: Callable[[str], str] = str) -> list[str]:
    names = {"missing": wanted - found, "unexpected": found - wanted}
    return [f"{word}: {listing([shown(name) for name in some])}" for word, some in names.items() if some]


def _translate(name: str, names: Mapping[str, str]) -> str:
    """The name that a table has for another; the first number in it may be a `*` in the table."""
    number = _LAYER.search(name)
    if name in names or number is None:
        return names.get(name, name)
    starred = f"{name[: number.start()]}*{name[number.end() :]}"
    return names[starred].replace("*", number[0]) if starred in names else name
