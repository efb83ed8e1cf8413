"""Files that `run` writes: images in PNG files, or codes in .npz files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..errors import RequestError

if TYPE_CHECKING:
    from ..bundle.files import Bundle
    from ..requests import Request
    from ..results import StreamStep


class Outputs(Protocol):
    """Kind of the output files. suffix: ending of their names."""

    suffix: str

    def holds(self, path: Path, request: Request, i: int) -> bool:
        """Return whether a file holds image i of a request, and is not to be written again.

        Args:
            path: path of the file, which exists.
            i: index of the image.
        """

    def content(self, request: Request, i: int, step: StreamStep) -> bytes:
        """Return the file of a complete image.

        Args:
            i: index of the image.
            step: step that holds the image.
        """


class ImageOutputs:
    """PNG files. scale: factor by which to enlarge the images."""

    suffix = ".png"

    def __init__(self, bundle: Bundle, scale: int) -> None:
        self._bundle = bundle
        self._scale = scale

    def holds(self, path: Path, request: Request, i: int) -> bool:
        from .replay import holds_image

        return holds_image(path, self._bundle, replace(request, images=[request.images[i]]), self._scale)

    def content(self, request: Request, i: int, step: StreamStep) -> bytes:
        from ..output.images import encode_png, enlarge

        image = enlarge(step.image(i), self._scale)
        return encode_png(image, image.info)


class CodeOutputs:
    """Files of codes, which are always written again. scale: 1."""

    suffix = ".npz"

    def __init__(self, bundle: Bundle, scale: int) -> None:
        self._bundle = bundle

    def holds(self, path: Path, request: Request, i: int) -> bool:
        return False

    def content(self, request: Request, i: int, step: StreamStep) -> bytes:
        from ..results import encode_codes

        return encode_codes(self._bundle, request.settings, request.images[i], step.codes[i])


def check_image_options(
    makes_images: bool, name: str, codes: bool, scale: int, trace: Path | None
) -> type[ImageOutputs | CodeOutputs]:
    """Return the kind of the output files.

    Args:
        makes_images: whether the bundle has an image decoder; without, it gives nothing but codes.
        name: name of the bundle in errors.
        codes: whether the user asks for codes.
        scale: factor by which to enlarge images.
        trace: file of a trace, None without.

    Raises:
        RequestError: an option needs images.
    """
    if makes_images and not codes:
        return ImageOutputs
    problem = f"{name} has no image decoder"
    if makes_images:
        problem = "is for images, not for --codes"
        trace = None
    if trace is not None or scale != 1:
        raise RequestError(problem, field="scale" if trace is None else "trace", remedy="leave it out")
    return CodeOutputs


def choose_outputs(bundle: Bundle, codes: bool, scale: int, trace: Path | None) -> Outputs:
    """Return the output files of a bundle, see `check_image_options`.

    Args:
        codes: whether the user asks for codes.
        scale: factor by which to enlarge images.
        trace: file of a trace, None without.
    """
    name = f"bundle {bundle.manifest.name}"
    return check_image_options(bundle.manifest.makes_images, name, codes, scale, trace)(bundle, scale)
