"""Pictures to train a drafter on: files of codes, of what the drafter reads before them, and maybe of hidden states.

A shard is one safetensors file that appears whole or not at all, so that a folder is gone on with by writing the shards
it lacks. Its metadata say what target and prompts it is of. Knows NumPy only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save

from ...checks import short
from ...errors import CheckpointError
from ...output.files import write_output
from ...user_files import reading

FORMAT = "lantern-rt drafter data 1"
_HELD_OUT = 23  # every so many pictures, one is for validation; a prime, so that no class is always that one
_CURE = "make the data again"


@dataclass(frozen=True)
class Source:
    """What the shards of a folder share.

    weights: sha256 of the target's. kind: what pictures are of: `prompts`, `class_ids` or `embeddings`. cells: codes of
    a picture. codes: how many there are. width: of hidden states.
    """

    weights: str
    kind: str
    rows: int
    columns: int
    codes: int
    width: int
    states: bool

    @property
    def cells(self) -> int:
        """Codes of a picture."""
        return self.rows * self.columns


@dataclass(frozen=True)
class Pictures:
    """Some pictures of one shard.

    subjects: prompts or class ids, or numbers of embeddings. codes: int32 `[pictures, cells]`. lengths: of the prefixes
    of both rows, int32 `[pictures, 2]`, conditional first. tokens: what the drafter reads in the prefix after its first
    position, int32 `[pictures, 2, longest - 1]`, padded on the right. states: the target's, float16 `[pictures, 2,
    longest + cells - 1, width]` of prefix and codes but the last, padded alike. embeddings and masks: where these are
    the subjects, float32 `[pictures, tokens, dim]` and bool `[pictures, tokens]`.
    """

    subjects: Sequence[Any]
    codes: NDArray[np.integer[Any]]
    lengths: NDArray[np.integer[Any]]
    tokens: NDArray[np.integer[Any]]
    states: NDArray[np.float16] | None = None
    embeddings: NDArray[np.float32] | None = None
    masks: NDArray[np.bool_] | None = None


_ARRAYS = {"image_tokens": "codes", "prefix_lengths": "lengths", "prefix_tokens": "tokens", "hidden_states": "states"}
_ARRAYS |= {"prompt_embeds": "embeddings", "prompt_mask": "masks"}


def shard_path(folder: Path, index: int) -> Path:
    """The file of a shard."""
    return folder / f"shard-{index:05d}.safetensors"


def write_shard(path: Path, source: Source, pictures: Pictures) -> None:
    """Write a shard, whole or not at all. Raises: OutputError."""
    arrays = {name: getattr(pictures, own) for name, own in _ARRAYS.items()}
    content = {name: np.ascontiguousarray(array) for name, array in arrays.items() if array is not None}
    described = {"prompt": json.dumps(list(pictures.subjects)), "grid": f"{source.rows}x{source.columns}"}
    data = save(content, {"format": FORMAT, "source": json.dumps(asdict(source)), **described})
    write_output(path, data, force=False)


class Shard:
    """One file, read picture by picture. Raises: CheckpointError: it is no shard, or contradicts itself."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path, "drafter data in safetensors", CheckpointError, _CURE):
            self._file = _open(path)
            metadata = self._file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"format {short(metadata.get('format'))}, not {FORMAT}")
            self.source = Source(**json.loads(metadata["source"]))
            self.subjects: list[Any] = json.loads(metadata["prompt"])
            self._names = set(self._file.keys())
            count, cells = len(self.subjects), self.source.cells
            if (found := self._shape("image_tokens")) != (count, cells):
                raise ValueError(f"image_tokens {list(found)}, not {[count, cells]}")
            longest = self._shape("prefix_tokens")[2] + 1
            if self._shape("prefix_lengths") != (count, 2) or self._shape("prefix_tokens")[:2] != (count, 2):
                raise ValueError("prefixes of other pictures")
            wanted = (count, 2, longest + cells - 1, self.source.width)
            if self.source.states and (found := self._shape("hidden_states")) != wanted:
                raise ValueError(f"hidden_states {list(found)}, not {list(wanted)}")
            whole = self.read(slice(None), states=False)
            for name, array, low, high in (
                ("image_tokens", whole.codes, 0, self.source.codes - 1),
                ("prefix_lengths", whole.lengths, 1, longest),
                ("prefix_tokens", whole.tokens, 0, 2**31 - 1),
            ):
                if array.size and not low <= array.min() <= array.max() <= high:
                    raise ValueError(f"{name} outside {low} .. {high}")

    def read(self, chosen: slice, states: bool = True) -> Pictures:
        """Some pictures; without their hidden states if these are not asked for."""
        with reading(self.path, "drafter data in safetensors", CheckpointError, _CURE):
            names = {name: own for name, own in _ARRAYS.items() if name in self._names}
            if not states:
                names.pop("hidden_states", None)
            arrays = {own: self._file.get_slice(name)[chosen] for name, own in names.items()}
        return Pictures(self.subjects[chosen], **arrays)

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())


def _open(path: Path) -> Any:
    return safe_open(path, "np")  # its methods have no types


class Data:
    """The shards of a folder, for a target; `training` and `validation` are numbers of pictures.

    Raises: CheckpointError: there are none, or they are of another target.
    """

    def __init__(self, folder: Path, weights: str) -> None:
        paths = sorted(folder.glob("shard-*.safetensors"))
        if not paths:
            raise CheckpointError(f"{folder}: found no shards; make some with `lantern-rt train-drafter data`")
        self.folder, self.shards = folder, [Shard(path) for path in paths]
        self.source = self.shards[0].source
        for shard in self.shards:
            if shard.source != self.source:
                raise CheckpointError(f"{shard.path}: is of another kind than {paths[0].name}; {_CURE}")
        if self.source.weights != weights:
            raise CheckpointError(
                f"{folder}: was drawn with the weights {self.source.weights[:12]}..., but the bundle's target has "
                f"{weights[:12]}...; give the bundle that it was made with, or {_CURE}"
            )
        if len(self) < 2:
            raise CheckpointError(f"{folder}: found {len(self)} pictures, expected two at least; make more data")

    def __len__(self) -> int:
        return self._starts[-1]

    @cached_property
    def _starts(self) -> list[int]:
        """Pictures before each shard, and all."""
        return list(accumulate((len(shard.subjects) for shard in self.shards), initial=0))

    @property
    def validation(self) -> list[int]:
        """Pictures that no drafter is trained on, the same ones when more are drawn."""
        return list(range(_HELD_OUT - 1, len(self), _HELD_OUT)) or [0]

    @property
    def training(self) -> list[int]:
        """All others."""
        held_out = set(self.validation)
        return [i for i in range(len(self)) if i not in held_out]

    def picture(self, index: int) -> Pictures:
        """One picture."""
        shard = int(np.searchsorted(self._starts, index, "right")) - 1
        own = index - self._starts[shard]
        return self.shards[shard].read(slice(own, own + 1))
