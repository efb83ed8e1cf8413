"""Images: conversion from decoder output, enlarging, and the text chunks of PNG files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ..errors import BundleError

GREY = (128, 128, 128)  # Colour of cells that are not decoded yet.


class ImageWithRecipe(Image.Image):
    """Image whose `info` holds its recipe, a record of how it was generated. PNG files get the recipe, too."""

    def save(self, fp: Any, format: str | None = None, **params: Any) -> None:
        """Save the image like Pillow, with the recipe in a PNG file. With `pnginfo=None` the recipe is not written."""
        super().save(fp, format, **{"pnginfo": make_text_chunks(self.info), **params})


def attach_recipe(image: Image.Image, recipe_texts: Mapping[Any, str]) -> ImageWithRecipe:
    """Return a copy of an image with a recipe: the names and texts of PNG chunks."""
    copy = ImageWithRecipe()
    copy.__setstate__(image.__getstate__())
    copy.info = {**recipe_texts}
    return copy


def convert_pixels_to_image(pixels: NDArray[np.float32]) -> Image.Image:
    """Convert decoder output `[3, height, width]`, from -1 (black) to 1, to an image. Other values are clamped."""
    if not np.isfinite(pixels).all():
        remedy = "its weights are damaged, export the bundle again"
        raise BundleError(field="image decoder", found="NaN or infinity", remedy=remedy)
    levels = np.rint((np.clip(pixels, -1, 1) + 1) * 127.5).astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(levels.transpose(1, 2, 0)))


def make_blank_image(width: int, height: int) -> Image.Image:
    return Image.new("RGB", (width, height), GREY)


def grey_out_undecoded_cells(image: Image.Image, decoded_cells: NDArray[np.bool_]) -> Image.Image:
    """Return a copy of an image that is grey in all cells where `decoded_cells [rows, columns]` is False."""
    pixels = np.array(image)
    row, column = (
        np.arange(size) * cells // size for size, cells in zip(pixels.shape, decoded_cells.shape, strict=False)
    )
    pixels[~decoded_cells[row][:, column]] = GREY
    return Image.fromarray(pixels)


def enlarge(image: Image.Image, scale: int) -> Image.Image:
    if scale == 1:
        return image
    return image.resize((image.width * scale, image.height * scale), Image.Resampling.BICUBIC)


def make_text_chunks(recipe_texts: Mapping[Any, Any]) -> PngInfo:
    """Return a text chunk of a PNG file for each string in `recipe_texts`."""
    info = PngInfo()
    for key, text in recipe_texts.items():
        if isinstance(key, str) and isinstance(text, str):
            info.add_text(key, text)  # Pillow writes iTXt if Latin-1 does not suffice.
    return info
