"""File formats of finished images, or of their codes (tokens). `run`, `push` and HTTP offer the rows of `FORMATS`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..errors import OutputError, RequestError

if TYPE_CHECKING:
    from PIL.Image import Image

    from ..runtime.engine import Ints


@dataclass(frozen=True)
class FinishedImage:
    """Image whose codes are all generated."""

    codes: Ints  # int64 [rows, columns]
    first_codes: Ints  # of the smaller grid that some models generate first, int64 [rows, columns]
    recipe: dict[str, str]
    decode: Callable[[], Image]  # the image's `info` holds the recipe


class Model(Protocol):
    """Manifest of a bundle, or a published model."""

    @property
    def makes_images(self) -> bool: ...


@dataclass(frozen=True)
class OutputFormat(ABC):
    """File format of an image or of its codes."""

    name: str  # value of HTTP's field `output_format`
    suffixes: tuple[str, ...]  # endings of file names in lower case, of which new names get the first
    media_type: str
    needs_image_decoder: bool = True

    def supports(self, model: Model) -> bool:
        return model.makes_images or not self.needs_image_decoder

    def check_codec(self, field: str) -> None:  # noqa: B027 - not every format has a codec
        """Raise RequestError about `field` if an installed library cannot write the format."""

    @abstractmethod
    def encode(self, image: FinishedImage, scale: int = 1) -> bytes:
        """Return the contents of a file. An image is enlarged `scale` times."""


@dataclass(frozen=True)
class ImageFormat(OutputFormat):
    """Image format of Pillow; `lossy` ones have a quality."""

    lossy: bool = True

    def check_codec(self, field: str) -> None:
        from PIL import Image, __version__

        Image.init()
        if self.name.upper() not in Image.SAVE:
            problem = f"Pillow {__version__} is installed without {self.name.upper()}"
            raise RequestError(problem, field=field, remedy=f"use {PNG.name}, or install a Pillow that has it")

    def encode(self, image: FinishedImage, scale: int = 1) -> bytes:
        from .images import enlarge

        return self.encode_image(enlarge(image.decode(), scale))

    def encode_image(self, image: Image, quality: int | None = None) -> bytes:
        """Encode an image with a quality of 0 .. 100; None: 90. A PNG file gets the recipe in the image's `info`."""
        from .images import make_text_chunks

        file = BytesIO()
        quality = 90 if quality is None else quality
        options = {"quality": quality} if self.lossy else {"pnginfo": make_text_chunks(image.info)}
        image.save(file, self.name.upper(), **options)
        return file.getvalue()


class CodesFormat(OutputFormat):
    """File of `codes` and `first_codes`, int64 `[rows, columns]`, and `recipe`, a JSON text."""

    def encode(self, image: FinishedImage, scale: int = 1) -> bytes:
        import numpy as np

        file = BytesIO()
        np.savez(file, codes=image.codes, first_codes=image.first_codes, recipe=np.array(dumps(image.recipe)))
        return file.getvalue()


PNG = ImageFormat("png", (".png",), "image/png", lossy=False)
CODES = CodesFormat("npz", (".npz",), "application/x-npz", needs_image_decoder=False)
_IMAGE_FORMATS = (
    PNG,
    ImageFormat("jpeg", (".jpg", ".jpeg"), "image/jpeg"),
    ImageFormat("webp", (".webp",), "image/webp"),
    ImageFormat("avif", (".avif",), "image/avif"),  # Pillow has AVIF since 11.3
)
IMAGE_FORMATS = {each.name: each for each in _IMAGE_FORMATS}
FORMATS: tuple[OutputFormat, ...] = (*_IMAGE_FORMATS, CODES)


def find_format(path: Path, formats: Sequence[OutputFormat] = FORMATS) -> OutputFormat:
    """Return the format that the ending of a file name selects."""
    for each in formats:
        if path.suffix.lower() in each.suffixes:
            each.check_codec(str(path))
            return each
    known = ", ".join(suffix for each in formats for suffix in each.suffixes)
    raise OutputError(field=str(path), found=f"the ending {path.suffix}", expected=f"a {known} file or a folder")
