"""Source images of image to image models: their codes are in the prompt, before the text."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .bundle.manifest import Manifest, Size
from .edits import cover, encoder_input
from .prompts import ImageRequest
from .runtime.engine import Bools, Floats, Ints


@dataclass(eq=False)
class Source:
    """A source image. Images are generated whole, so that nothing of it is preserved.

    Attributes:
        pixels: input of the encoder, uint8 `[height, width, 3]`.
        size: size of the bundle that the image was scaled to.
        start: number of ids before its codes in a prompt.
        codes: its codes, int64 `[cells]`; None before `encode`.
    """

    pixels: NDArray[np.uint8]
    size: Size
    start: int
    codes: Ints | None = field(init=False, default=None)
    preserved: ClassVar[Ints | None] = None
    regenerated: ClassVar[Bools] = np.ones((1, 1), np.bool_)

    def encode(self, encoder: Callable[[Floats], Ints]) -> None:
        """Encode the image once.

        Args:
            encoder: image encoder, from float32 `[1, 3, height, width]` in -1 .. 1 to int64 `[1, cells]`.
        """
        if self.codes is None:
            self.codes = encoder(encoder_input(self.pixels))[0]

    def complete(self, inputs: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        """Return the inputs of the condition graph with the codes of the image, after `encode`."""
        ids = inputs["token_ids"].copy()
        assert self.codes is not None
        ids[0, self.start : self.start + len(self.codes)] = self.codes
        return {**inputs, "token_ids": ids}

    def blend(self, image: Image.Image) -> Image.Image:
        """Return the image: no pixel of the source is in it."""
        return image

    @property
    def digest(self) -> str:
        """SHA-256 hash of the pixels, in hexadecimal."""
        return hashlib.sha256(self.pixels.tobytes()).hexdigest()


def prepare_source(manifest: Manifest, size: Size, original: Image.Image) -> Source:
    """Prepare a source image: scale it to cover a size, crop its centre, and scale it to the encoder's pixels.

    Args:
        manifest: manifest of a bundle with a `source`.
        size: size of the source.
        original: image from `read_image`.
    """
    spec = manifest.source
    assert spec is not None
    pixels = (size.columns * spec.pixels_per_cell, size.rows * spec.pixels_per_cell)
    smaller = cover(original, manifest.pixels(size)).resize(pixels, Image.Resampling.BICUBIC)
    return Source(np.array(smaller), size, len(spec.before))


def with_source(request: ImageRequest, manifest: Manifest, size: Size, source: Source) -> ImageRequest:
    """Insert a source image before the text of a prompt.

    The image to generate has the positions of its size. Every token before it has the position of the image's first
    code, moved back in time, row and column by the distance. The source has the positions of an image of its size,
    moved back as far.

    Args:
        request: request of the text.
        manifest: manifest of a bundle with a `source`.
        size: size of the images, `Size.with_source`.
        source: source image, whose codes are not known yet.
    """
    spec = manifest.source
    first = size.first_position
    assert spec is not None
    assert request.tokens is not None
    assert first is not None
    text, uncond = request.tokens
    alone = source.size.with_source()
    cells = np.arange(alone.codes)
    behind = len(spec.after) + len(text)
    distance = behind + max(alone.rows, alone.columns)  # from the source to the image
    back = manifest.target.max_positions
    # An image begins as far behind the prompts of its size as its first grid is long.
    steps = distance + max(source.size.first_grid or (0,)) - max(manifest.size(size.name).first_grid or (0,))
    places = (alone.first_position or 0) + back * steps + cells

    def before(count: int, distance: int) -> Ints:
        moved: Ints = first + back * np.arange(distance + count, distance, -1)
        return moved

    ids = np.concatenate([spec.before, np.zeros_like(cells), spec.after, text]).astype(np.int64)
    positions = np.concatenate([before(len(spec.before), distance), places, before(behind, 0)])
    return replace(
        request,
        inputs={**request.inputs, "token_ids": ids[None]},
        real=(np.ones(len(ids), np.bool_), request.real[1]),
        tokens=(ids, uncond),
        positions=(positions, before(len(uncond), 0)),
        edit=source,
    )
