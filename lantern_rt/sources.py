"""Source images of image to image models: their codes are in the prompt, before the text."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .bundle.manifest import Manifest, Size
from .edits import crop_to_cover, to_encoder_input
from .runtime.engine import Bools, Floats, Ints


@dataclass(eq=False)
class SourceImage:
    """A source image. Images are generated whole, so that nothing of it is preserved.

    Attributes:
        image: the image, scaled to a size of the bundle.
        pixels: the image, scaled to the input of the encoder, uint8 `[height, width, 3]`.
        size: the size of the bundle.
        first_code_index: number of ids before its codes in a prompt.
        codes: its codes, int64 `[cells]`; None before `encode`.
    """

    image: Image.Image
    pixels: NDArray[np.uint8]
    size: Size
    first_code_index: int
    codes: Ints | None = field(init=False, default=None)
    preserved_codes: ClassVar[Ints | None] = None
    regenerated_cells: ClassVar[Bools] = np.ones((1, 1), np.bool_)

    def encode(self, encoder: Callable[[Floats], Ints]) -> None:
        """Encode the image once.

        Args:
            encoder: image encoder, from float32 `[1, 3, height, width]` in -1 .. 1 to int64 `[1, cells]`.
        """
        if self.codes is None:
            self.codes = encoder(to_encoder_input(self.pixels))[0]

    def complete_inputs(self, inputs: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        """Return the inputs of the condition graph with the codes of the image, after `encode`."""
        ids = inputs["token_ids"].copy()
        assert self.codes is not None
        ids[0, self.first_code_index : self.first_code_index + len(self.codes)] = self.codes
        return {**inputs, "token_ids": ids}

    def blend_with_original(self, image: Image.Image) -> Image.Image:
        """Return the image: no pixel of the source is in it."""
        return image

    @property
    def digest(self) -> str:
        """SHA-256 hash of the pixels, in hexadecimal."""
        return hashlib.sha256(self.pixels.tobytes()).hexdigest()


def prepare_source_image(manifest: Manifest, size: Size, original: Image.Image) -> SourceImage:
    """Prepare a source image: scale it to cover a size, crop its centre, and scale it to the encoder's pixels.

    Args:
        manifest: manifest of a bundle with a `source`.
        size: size of the source.
        original: image from `read_image`.
    """
    spec = manifest.source
    assert spec is not None
    pixels = (size.columns * spec.pixels_per_cell, size.rows * spec.pixels_per_cell)
    image = crop_to_cover(original, manifest.size_in_pixels(size))
    return SourceImage(image, np.array(image.resize(pixels, Image.Resampling.BICUBIC)), size, len(spec.before))
