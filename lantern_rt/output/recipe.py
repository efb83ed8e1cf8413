"""Recipes, which are records in PNG files of how an image was generated.

Files may be hostile, so sizes are limited and pixels are not decoded.
"""

from __future__ import annotations

from io import SEEK_CUR, BytesIO
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal

from PIL.PngImagePlugin import PngImageFile
from pydantic import Field, Json, ValidationError, create_model, model_validator

from ..errors import RequestError
from ..inputs import (
    describe_validation_error,
    format_error,
    format_value,
    open_regular_file,
    reraise_error_of_signal_handler,
)
from ..methods import FrozenModel, MethodName
from ..subjects.table import WORDS

TEXTS_LIMIT = 1 << 18  # Maximum size of all relevant text chunks in bytes.
CHUNKS_LIMIT = 1 << 17  # Maximum number of chunks; most of them contain pixels.
TEXT_LIMIT = 1 << 16  # Maximum number of characters of a decompressed text, more than any prompt has.
PIXELS_LIMIT = 1 << 28  # For example 1,024 x 1,024, enlarged 16 times.
REMEDY = "give a PNG that `lantern-rt run` wrote"

if TYPE_CHECKING:
    _InputChunks = FrozenModel
else:
    _InputChunks = create_model(
        "_InputChunks",
        __base__=FrozenModel,
        **{words.chunk: (words.chunk_type | None, None) for words in WORDS.values() if words.chunk},
    )


class Recipe(_InputChunks, strict=True):
    """Record of how an image was generated, with one field per text chunk of the PNG file."""

    seed: int
    method: MethodName
    noise: Literal["philox4x64-gumbel-1"]  # version of the noise function
    settings: Json[dict[str, Any]]  # of `GenerationSettings.as_dict`, which no bundle has checked
    bundle: str
    bundle_digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

    @model_validator(mode="after")
    def _check_methods_agree(self) -> Recipe:
        method = self.settings.get("method")
        if method != self.method:
            raise ValueError(
                f"settings.method: found {format_value(method)}, expected {self.method}, as in text chunk method"
            )
        return self

    def restore_inputs(self) -> dict[str, Any]:
        """Return the parameters of a pipeline call but settings and seed; RequestError if only a hash is recorded."""
        recorded = [(words, getattr(self, words.chunk)) for words in WORDS.values() if words.chunk]
        return {words.parameter: words.restore(value) for words, value in recorded if value is not None}


def read_recipe(path: Path) -> Recipe:
    """Read the recipe in a PNG file; RequestError if there is none, or the file is too large."""
    texts = _read_text_chunks(path)
    for name, text in texts.items():
        if len(text) > TEXT_LIMIT:
            actual = f"{len(text):,} characters"
            expected = f"at most {TEXT_LIMIT:,}"
            raise RequestError(field=f"{path}: text chunk {name}", found=actual, expected=expected, remedy=REMEDY)
    try:
        return Recipe.model_validate_strings(texts)
    except ValidationError as error:
        fields = describe_validation_error(error)
        field = fields.pop("field")
        place = f"{path}: text chunk {field}" if field else str(path)
        raise RequestError(**fields, field=place, remedy=REMEDY) from error


def _read_text_chunks(path: Path) -> dict[str, str]:
    try:
        with open_regular_file(path) as file:
            image = PngImageFile(BytesIO(_strip_pixel_chunks(file)))  # Pillow limits decompressed texts to 64 MiB
    except Exception as error:  # Pillow may raise any exception for a damaged file.
        reraise_error_of_signal_handler(error)
        problem = f"cannot be read as a PNG with at most {TEXTS_LIMIT:,} bytes of texts ({format_error(error)})"
        raise RequestError(problem, field=str(path), remedy=REMEDY) from error
    if image.width * image.height > PIXELS_LIMIT:
        actual = f"{image.width:,} x {image.height:,} pixels"
        raise RequestError(field=str(path), found=actual, expected=f"at most {PIXELS_LIMIT:,}", remedy=REMEDY)
    return {str(name): text for name, text in image.info.items() if name in Recipe.model_fields}


def _strip_pixel_chunks(file: BinaryIO) -> bytes:
    """Return the header and the recipe's text chunks, as a PNG file. Some programs write them after the pixels."""
    data = file.read(33)  # Signature and header.
    for head in islice(iter(lambda: file.read(88), b""), CHUNKS_LIMIT):  # Length, type, and name of a text.
        file.seek(-len(head), SEEK_CUR)
        size = 12 + int.from_bytes(head[:4])
        name = head[8:].partition(b"\0")[0].decode("latin-1")
        if head[4:8] in (b"tEXt", b"zTXt", b"iTXt") and name in Recipe.model_fields:
            data += file.read(min(size, TEXTS_LIMIT))
        else:
            file.seek(size, SEEK_CUR)
        if len(data) > TEXTS_LIMIT:
            raise ValueError(f"has more than {TEXTS_LIMIT:,} bytes of text")
    return data + b"\0\0\0\0IEND\xaeB`\x82"
