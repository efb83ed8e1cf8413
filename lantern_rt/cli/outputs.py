"""Files that `run` writes: images in PNG files, or codes in .npz files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..errors import OutputError, RequestError
from ..output.files import check_output

if TYPE_CHECKING:
    from ..bundle.files import Bundle
    from ..requests import Request
    from ..results import StreamStep


class Outputs(Protocol):
    """Kind of the output files. suffix: ending of their names."""

    suffix: str

    def holds(self, path: Path, request: Request, i: int) -> bool:
        """Return whether a file exists with image i of a request, and is not to be written again."""

    def content(self, request: Request, i: int, step: StreamStep) -> bytes:
        """Return the file of image i, which is complete."""


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
        from ..output.images import enlarge, png_bytes

        image = enlarge(step.image(i), self._scale)
        return png_bytes(image, image.info)


class CodeOutputs:
    """Files of codes, which are always written again."""

    suffix = ".npz"

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle

    def holds(self, path: Path, request: Request, i: int) -> bool:
        return False

    def content(self, request: Request, i: int, step: StreamStep) -> bytes:
        from ..results import codes_bytes

        return codes_bytes(self._bundle, request.settings, request.images[i], step.codes[i])


def choose_outputs(bundle: Bundle, codes: bool, scale: int, trace: Path | None) -> Outputs:
    """Return the kind of the output files.

    Args:
        codes: whether the user asks for codes; a bundle without an image decoder gives nothing else.
        scale: factor by which to enlarge images.
        trace: file of a trace, None without.

    Raises:
        RequestError: an option needs images.
    """
    manifest = bundle.manifest
    if writes_images(manifest.makes_images, f"bundle {manifest.name}", codes, scale, trace):
        return ImageOutputs(bundle, scale)
    return CodeOutputs(bundle)


def writes_images(makes_images: bool, name: str, codes: bool, scale: int, trace: Path | None) -> bool:
    """Return whether the output files are images.

    Args:
        makes_images: whether the bundle has an image decoder.
        name: name of the bundle, for messages.
        codes, scale, trace: see `choose_outputs`.

    Raises:
        RequestError: an option needs images.
    """
    if makes_images and not codes:
        return True
    problem = f"{name} has no image decoder"
    if makes_images:
        problem = "is for images, not for --codes"
        trace = None
    if trace is not None or scale != 1:
        raise RequestError(problem, field="scale" if trace is None else "trace", remedy="leave it out")
    return False


def check_trace(path: Path | None, outputs: list[Path], force: bool) -> tuple[Path, Path] | None:
    """Return the two paths of a trace.

    Args:
        path: path of NAME.npz; None: no trace.
        outputs: paths of the images; the trace needs other paths.
        force: whether to replace existing files.

    Raises:
        OutputError: a path cannot be written.
    """
    if path is None:
        return None
    if path.suffix != ".npz":
        raise OutputError(field=f"trace {path}", found=f"the ending {path.suffix or 'none'}", expected=".npz")
    paths = path, path.with_name(path.stem.removesuffix(".trace") + ".trace.png")
    for written in paths:
        check_output(written, force)
        if written.absolute() in [output.absolute() for output in outputs]:
            problem = "is the path of an image and of the trace"
            raise OutputError(problem, field=str(written), remedy="rename one of them")
    return paths
