"""Image editing: selection of the cells to generate again, and blending of old and new pixels."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from ..bundle.manifest import Manifest, Size
from ..errors import RequestError
from ..inputs import check_int
from ..options import ImageSource
from ..runtime.engine import Bools, Floats, Ints
from .base import Part
from .image_files import convert_to_encoder_input, crop_to_cover, read_image


@dataclass(eq=False)
class ImageEdit(Part):
    """Image to edit, with the choice of the cells to generate again. The tokens of all other cells are preserved."""

    pixels: NDArray[np.uint8]  # original image in sRGB, [height, width, 3]
    regenerated_cells: Bools  # cells to generate again, [rows, columns]
    preserved_codes: Ints | None = field(init=False, default=None)  # -1 in regenerated cells, [cells]; see `encode`

    def encode(self, encoder: Callable[[Floats], Ints]) -> None:
        if self.preserved_codes is None:
            self.preserved_codes = encoder(convert_to_encoder_input(self.pixels))[0].copy()
            # Codes of a first grid, such as a prologue, come before those of the cells, and are preserved.
            self.preserved_codes[-self.regenerated_cells.size :][self.regenerated_cells.ravel()] = -1

    def finish_image(self, image: Image.Image) -> Image.Image:
        """Blend a generated image of the same size into the original image.

        The image decoder also changes pixels around a regenerated cell, so a sharp edge would be visible. The weight of
        the new image therefore falls to 0 over the width of a cell.
        """
        height, width, _ = self.pixels.shape
        cell = height // len(self.regenerated_cells)
        # `grown` begins with the pixels of regenerated cells, and grows by one pixel per iteration.
        grown = self.regenerated_cells.repeat(cell, 0).repeat(width // self.regenerated_cells.shape[1], 1)
        # number of iterations in which `grown` contains each pixel: `cell` in regenerated cells, 0 a cell away
        weight = np.zeros((height, width), np.float32)
        for _ in range(cell):
            weight += grown
            wider = grown.copy()
            for target, source in ((np.s_[1:], np.s_[:-1]), (np.s_[:-1], np.s_[1:])):
                wider[target] |= grown[source]
                wider[:, target] |= grown[:, source]
            grown = wider
        # weight / cell is 1 in regenerated cells, and 0 where the original image remains.
        mixed = self.pixels + (weight / cell)[..., None] * (np.asarray(image, np.float32) - self.pixels)
        return Image.fromarray(np.rint(mixed).astype(np.uint8))

    @property
    def record(self) -> Mapping[str, str]:
        """SHA-256 hash of the pixels and of the regenerated cells, in hexadecimal."""
        return {"edit": hashlib.sha256(self.pixels.tobytes() + self.regenerated_cells.tobytes()).hexdigest()}


def prepare_edit(
    manifest: Manifest,
    size: Size,
    original: Image.Image,
    mask: ImageSource | None = None,
    keep_rows: int | None = None,
) -> ImageEdit:
    """Scale an image from `read_image` to cover a size, crop its centre, and select the cells to generate again."""
    width, height = manifest.size_in_pixels(size)
    if keep_rows is not None:
        if mask is not None:
            raise RequestError("given together with keep_rows", field="mask", remedy="give one of them")
        # With 0, the codes of a first grid are still preserved.
        num_rows = check_int("keep_rows", keep_rows, 0, 0 if size.first_grid else 1, size.rows - 1)
        regenerated_cells = np.repeat(np.arange(size.rows)[:, None] >= num_rows, size.columns, 1)
    else:
        selected = ImageOps.fit(_read_mask(original, mask), (width, height), Image.Resampling.BOX)
        # [rows, pixels per cell, columns, pixels per cell]
        cells = np.asarray(selected).reshape(size.rows, height // size.rows, size.columns, width // size.columns)
        # A cell is generated again if the mask selects any of its pixels. [rows, columns]
        regenerated_cells = cells.max((1, 3)) > 0
        if not regenerated_cells.any():
            actual = "no mask, and an image without transparent pixels" if mask is None else "no pixels to generate"
            expected = "some transparent pixels or, if there are none, some white pixels"
            raise RequestError(field="mask", found=actual, expected=expected, remedy="give a mask or keep_rows")
    return ImageEdit(np.array(crop_to_cover(original, (width, height))), regenerated_cells)


def _read_mask(original: Image.Image, mask: ImageSource | None) -> Image.Image:
    """Return an image that is white on the pixels to generate again."""
    marks = original if mask is None else read_image("mask", mask)
    alpha = np.asarray(marks.getchannel("A"))
    transparent = mask is None or bool((alpha < 128).any())
    selected = alpha < 128 if transparent else np.asarray(marks.convert("L")) >= 128
    return Image.fromarray(selected.astype(np.uint8) * 255)
