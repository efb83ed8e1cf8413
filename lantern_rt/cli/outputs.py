"""Files that `run` writes: images in PNG files, or codes in .npz files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..errors import RequestError
from ..inputs import check_int

if TYPE_CHECKING:
    from ..bundle.files import Bundle
    from ..requests import Request
    from ..results import StreamStep


class OutputFormat(Protocol):
    suffix: str

    def contains_image(self, request: Request, image_index: int, path: Path) -> bool:
        """Return whether an existing file has image `image_index` of a request, and need not be written again."""

    def encode_file(self, request: Request, image_index: int, step: StreamStep) -> bytes:
        """Return the contents of the file of an image, which is complete after `step`."""


class ImageOutputFormat:
    """PNG files of images, enlarged `scale` times."""

    suffix = ".png"

    def __init__(self, bundle: Bundle, scale: int) -> None:
        self._bundle = bundle
        self._scale = scale

    def contains_image(self, request: Request, image_index: int, path: Path) -> bool:
        from .replay import png_contains_image

        return png_contains_image(
            path, self._bundle, replace(request, images=[request.images[image_index]]), self._scale
        )

    def encode_file(self, request: Request, image_index: int, step: StreamStep) -> bytes:
        from ..output.images import encode_png, enlarge

        image = enlarge(step.image(image_index), self._scale)
        return encode_png(image, image.info)


class CodeOutputFormat:
    """Files `.npz` of codes, which are never reused. `scale` is 1, because codes cannot be enlarged."""

    suffix = ".npz"

    def __init__(self, bundle: Bundle, scale: int) -> None:
        self._bundle = bundle

    def contains_image(self, request: Request, image_index: int, path: Path) -> bool:
        return False

    def encode_file(self, request: Request, image_index: int, step: StreamStep) -> bytes:
        from ..results import encode_codes_npz

        return encode_codes_npz(self._bundle, request.settings, request.images[image_index], step.codes[image_index])


def choose_output_format(
    has_image_decoder: bool, bundle_name: str, codes_only: bool, scale: int, trace_path: Path | None
) -> type[ImageOutputFormat | CodeOutputFormat]:
    """Choose the class of the output format: images or codes.

    Args:
        bundle_name: for error messages.
        codes_only: whether the user asks for codes.
        scale: factor by which images are enlarged, 1 .. 16.

    Raises:
        RequestError: `scale` or `trace_path` is given although only codes are written, or `scale` is out of range.
    """
    check_int("scale", scale, 1, 1, 16)
    if has_image_decoder and not codes_only:
        return ImageOutputFormat
    problem = f"{bundle_name} has no image decoder"
    if has_image_decoder:
        problem = "is for images, not for --codes"
        trace_path = None
    if trace_path is not None or scale != 1:
        raise RequestError(problem, field="scale" if trace_path is None else "trace", remedy="leave it out")
    return CodeOutputFormat
