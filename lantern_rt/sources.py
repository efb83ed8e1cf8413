"""Source images of image-to-image models. The codes of a source image are part of the prompt, before the text."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .bundle.manifest import Manifest, Size
from .edits import convert_to_encoder_input, crop_to_cover
from .runtime.engine import Floats, Ints


@dataclass(eq=False)
class SourceImage:
    """Source image from which images are generated. Its tokens are part of the prompt, and none of them is preserved.

    Attributes:
        image: source image, scaled to `size`.
        pixels: source image, scaled to the input of the image encoder, uint8 `[height, width, 3]`.
        size: image size of the bundle that is nearest to the original image.
        first_code_index: index of the first code of the source in the conditional row of a prompt.
        codes: codes of the source, int64 `[cells]`; None before `encode`.
    """

    image: Image.Image
    pixels: NDArray[np.uint8]
    size: Size
    first_code_index: int
    codes: Ints | None = field(init=False, default=None)
    preserved_codes: ClassVar[Ints | None] = None  # an edit that preserves no cell

    def encode(self, encoder: Callable[[Floats], Ints]) -> None:
        """Compute `codes` once, with an image encoder as in `ImageEdit.encode`."""
        if self.codes is None:
            self.codes = encoder(convert_to_encoder_input(self.pixels))[0]

    def insert_source_codes(self, inputs: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        """Return the inputs of the condition graph with the codes of the source. Call `encode` first."""
        ids = inputs["token_ids"].copy()  # [1, prefix]; a copy, because the request keeps placeholders
        assert self.codes is not None
        ids[0, self.first_code_index : self.first_code_index + len(self.codes)] = self.codes
        return {**inputs, "token_ids": ids}

    def blend_with_original(self, image: Image.Image) -> Image.Image:
        return image

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.pixels.tobytes()).hexdigest()


def prepare_source_image(manifest: Manifest, size: Size, original: Image.Image) -> SourceImage:
    """Scale an image from `read_image` to cover a size of the bundle, and then to the input of the image encoder."""
    spec = manifest.source
    assert spec is not None
    pixels = (size.columns * spec.pixels_per_cell, size.rows * spec.pixels_per_cell)
    image = crop_to_cover(original, manifest.size_in_pixels(size))
    return SourceImage(image, np.array(image.resize(pixels, Image.Resampling.BICUBIC)), size, len(spec.before))
