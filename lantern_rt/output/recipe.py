"""What a PNG records of its making, read again: as hostile as any file, so limits come first and pixels stay packed."""

from __future__ import annotations

from io import SEEK_CUR, BytesIO
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

from PIL.PngImagePlugin import PngImageFile
from pydantic import Field, Json, ValidationError, model_validator

from ..errors import RequestError
from ..inputs import error_fields, format_error, format_value, open_plain_file
from ..methods import FrozenModel, MethodName

TEXTS_LIMIT = 1 << 16  # bytes of all text chunks that are read
CHUNKS_LIMIT = 1 << 17  # of a file, most of them pixels
TEXT_LIMIT = 1 << 14  # characters of a text, unpacked
PIXELS_LIMIT = 1 << 28  # 1,024 x 1,024, enlarged 16 times
CURE = "give a PNG that `lantern-rt run` wrote"


class Recipe(FrozenModel, strict=True):
    """What draws a picture again: a field for each text chunk that its PNG must have, and its prompt or class id.

    embedding: hash of what it was drawn of, if of neither. edit: of the picture that was changed, and of its mask.
    settings: by the names that users give, as in `Settings.as_dict`. What a bundle makes of them is not checked here.
    """

    prompt: str | None = None
    negative_prompt: str | None = None
    class_id: int | None = None
    embedding: str | None = None
    edit: str | None = None
    seed: int
    method: MethodName
    noise: Literal["philox4x64-gumbel-1"]
    settings: Json[dict[str, Any]]
    bundle: str
    bundle_digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

    @model_validator(mode="after")
    def _names_one_method(self) -> Recipe:
        method = self.settings.get("method")
        if method != self.method:
            raise ValueError(
                f"settings.method: found {format_value(method)}, expected {self.method} as text chunk method"
            )
        return self


def read_recipe(path: Path) -> Recipe:
    """The recipe in a PNG. Raises: RequestError: it is no PNG, is too large, or records no recipe."""
    texts = {name: text for name, text in _read_texts(path).items() if name in Recipe.model_fields}
    for name, text in texts.items():
        if len(text) > TEXT_LIMIT:
            found, expected = f"{len(text):,} characters", f"at most {TEXT_LIMIT:,}"
            raise RequestError(field=f"{path}: text chunk {name}", found=found, expected=expected, remedy=CURE)
    try:
        return Recipe.model_validate_strings(texts)
    except ValidationError as error:
        fields = error_fields(error)
        field = fields.pop("field")
        place = f"{path}: text chunk {field}" if field else str(path)
        raise RequestError(**fields, field=place, remedy=CURE) from error


def _read_texts(path: Path) -> dict[str, str]:
    """Return the texts of a PNG that a recipe has. Pillow limits what it unpacks of them to 64 MiB."""
    try:
        with open_plain_file(path) as file:
            image = PngImageFile(BytesIO(_without_pixels(file)))
    except Exception as error:  # of whatever kind: Pillow parses the file
        problem = f"cannot be read as a PNG with at most {TEXTS_LIMIT:,} bytes of texts ({format_error(error)})"
        raise RequestError(problem, field=str(path), remedy=CURE) from error
    if image.width * image.height > PIXELS_LIMIT:
        found = f"{image.width:,} x {image.height:,} pixels"
        raise RequestError(field=str(path), found=found, expected=f"at most {PIXELS_LIMIT:,}", remedy=CURE)
    return {name: text for name, text in image.info.items() if isinstance(name, str) and isinstance(text, str)}


def _without_pixels(file: BinaryIO) -> bytes:
    """Return the header of a PNG and its chunks with a recipe's texts, which some programs write behind the pixels."""
    kept = file.read(33)  # signature and header
    for head in islice(iter(lambda: file.read(88), b""), CHUNKS_LIMIT):  # length, kind, and the name of a text
        file.seek(-len(head), SEEK_CUR)
        size = 12 + int.from_bytes(head[:4])
        name = head[8:].partition(b"\0")[0].decode("latin-1")
        if head[4:8] in (b"tEXt", b"zTXt", b"iTXt") and name in Recipe.model_fields:
            kept += file.read(min(size, TEXTS_LIMIT))
        else:
            file.seek(size, SEEK_CUR)
        if len(kept) > TEXTS_LIMIT:
            raise ValueError("more than that")
    return kept + b"\0\0\0\0IEND\xaeB`\x82"
