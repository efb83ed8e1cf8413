"""Pictures to train a drafter on: files of codes, of what the drafter reads before them, and of hidden states.

A shard is one safetensors file that appears whole or not at all, so that a folder is continued by writing the shards it
lacks. Its metadata say what target and prompts it is of. Knows NumPy only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save

from ...bundle.manifest import Manifest
from ...errors import CheckpointError
from ...inputs import reading, short
from ...output.files import write_output

FORMAT = "lantern-rt drafter data 1"
_HELD_OUT = 23  # every so many pictures, one is for validation; a prime, so that no class is always that one
_REMEDY = "make the data again"


@dataclass(frozen=True)
class Source:
    """What the shards of a folder share.

    Args:
        weights: sha256 of the target's weights.
        kind: what pictures are drawn of: `prompts`, `class_ids` or `embeddings`.
        rows: of the grid of codes.
        columns: of that grid.
        codes: size of the codebook.
        width: of hidden states.
    """

    weights: str
    kind: str
    rows: int
    columns: int
    codes: int
    width: int

    @property
    def cells(self) -> int:
        """Codes of a picture."""
        return self.rows * self.columns


@dataclass(frozen=True)
class Pictures:
    """Some pictures of one shard. The conditional row comes first, the unconditional one second.

    Args:
        subjects: prompts or class ids, or numbers of embeddings.
        codes: int32 `[pictures, cells]`.
        lengths: of the prefixes, int32 `[pictures, 2]`.
        tokens: what the drafter reads in the prefix after its first position, int32 `[pictures, 2, longest - 1]`,
            padded on the right.
        states: the target's hidden states of prefix and codes but the last, float16
            `[pictures, 2, longest + cells - 1, width]`, padded alike.
    """

    subjects: Sequence[Any]
    codes: NDArray[np.integer[Any]]
    lengths: NDArray[np.integer[Any]]
    tokens: NDArray[np.integer[Any]]
    states: NDArray[np.float16]


_ARRAYS = {"image_tokens": "codes", "prefix_lengths": "lengths", "prefix_tokens": "tokens", "hidden_states": "states"}


def target_hash(manifest: Manifest) -> str:
    """The sha256 of the file that holds the target's weights."""
    return manifest.files["target.data" if "target.data" in manifest.files else "target"].sha256


def shard_path(folder: Path, index: int) -> Path:
    """The file of a shard."""
    return folder / f"shard-{index:05d}.safetensors"


def write_shard(path: Path, source: Source, pictures: Pictures) -> None:
    """Write a shard, whole or not at all.

    Raises:
        OutputError: it cannot be written, or is there already.
    """
    arrays = {name: np.ascontiguousarray(getattr(pictures, field)) for name, field in _ARRAYS.items()}
    metadata = {
        "format": FORMAT,
        "source": json.dumps(asdict(source)),
        "prompt": json.dumps(list(pictures.subjects)),
    }
    write_output(path, save(arrays, metadata), force=False)


class Shard:
    """One file, read picture by picture.

    Raises:
        CheckpointError: it is no shard, or contradicts itself.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path, "drafter data in safetensors", CheckpointError, _REMEDY):
            untyped: Any = safe_open
            self._file = untyped(path, "np")
            metadata = self._file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"format {short(metadata.get('format'))}, not {FORMAT}")
            self.source = Source(**json.loads(metadata["source"]))
            self.subjects: list[Any] = json.loads(metadata["prompt"])
            self._check()

    def read(self, index: slice) -> Pictures:
        """Read some pictures."""
        with reading(self.path, "drafter data in safetensors", CheckpointError, _REMEDY):
            arrays = {field: self._file.get_slice(name)[index] for name, field in _ARRAYS.items()}
        return Pictures(self.subjects[index], **arrays)

    def _check(self) -> None:
        """Compare all shapes, and all numbers but hidden states with their ranges."""
        count, cells = len(self.subjects), self.source.cells
        longest = self._shape("prefix_tokens")[-1] + 1
        expected = {
            "image_tokens": (count, cells),
            "prefix_lengths": (count, 2),
            "prefix_tokens": (count, 2, longest - 1),
            "hidden_states": (count, 2, longest + cells - 1, self.source.width),
        }
        for name, shape in expected.items():
            if self._shape(name) != shape:
                raise ValueError(f"{name} {list(self._shape(name))}, not {list(shape)}")
        ranges = {
            "image_tokens": (0, self.source.codes - 1),
            "prefix_lengths": (1, longest),
            "prefix_tokens": (0, 2**31 - 1),
        }
        for name, (low, high) in ranges.items():
            numbers = self._file.get_slice(name)[:]
            if numbers.size and not low <= numbers.min() <= numbers.max() <= high:
                raise ValueError(f"{name} outside {low} .. {high}")

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())


class ShardFolder:
    """The shards of a folder, as one numbered sequence of pictures.

    Raises:
        CheckpointError: there are none, or they are of another target.
    """

    def __init__(self, folder: Path, weights: str) -> None:
        paths = sorted(folder.glob("shard-*.safetensors"))
        if not paths:
            raise CheckpointError(field=str(folder), found="no shards", remedy="run `lantern-rt train-drafter data`")
        self.shards = [Shard(path) for path in paths]
        self._starts = list(accumulate((len(shard.subjects) for shard in self.shards), initial=0))
        self.source = self.shards[0].source
        for shard in self.shards:
            if shard.source != self.source:
                raise CheckpointError(f"is of another kind than {paths[0].name}", field=str(shard.path), remedy=_REMEDY)
        if self.source.weights != weights:
            raise CheckpointError(
                field=str(folder),
                found=f"pictures drawn with the weights {self.source.weights[:12]}...",
                expected=f"those of the bundle's target, {weights[:12]}...",
            )

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def validation(self) -> list[int]:
        """Numbers of pictures that no drafter is trained on, the same ones when more are drawn."""
        return list(range(_HELD_OUT - 1, len(self), _HELD_OUT)) or [0]

    @property
    def training(self) -> list[int]:
        """Numbers of the pictures that drafters are trained on."""
        held_out = set(self.validation)
        return [i for i in range(len(self)) if i not in held_out]

    def picture(self, number: int) -> Pictures:
        """Read one picture."""
        shard = int(np.searchsorted(self._starts, number, "right")) - 1
        index = number - self._starts[shard]
        return self.shards[shard].read(slice(index, index + 1))
