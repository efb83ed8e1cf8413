"""Source images of image-to-image models. The codes of a source image are part of the prompt, before the text."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..bundle.manifest import Manifest, Size, SourceImageSpec
from ..runtime.engine import Floats, Ints
from .base import Part, Prefix
from .image_files import convert_to_encoder_input, crop_to_cover


@dataclass(eq=False)
class SourceImage(Part):
    """Source image from which images are generated. Its codes are part of the prompt, and none of them is preserved."""

    image: Image.Image  # scaled to `size`
    pixels: NDArray[np.uint8]  # scaled to the input of the image encoder, [height, width, 3]
    size: Size  # of the bundle that is nearest to the original image
    spec: SourceImageSpec
    max_positions: int  # number of rows of the bundle's rotary table
    codes: Ints | None = field(init=False, default=None)  # [cells]; see `encode`

    def encode(self, encoder: Callable[[Floats], Ints]) -> None:
        if self.codes is None:
            self.codes = encoder(convert_to_encoder_input(self.pixels))[0]

    def change_prefix(self, prefix: Prefix) -> Prefix:
        """Insert the codes of the source before the text.

        A token at distance d before the first code of the new image has the position of this first code, moved back by
        d. The codes of the source have the positions of a new image with the source's size, all moved back by one
        distance. This distance is the longer side of the source, in cells, plus the number of ids between the source
        and the image.
        """
        cond, uncond = prefix
        assert cond.tokens is not None
        assert cond.first_position is not None
        assert uncond.tokens is not None
        source_size = self.size.with_source_image()
        num_following = len(self.spec.after) + len(cond.tokens)  # number of ids between the source and the new image
        distance = num_following + max(source_size.rows, source_size.columns)
        cells = np.arange(source_size.codes)
        codes = np.zeros_like(cells) if self.codes is None else self.codes
        source_positions = (source_size.first_position or 0) + cells

        def positions_before_image(count: int, distance: int) -> Ints:
            """Return the positions of `count` tokens, with `distance` ids between the last one and the first code."""
            return self._move_back(cond.first_position, np.arange(distance + count, distance, -1))

        tokens = np.concatenate([self.spec.before, codes, self.spec.after, cond.tokens]).astype(np.int64)
        positions = [
            positions_before_image(len(self.spec.before), distance),
            self._move_back(source_positions, distance),
            positions_before_image(num_following, 0),
        ]
        changed = replace(
            cond,
            inputs={**cond.inputs, "token_ids": tokens[None]},
            is_real_token=np.ones(len(tokens), np.bool_),
            tokens=tokens,
            positions=np.concatenate(positions),
        )
        return Prefix(changed, replace(uncond, positions=positions_before_image(len(uncond.tokens), 0)))

    def _move_back(self, positions: Any, distances: Any) -> Ints:
        """Return positions of a rotary with a time, a row and a column, from each of which a distance is subtracted.

        Position p + s * `max_positions` is position p, moved back by s.
        """
        moved: Ints = positions + self.max_positions * distances
        return moved

    @property
    def record(self) -> Mapping[str, str]:
        """SHA-256 hash of the pixels, in hexadecimal."""
        return {"edit": hashlib.sha256(self.pixels.tobytes()).hexdigest()}


def prepare_source_image(manifest: Manifest, size: Size, original: Image.Image) -> SourceImage:
    """Scale an image from `read_image` to cover a size of the bundle, and then to the input of the image encoder."""
    spec = manifest.source
    assert spec is not None
    pixels = (size.columns * spec.pixels_per_cell, size.rows * spec.pixels_per_cell)
    image = crop_to_cover(original, manifest.size_in_pixels(size))
    scaled = np.array(image.resize(pixels, Image.Resampling.BICUBIC))
    return SourceImage(image, scaled, size, spec, manifest.target.max_positions)
