"""Shards: files of training images with image tokens, prefixes and the target's hidden states.

A shard is one safetensors file. It is written completely or not at all, so an interrupted run continues with the shards
that do not exist yet. Its metadata identify the target and the prompts. The module uses NumPy, not PyTorch.
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

from ...bundle.manifest import Manifest, Size, explain_unsupported_method
from ...errors import CheckpointError, RequestError
from ...inputs import convert_read_errors, format_value, open_regular_file
from ...methods import SpeculativeJacobi
from ...output.files import write_output
from ...runtime.raster import RasterLayout, TwoGridLayout

FORMAT = "lantern-rt drafter data 3"
_HELD_OUT = 23  # every 23rd image is for validation; a prime, so that validation has images of all classes
_REMEDY = "make the data again"


@dataclass(frozen=True)
class ShardSource:
    """Target model and sizes of the images of a shard. The shards of a folder may have different image grids."""

    weights: str  # sha256 of the target's weights
    kind: str  # kind of prompts: `prompts`, `class_ids` or `embeddings`
    rows: int
    columns: int
    codes: int  # size of the codebook
    width: int  # size of hidden states
    prefix: int  # maximum number of positions before the first image token
    first_rows: int = 0  # number of rows of a smaller grid whose image tokens come first; 0 if there is no smaller grid
    first_columns: int = 0  # number of columns of the smaller grid; 0 if there is none

    @property
    def num_cells(self) -> int:
        return self.raster_layout.num_codes

    @property
    def raster_layout(self) -> RasterLayout:
        """Layout of the image tokens, without end-of-row tokens."""
        num_cells = self.first_rows * self.first_columns + self.rows * self.columns
        return TwoGridLayout(num_cells, self.columns, first_grid=(self.first_rows, self.first_columns))


def describe_shard_source(manifest: Manifest, size: Size | None = None) -> ShardSource:
    """Return the source of shards of a bundle and a size, or raise RequestError if it generates without drafts."""
    if problem := explain_unsupported_method(manifest, SpeculativeJacobi()):
        raise RequestError(f"bundle {manifest.name} {problem}", field="bundle", remedy="use another bundle")
    size = size or manifest.size()
    condition = manifest.condition
    weights = manifest.files.get("target.data", manifest.files["target"])
    return ShardSource(
        weights.sha256,
        {"class": "class_ids", "embeddings": "embeddings"}.get(condition.kind, "prompts"),
        size.rows,
        size.columns,
        manifest.codebook_size,
        manifest.target.hidden_size,
        condition.prefix,
        *(size.first_grid or (0, 0)),
    )


@dataclass(frozen=True)
class TrainingImages:
    """Images of one shard. In an axis of two rows, the conditional row comes first, the unconditional row second."""

    prompts: Sequence[Any]  # text prompts, class ids or indices of embeddings
    codes: NDArray[np.integer[Any]]  # image tokens, int32 `[images, cells]`
    prefix_lengths: NDArray[np.integer[Any]]  # lengths of the prefixes, int32 `[images, 2]`
    # Token ids that the drafter reads in the prefix after its first position, int32 `[images, 2, longest - 1]`, padded
    # on the right.
    tokens: NDArray[np.integer[Any]]
    # The target's hidden states at the prefix and all image tokens but the last, float16 `[images, 2, longest + cells -
    # 1, width]`, padded on the right. The state at an end-of-row token replaces the state at the image token before it.
    states: NDArray[np.float16]
    # Cells that follow an unaccepted draft token, int32 `[images, cells]`, padded with zeros.
    unaccepted_cells: NDArray[np.integer[Any]]
    unaccepted_codes: NDArray[np.integer[Any]]  # draft token before each of these cells, int32 `[images, cells]`
    # The target's hidden states after these draft tokens, float16 `[images, 2, cells, width]`.
    unaccepted_states: NDArray[np.float16]


# Names of the arrays in the file, with their fields of `TrainingImages`.
_ARRAYS = {
    "image_tokens": "codes",
    "prefix_lengths": "prefix_lengths",
    "prefix_tokens": "tokens",
    "hidden_states": "states",
}
_ARRAYS |= {f"late_{name}": f"unaccepted_{name}" for name in ("cells", "codes", "states")}


def get_shard_path(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:05d}.safetensors"


def write_shard(path: Path, source: ShardSource, images: TrainingImages) -> None:
    """Write a shard, completely or not at all. Raises: OutputError."""
    arrays = {name: np.ascontiguousarray(getattr(images, field)) for name, field in _ARRAYS.items()}
    metadata = {
        "format": FORMAT,
        "source": json.dumps(asdict(source)),
        "prompt": json.dumps(list(images.prompts)),
    }
    write_output(path, save(arrays, metadata), force=False)


class Shard:
    """File of training images, read image by image. The attribute `digest` is a hash of the images.

    All token ids of the prefixes must be below `vocab_size`.
    """

    def __init__(self, path: Path, vocab_size: int = 1 << 31) -> None:
        self.path = path
        with convert_read_errors(path, "drafter data in safetensors", CheckpointError, _REMEDY):
            with open_regular_file(path):
                untyped: Any = safe_open
                self._file = untyped(path, "np")
            metadata = self._file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"has the format {format_value(metadata.get('format'))}, not {FORMAT}")
            self.source = ShardSource(**json.loads(metadata["source"]))
            self.prompts: list[Any] = list(json.loads(metadata["prompt"]))
            self._check_shapes()
            self._arrays = self._memory_map_arrays()
            self.digest = self._check_and_hash_arrays(vocab_size)

    def read_images(self, image_slice: slice) -> TrainingImages:
        """Return the images in a slice of the shard. The arrays are memory-mapped and read when they are used."""
        return TrainingImages(
            self.prompts[image_slice], **{field: array[image_slice] for field, array in self._arrays.items()}
        )

    def _memory_map_arrays(self) -> dict[str, NDArray[Any]]:
        # A safetensors file has the length of its JSON header (8 bytes), the header, and then the arrays.
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        data = np.memmap(self.path, np.uint8, "r", 8 + length)
        arrays: dict[str, NDArray[Any]] = {}
        for name, field in _ARRAYS.items():
            start, stop = header[name]["data_offsets"]
            dtype = {"F16": "<f2", "I32": "<i4"}[header[name]["dtype"]]
            arrays[field] = data[start:stop].view(dtype).reshape(header[name]["shape"])
        return arrays

    def _check_shapes(self) -> None:
        count = len(self.prompts)
        num_cells = self.source.num_cells
        longest = self._file.get_slice("prefix_tokens").get_shape()[-1] + 1
        if longest > self.source.prefix:
            raise ValueError(f"has a prefix of length {longest}, longer than {self.source.prefix}")
        expected = {
            "image_tokens": ("I32", [count, num_cells]),
            "prefix_lengths": ("I32", [count, 2]),
            "prefix_tokens": ("I32", [count, 2, longest - 1]),
            "hidden_states": ("F16", [count, 2, longest + num_cells - 1, self.source.width]),
            "late_cells": ("I32", [count, num_cells]),
            "late_codes": ("I32", [count, num_cells]),
            "late_states": ("F16", [count, 2, num_cells, self.source.width]),
        }
        for name, (dtype, shape) in expected.items():
            array = self._file.get_slice(name)
            if (array.get_dtype(), array.get_shape()) != (dtype, shape):
                raise ValueError(f"{name} is {array.get_dtype()} {array.get_shape()}, not {dtype} {shape}")

    def _check_and_hash_arrays(self, vocab_size: int) -> str:
        digest = blake2b(json.dumps(self.prompts).encode(), digest_size=16)
        for index in range(len(self.prompts)):
            image = self.read_images(slice(index, index + 1))
            ranges = {
                "image_tokens": (image.codes, 0, self.source.codes - 1),
                "prefix_lengths": (image.prefix_lengths, 1, image.tokens.shape[-1] + 1),
                "prefix_tokens": (image.tokens, 0, vocab_size - 1),
                "late_cells": (image.unaccepted_cells, 0, self.source.num_cells - 1),
                "late_codes": (image.unaccepted_codes, 0, self.source.codes - 1),
            }
            for name, (numbers, low, high) in ranges.items():
                if numbers.size and not low <= numbers.min() <= numbers.max() <= high:
                    raise ValueError(f"{name} is outside {low} .. {high} in image {index}")
            for name, states in (("hidden_states", image.states), ("late_states", image.unaccepted_states)):
                # A float16 number is NaN or infinite if all five exponent bits are 1; the test on bits is faster.
                if (states.view(np.uint16) & 0x7C00 == 0x7C00).any():
                    raise ValueError(f"{name} has NaN or infinite numbers in image {index}")
            for name in _ARRAYS.values():
                digest.update(getattr(image, name).tobytes())
        return digest.hexdigest()


class ShardFolder:
    """Sequence of all images in the shards of a folder. The attribute `digest` is a hash of the images.

    `sources` are the sources that shards may have; they differ in their grids only.

    Raises:
        CheckpointError: there are fewer than two images, or a shard is damaged or has another source.
    """

    def __init__(self, folder: Path, sources: Sequence[ShardSource], vocab_size: int = 1 << 31) -> None:
        self.shards = [Shard(path, vocab_size) for path in sorted(folder.glob("shard-*.safetensors"))]
        by_grid = {(source.rows, source.columns): source for source in sources}
        self._sources = [by_grid.get((shard.source.rows, shard.source.columns), sources[0]) for shard in self.shards]
        for shard, source in zip(self.shards, self._sources, strict=True):
            for name, expected in asdict(source).items():
                value = getattr(shard.source, name)
                if value != expected:
                    field = f"{shard.path}: {name}"
                    raise CheckpointError(
                        field=field, found=format_value(value), expected=f"{expected}, as in the bundle"
                    )
        self.digest = blake2b("".join(shard.digest for shard in self.shards).encode(), digest_size=16).hexdigest()
        self._starts = list(accumulate((len(shard.prompts) for shard in self.shards), initial=0))
        if len(self) < 2:
            remedy = "run `lantern-rt train-drafter data`"
            raise CheckpointError(field=str(folder), found=f"{len(self)} images", expected="at least 2", remedy=remedy)

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def validation_indices(self) -> list[int]:
        """Indices of the images that are not trained on. They stay the same when shards are added."""
        return list(range(_HELD_OUT - 1, len(self), _HELD_OUT)) or [0]

    @property
    def training_indices(self) -> list[int]:
        held_out = set(self.validation_indices)
        return [i for i in range(len(self)) if i not in held_out]

    def read_image(self, index: int) -> tuple[TrainingImages, ShardSource]:
        """Read an image and the source of its shard, by the index of the image among all shards."""
        shard = int(np.searchsorted(self._starts, index, "right")) - 1
        start = index - self._starts[shard]
        return self.shards[shard].read_images(slice(start, start + 1)), self._sources[shard]
