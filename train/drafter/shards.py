"""Pictures to train a drafter on: files of codes, of what the drafter reads before them, and of hidden states.

A shard is one safetensors file that appears whole or not at all, so that a folder is continued by writing the shards it
lacks. Its metadata say what target and prompts it is of. Knows NumPy only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save

from ...bundle.manifest import Manifest
from ...errors import CheckpointError
from ...inputs import format_value, open_plain_file, reading
from ...output.files import write_output

FORMAT = "lantern-rt drafter data 3"
FAMILIES = ("llamagen", "scenes", "anole")  # whose drafters can be trained
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
        prefix: most rows before the first code.
    """

    weights: str
    kind: str
    rows: int
    columns: int
    codes: int
    width: int
    prefix: int

    @property
    def cells(self) -> int:
        """Codes of a picture."""
        return self.rows * self.columns


def read_source(manifest: Manifest) -> Source:
    """What shards of a bundle's pictures are of.

    Raises:
        CheckpointError: drafters of its family cannot be trained.
    """
    if manifest.family not in FAMILIES:
        field = f"family of bundle {manifest.name}"
        raise CheckpointError(field=field, found=manifest.family, expected=", ".join(FAMILIES))
    condition = manifest.condition
    weights = manifest.files.get("target.data", manifest.files["target"])
    return Source(
        weights.sha256,
        {"class": "class_ids", "embeddings": "embeddings"}.get(condition.kind, "prompts"),
        manifest.grid_rows,
        manifest.grid_columns,
        manifest.codebook_size,
        manifest.target.hidden_size,
        condition.prefix,
    )


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
        late_cells: where a pass over a window drew on after a draft that was not to stay, int32 `[pictures, cells]`,
            filled up with zeros.
        late_codes: that draft, which stood before it, int32 `[pictures, cells]`.
        late_states: the target's hidden states there, float16 `[pictures, 2, cells, width]`.
    """

    subjects: Sequence[Any]
    codes: NDArray[np.integer[Any]]
    lengths: NDArray[np.integer[Any]]
    tokens: NDArray[np.integer[Any]]
    states: NDArray[np.float16]
    late_cells: NDArray[np.integer[Any]]
    late_codes: NDArray[np.integer[Any]]
    late_states: NDArray[np.float16]


_LATE = ("late_cells", "late_codes", "late_states")
_ARRAYS = {"image_tokens": "codes", "prefix_lengths": "lengths", "prefix_tokens": "tokens", "hidden_states": "states"}
_ARRAYS |= dict(zip(_LATE, _LATE, strict=True))


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
    """One file, read picture by picture. `digest` identifies what it holds.

    Args:
        path: the file.
        vocabulary: tokens that a prefix may have.

    Raises:
        CheckpointError: it is no shard, contradicts itself, or holds numbers that are none.
    """

    def __init__(self, path: Path, vocabulary: int = 1 << 31) -> None:
        self.path = path
        with reading(path, "drafter data in safetensors", CheckpointError, _REMEDY):
            with open_plain_file(path):
                untyped: Any = safe_open
                self._file = untyped(path, "np")
            metadata = self._file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"format {format_value(metadata.get('format'))}, not {FORMAT}")
            self.source = Source(**json.loads(metadata["source"]))
            self.subjects: list[Any] = list(json.loads(metadata["prompt"]))
            self._check_shapes()
            self.digest = self._check_numbers(vocabulary)

    def read(self, index: slice) -> Pictures:
        """Read some pictures."""
        with reading(self.path, "drafter data in safetensors", CheckpointError, _REMEDY):
            arrays = {field: self._file.get_slice(name)[index] for name, field in _ARRAYS.items()}
        return Pictures(self.subjects[index], **arrays)

    def _check_shapes(self) -> None:
        count, cells = len(self.subjects), self.source.cells
        longest = self._file.get_slice("prefix_tokens").get_shape()[-1] + 1
        if longest > self.source.prefix:
            raise ValueError(f"a prefix of {longest}, not {self.source.prefix} at most")
        expected = {
            "image_tokens": ("I32", [count, cells]),
            "prefix_lengths": ("I32", [count, 2]),
            "prefix_tokens": ("I32", [count, 2, longest - 1]),
            "hidden_states": ("F16", [count, 2, longest + cells - 1, self.source.width]),
            "late_cells": ("I32", [count, cells]),
            "late_codes": ("I32", [count, cells]),
            "late_states": ("F16", [count, 2, cells, self.source.width]),
        }
        for name, (dtype, shape) in expected.items():
            array = self._file.get_slice(name)
            if (array.get_dtype(), array.get_shape()) != (dtype, shape):
                raise ValueError(f"{name} {array.get_dtype()} {array.get_shape()}, not {dtype} {shape}")

    def _check_numbers(self, vocabulary: int) -> str:
        digest = blake2b(json.dumps(self.subjects).encode(), digest_size=16)
        for index in range(len(self.subjects)):
            picture = self.read(slice(index, index + 1))
            ranges = {
                "image_tokens": (picture.codes, 0, self.source.codes - 1),
                "prefix_lengths": (picture.lengths, 1, picture.tokens.shape[-1] + 1),
                "prefix_tokens": (picture.tokens, 0, vocabulary - 1),
                "late_cells": (picture.late_cells, 0, self.source.cells - 1),
                "late_codes": (picture.late_codes, 0, self.source.codes - 1),
            }
            for name, (numbers, low, high) in ranges.items():
                if numbers.size and not low <= numbers.min() <= numbers.max() <= high:
                    raise ValueError(f"{name} outside {low} .. {high} in picture {index}")
            for name, states in (("hidden_states", picture.states), ("late_states", picture.late_states)):
                if (states.view(np.uint16) & 0x7C00 == 0x7C00).any():
                    raise ValueError(f"{name} that are NaN or infinite in picture {index}")
            for name in _ARRAYS.values():
                digest.update(getattr(picture, name).tobytes())
        return digest.hexdigest()


class ShardFolder:
    """The shards of a folder, as one numbered sequence of pictures. `digest` identifies what they hold.

    Args:
        folder: where they lie.
        source: what they must be of.
        vocabulary: tokens that a prefix may have.

    Raises:
        CheckpointError: there are too few pictures, damaged ones, or some of another source.
    """

    def __init__(self, folder: Path, source: Source, vocabulary: int) -> None:
        self.source = source
        self.shards = [Shard(path, vocabulary) for path in sorted(folder.glob("shard-*.safetensors"))]
        for shard in self.shards:
            for name, expected in asdict(source).items():
                value = getattr(shard.source, name)
                if value != expected:
                    field = f"{shard.path}: {name}"
                    raise CheckpointError(
                        field=field, found=format_value(value), expected=f"{expected}, as of the bundle"
                    )
        self.digest = blake2b("".join(shard.digest for shard in self.shards).encode(), digest_size=16).hexdigest()
        self._starts = list(accumulate((len(shard.subjects) for shard in self.shards), initial=0))
        if len(self) < 2:
            remedy = "run `lantern-rt train-drafter data`"
            raise CheckpointError(field=str(folder), found=f"{len(self)} pictures", expected="shards", remedy=remedy)

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
