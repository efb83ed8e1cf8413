"""Pixels: from decoder output to pictures, enlarging, and PNG with text chunks."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ..errors import BundleError

GREY = (128, 128, 128)  # painted where nothing has been decoded yet


class RecordedImage(Image.Image):
    """An image whose `info` records how it was made; `save` writes the record into PNG files."""

    def save(self, fp: Any, format: str | None = None, **params: Any) -> None:
        """As of any image of Pillow; give `pnginfo=None` to write no record."""
        super().save(fp, format, **{"pnginfo": _chunks(self.info), **params})


def with_record(image: Image.Image, texts: Mapping[Any, str]) -> RecordedImage:
    """The picture with `texts` as its record."""
    picture = RecordedImage()
    picture.__setstate__(image.__getstate__())
    picture.info = {**texts}
    return picture


def to_image(pixels: NDArray[np.float32]) -> Image.Image:
    """A picture of `pixels [3, height, width]`; -1 is black, 1 is full, what lies outside is clamped."""
    if not np.isfinite(pixels).all():
        remedy = "its weights are damaged, export the bundle again"
        raise BundleError(field="image decoder", found="NaN or infinity", remedy=remedy)
    levels = np.rint((np.clip(pixels, -1, 1) + 1) * 127.5).astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(levels.transpose(1, 2, 0)))


def blank_image(width: int, height: int) -> Image.Image:
    """A picture of which nothing is known."""
    return Image.new("RGB", (width, height), GREY)


def grey_out(image: Image.Image, known: NDArray[np.bool_]) -> Image.Image:
    """Paint over the cells that are not `known [rows, columns]`."""
    pixels = np.array(image)
    row, column = (np.arange(size) * cells // size for size, cells in zip(pixels.shape, known.shape, strict=False))
    pixels[~known[row][:, column]] = GREY
    return Image.fromarray(pixels)


def enlarge(image: Image.Image, scale: int) -> Image.Image:
    """The picture, `scale` times as wide and high, bicubic."""
    if scale == 1:
        return image
    return image.resize((image.width * scale, image.height * scale), Image.Resampling.BICUBIC)


def png_bytes(image: Image.Image, texts: Mapping[Any, Any]) -> bytes:
    """A PNG file with one text chunk per entry of `texts` that is text; the same input gives the same bytes."""
    buffer = BytesIO()
    image.save(buffer, "PNG", pnginfo=_chunks(texts))
    return buffer.getvalue()


def _chunks(texts: Mapping[Any, Any]) -> PngInfo:
    info = PngInfo()
    for key, text in texts.items():
        if isinstance(key, str) and isinstance(text, str):
            info.add_text(key, text)  # Pillow writes iTXt where Latin-1 does not suffice
    return info
