"""Pictures that are changed in part: what is kept of one, what is drawn anew, and how old and new pixels meet.

Files of strangers are read here: limits come first, and whatever a library says of a damaged one is a `RequestError`.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageChops, ImageCms, ImageOps

from .bundle.manifest import Manifest, Size
from .errors import RequestError
from .inputs import check_int, read_plain_file, reading
from .methods import ImageSource
from .runtime.engine import Bools, Floats, Ints

BYTES_LIMIT = 1 << 23  # of a file
PIXELS_LIMIT = 1 << 24  # of a picture, unpacked
ROUNDING = 2  # levels by which sRGB may differ from sRGB
HALVED_PIXELS = 1 << 22  # above which a picture is read at half its size


@dataclass(eq=False)
class Edit:
    """An image and the cells of it to generate again; the tokens of all other cells are preserved.

    Attributes:
        pixels: uint8 `[height, width, 3]`.
        regenerated: cells to generate again, bool `[rows, columns]`.
        preserved: tokens of preserved cells, -1 in the others, int64 `[cells]`; None before `encode`.
    """

    pixels: NDArray[np.uint8]
    regenerated: Bools
    preserved: Ints | None = field(init=False, default=None)

    def encode(self, encoder: Callable[[Floats], Ints]) -> Ints:
        """`preserved`, by an encoder of pictures `[1, 3, height, width]` in -1 .. 1; once."""
        if self.preserved is None:
            images = np.moveaxis(self.pixels, 2, 0)[None].astype(np.float32) / np.float32(127.5) - 1
            self.preserved = np.where(self.regenerated.ravel(), -1, encoder(images)[0])
        return self.preserved

    def blend(self, image: Image.Image) -> Image.Image:
        """A new picture inside of drawn cells, the old one outside; between them both, for the width of a cell.

        A cell's code moves pixels beyond it, less and less: a seam would show where they were cut off.
        """
        height, width, _ = self.pixels.shape
        cell = height // len(self.regenerated)
        grown = self.regenerated.repeat(cell, 0).repeat(width // self.regenerated.shape[1], 1)
        weight = np.zeros((height, width), np.float32)
        for _ in range(cell):
            weight += grown
            wider = grown.copy()
            for there, here in ((np.s_[1:], np.s_[:-1]), (np.s_[:-1], np.s_[1:])):
                wider[there] |= grown[here]
                wider[:, there] |= grown[:, here]
            grown = wider
        mixed = self.pixels + (weight / cell)[..., None] * (np.asarray(image, np.float32) - self.pixels)
        return Image.fromarray(np.rint(mixed).astype(np.uint8))

    @property
    def digest(self) -> str:
        """What tells it from other edits: a hash of its pixels and cells."""
        return hashlib.sha256(self.pixels.tobytes() + self.regenerated.tobytes()).hexdigest()


def read_image(name: str, source: ImageSource, header_only: bool = False) -> Image.Image:
    """A picture upright and in RGBA, its `info` kept; a large one at half its size.

    name: of the parameter it was given as. header_only: return the picture as its header says, with no pixel unpacked.

    Raises:
        RequestError: it cannot be read, or is too large.
    """
    if not isinstance(source, Image.Image | np.ndarray | str | Path | bytes):
        taken = "an image of Pillow, a NumPy array, a path, or the bytes of a file"
        raise RequestError(field=name, found=f"an object of type {type(source).__name__}", expected=taken)
    path = Path(source) if isinstance(source, str | Path) else Path(name)
    expected = "a PNG, JPEG or WebP file"
    with reading(path, expected, RequestError, "give another one"), warnings.catch_warnings(action="ignore"):
        if isinstance(source, np.ndarray) or (isinstance(source, Image.Image) and source.mode in ("I", "F")):
            image = _of_numbers(name, np.asarray(source))
        elif isinstance(source, Image.Image):
            image = source
        else:
            data = source if isinstance(source, bytes) else read_plain_file(path, BYTES_LIMIT)
            image = Image.open(BytesIO(data), formats=("PNG", "JPEG", "WEBP"))
        if image.width * image.height > PIXELS_LIMIT:
            found, most = f"{image.width:,} x {image.height:,} pixels", f"at most {PIXELS_LIMIT:,}"
            raise RequestError(field=str(path), found=found, expected=most, remedy="make it smaller")
        if header_only:
            return image
        factor = 2 if image.width * image.height > HALVED_PIXELS else 1
        if factor == 2 and image is not source and image.draft(None, (image.width // 2, image.height // 2)):
            factor = 1  # a JPEG file, which is decoded at half its size
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I"):  # 16 bits, which Pillow would cut off at 255
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        if factor > 1 and (image.mode not in ("L", "LA", "RGB", "RGBA", "CMYK") or "transparency" in image.info):
            image = image.convert("RGBA")  # indices of a palette have no mean
        return _as_seen(image.reduce(factor))


def read_image_size(image: ImageSource, mask: ImageSource | None = None) -> tuple[int, int]:
    """Return the width and height of an upright picture by its header. Raises: RequestError: the mask has others."""
    sources = {"image": image} if mask is None else {"image": image, "mask": mask}
    sizes = []
    for name, source in sources.items():
        header = read_image(name, source, header_only=True)
        with reading(Path(name), "an orientation", RequestError, "give another one"):
            turned = Image.Image.getexif(header).get(ExifTags.Base.Orientation) in range(5, 9)  # a PNG's unpacks it
        sizes.append(header.size[::-1] if turned else header.size)
    if sizes[-1] != sizes[0]:
        expected, found = (f"{width} x {height} pixels" for width, height in sizes)
        raise RequestError(field="mask", found=found, expected=f"{expected}, as the image has")
    return sizes[0]


def _of_numbers(name: str, array: NDArray[Any]) -> Image.Image:
    """Return an array as an image of 8 bits: bool, floats 0 .. 1, integers of 8 or 16 bits, in a mask also 0 and 1."""
    least, most = array.min(initial=0), array.max(initial=0)
    binary = array.dtype.kind in "bf" or (name == "mask" and most <= 1)
    if array.dtype == np.uint8 and not binary:
        return Image.fromarray(array)
    limit = 1 if binary else 255 if most <= 255 else 65535
    if not 0 <= least <= most <= limit:
        found = f"{array.dtype} from {least:g} to {most:g}"
        raise RequestError(field=name, found=found, expected="integers 0 .. 255, floats 0 .. 1, or bool")
    return Image.fromarray(np.rint(array * (255 / limit)).astype(np.uint8))


def _as_seen(image: Image.Image) -> Image.Image:
    """Return an image in RGBA, its colours in sRGB by the profile in its file, if that is one of its channels."""
    plain = image.convert("RGBA")
    profile = plain.info.pop("icc_profile", b"")
    colours = image.convert({"P": "RGB", "PA": "RGB", "LA": "L"}.get(image.mode, image.mode))
    with suppress(OSError, ImageCms.PyCMSError):  # none, or one that viewers leave out, too
        source = ImageCms.ImageCmsProfile(BytesIO(profile))
        seen = ImageCms.profileToProfile(colours, source, ImageCms.createProfile("sRGB"), outputMode="RGB")
        assert seen is not None
        if np.asarray(ImageChops.difference(seen, plain.convert("RGB"))).max() > ROUNDING:  # else it is sRGB itself
            seen.putalpha(plain.getchannel("A"))
            seen.info = plain.info
            return seen
    return plain


def prepare_edit(
    manifest: Manifest,
    size: Size,
    picture: Image.Image,
    mask: ImageSource | None = None,
    keep_rows: int | None = None,
) -> Edit:
    """What is to be changed of a picture, which is scaled to cover the size and cut in the middle.

    Args:
        manifest: of the bundle.
        size: of its pictures that is drawn.
        picture: from `read_image`.
        mask: of the picture's size; where it is transparent or, if nothing of it is, white, cells are drawn anew. None:
            where the picture itself is transparent.
        keep_rows: instead of a mask, rows of codes at the top that are kept.

    Raises:
        RequestError: the bundle has no encoder, or nothing is to be drawn or kept.
    """
    if "vq_encoder" not in manifest.files:
        problem = f"bundle {manifest.name} has no encoder of pictures"
        raise RequestError(problem, field="image", remedy="export it again from its checkpoint, with this version")
    width, height = manifest.pixels(size)
    if keep_rows is not None:
        if mask is not None:
            raise RequestError("says what is kept, as keep_rows does", field="mask", remedy="give one of them")
        kept = check_int("keep_rows", keep_rows, 0, 1, size.rows - 1)
        drawn = np.repeat(np.arange(size.rows)[:, None] >= kept, size.columns, 1)
    else:
        hole = ImageOps.fit(_hole(picture, mask), (width, height), Image.Resampling.BOX)
        cells = np.asarray(hole).reshape(size.rows, height // size.rows, size.columns, width // size.columns)
        drawn = cells.max((1, 3)) > 0  # [rows, columns]
        if not drawn.any():
            found = "none, and an image without transparent pixels" if mask is None else "nothing that is to be drawn"
            expected = "some pixels that are transparent or, if none is, white"
            raise RequestError(field="mask", found=found, expected=expected)
    seen = np.asarray(picture)[np.asarray(picture)[..., 3] > 0][:, :3]
    ground = tuple(seen.mean(0).round().astype(int).tolist()) if len(seen) else (128, 128, 128)
    opaque = Image.alpha_composite(Image.new("RGBA", picture.size, (*ground, 255)), picture).convert("RGB")
    return Edit(np.array(ImageOps.fit(opaque, (width, height), Image.Resampling.LANCZOS)), drawn)


def nearest_size(manifest: Manifest, pixels: tuple[int, int]) -> str | None:
    """The name of the size nearest to a picture's, its shape first; None where a bundle draws one only."""

    def distance(size: Size) -> tuple[float, float]:
        wide, high = np.log(manifest.pixels(size)) - np.log(pixels)
        return round(abs(wide - high), 3), abs(wide + high)

    return min(manifest.sizes, key=distance).name if manifest.sizes else None


def _hole(picture: Image.Image, mask: ImageSource | None) -> Image.Image:
    marks = picture if mask is None else read_image("mask", mask)
    alpha = np.asarray(marks.getchannel("A"))
    transparent = mask is None or bool((alpha < 128).any())
    hole = alpha < 128 if transparent else np.asarray(marks.convert("L")) >= 128
    return Image.fromarray(hole.astype(np.uint8) * 255)
