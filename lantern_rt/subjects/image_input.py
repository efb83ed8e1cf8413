"""The image of a request: an image to edit or, for bundles that take one, the source of a new image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
from PIL import Image

from ..bundle.manifest import Manifest, Size
from ..errors import RequestError
from ..options import ImageSource
from .base import Option, Part, RequestContext, Words
from .edited_image import prepare_edit
from .image_files import read_image, read_image_size
from .source_image import prepare_source_image

_MASK_HELP = (
    "Image of the same size that is transparent where IMAGE is to change or, if it has no transparency, white there. "
    "[default: the transparency of IMAGE]"
)
_ROWS_HELP = "Number of rows of the token grid to keep at the top, in place of a mask."


def _reject_record(text: str) -> NoReturn:
    problem = "records an edit of another image, which it does not contain"
    raise RequestError(problem, remedy="give that image to `lantern-rt edit`")


@dataclass
class ImageInput(Part):
    """Image of which only the header is read yet. `mask` and `keep_rows` are as in `Options`."""

    option = Option("image", Path, "IMAGE", "Source image, for models that take one.")
    words = (
        Words("image", "image", "edit", option, restore=_reject_record),
        Words("mask", "mask", "", Option("mask", Path, None, _MASK_HELP)),
        Words("keep_rows", "keep_rows", "", Option("keep_rows", int, None, _ROWS_HELP)),
    )
    manifest: Manifest
    file: ImageSource
    mask: ImageSource | None
    keep_rows: int | None

    def __post_init__(self) -> None:
        self.nearest_size = find_nearest_size(self.manifest, read_image_size(self.file, self.mask))

    @classmethod
    def read(cls, inputs: Mapping[str, Any], manifest: Manifest) -> Self:
        selection = [name for name in ("mask", "keep_rows") if name in inputs]
        if "image" not in inputs:
            raise RequestError("given without an image to edit", field=selection[0], remedy="also give the image")
        if selection or not manifest.source:
            check_supports_edits(manifest)
        return cls(manifest, inputs["image"], inputs.get("mask"), inputs.get("keep_rows"))

    @cached_property
    def image(self) -> Image.Image:
        return read_image("image", self.file)

    def default_options(self) -> Mapping[str, Any]:
        return {"size": self.nearest_size}

    def read_recorded_texts(self) -> Mapping[Any, Any]:
        return self.image.info

    def adapt(self, context: RequestContext) -> RequestContext:
        if not self.manifest.source:
            return context
        num_tokens = self.manifest.source.count_prompt_tokens(self.manifest.size(self.nearest_size))
        condition = context.condition.model_copy(update={"prefix": context.condition.prefix - num_tokens})
        return replace(context, condition=condition, size=context.size.with_source_image())

    def finish(self, context: RequestContext) -> Part:
        if self.manifest.source:
            return prepare_source_image(self.manifest, self.manifest.size(self.nearest_size), self.image)
        return prepare_edit(self.manifest, context.size, self.image, self.mask, self.keep_rows)


def check_supports_edits(manifest: Manifest) -> None:
    """Raise RequestError if a bundle cannot generate a part of an image again, which needs an image encoder."""
    if manifest.source is not None:
        problem = f"bundle {manifest.name} generates whole images from a source image, and cannot edit a part"
        raise RequestError(problem, field="image", remedy="give the image to `lantern-rt run --image`, without a mask")
    if not manifest.can_edit_images:
        problem = f"bundle {manifest.name} has no image encoder"
        remedy = "export it again from its checkpoint, with this version" if manifest.makes_images else ""
        raise RequestError(problem, field="image", remedy=remedy)


def find_nearest_size(manifest: Manifest, size_in_pixels: tuple[int, int]) -> str | None:
    """Return the name of the size that is nearest by aspect ratio, then by area; None: the bundle has a single size."""

    def measure_size_difference(size: Size) -> tuple[float, float]:
        # Differences of logarithms compare ratios, so twice and half the size are equally far.
        log_width, log_height = np.log(manifest.size_in_pixels(size)) - np.log(size_in_pixels)
        return round(abs(log_width - log_height), 3), abs(log_width + log_height)

    return min(manifest.sizes, key=measure_size_difference).name if manifest.sizes else None
