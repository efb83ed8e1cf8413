"""The image of a request, which both kinds of image parts read: to edit it, or to generate an image from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from PIL import Image

from ..bundle.manifest import Manifest, Size
from ..errors import RequestError
from ..options import ImageSource
from .base import PartInput, Words
from .image_files import read_image, read_image_size


def _reject_record(text: str) -> NoReturn:
    problem = "records an edit of another image, which it does not contain"
    raise RequestError(problem, remedy="give that image to `lantern-rt edit`")


IMAGE = Words(
    "image",
    "image",
    "image",
    "edit",
    option_type=Path,
    metavar="IMAGE",
    help="Source image, for models that take one.",
    restore=_reject_record,
)


@dataclass
class ImageInput(PartInput):
    """Image of which only the header is read yet. `mask` and `keep_rows` are as in `Options`."""

    manifest: Manifest
    source: ImageSource
    mask: ImageSource | None = None
    keep_rows: int | None = None

    def __post_init__(self) -> None:
        self.nearest_size = find_nearest_size(self.manifest, read_image_size(self.source, self.mask))

    @cached_property
    def image(self) -> Image.Image:
        return read_image("image", self.source)

    def default_options(self) -> Mapping[str, Any]:
        return {"size": self.nearest_size}

    def read_recorded_texts(self) -> Mapping[Any, Any]:
        return self.image.info


def find_nearest_size(manifest: Manifest, size_in_pixels: tuple[int, int]) -> str | None:
    """Find the image size of a bundle that is nearest to a width and height: by aspect ratio, then by area.

    The result is its name; None if the bundle has a single image size.
    """

    def measure_size_difference(size: Size) -> tuple[float, float]:
        # Differences of logarithms compare ratios, so twice and half the size are equally far.
        log_width, log_height = np.log(manifest.size_in_pixels(size)) - np.log(size_in_pixels)
        return round(abs(log_width - log_height), 3), abs(log_width + log_height)

    return min(manifest.sizes, key=measure_size_difference).name if manifest.sizes else None
