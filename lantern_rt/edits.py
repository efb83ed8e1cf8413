"""Image editing: selection of the cells to generate again, and blending of old and new pixels.

Image files may come from an attacker. Size limits are therefore checked before pixels are decoded.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping
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
from .inputs import check_int, convert_read_errors, read_regular_file, reraise_error_of_signal_handler
from .options import ImageSource
from .runtime.engine import Bools, Floats, Ints

BYTES_LIMIT = 1 << 23  # maximum size of an image file
PIXELS_LIMIT = 1 << 24  # maximum number of pixels of an image
ROUNDING = 2  # difference of 8-bit values up to which a colour profile counts as sRGB
_UPRIGHT = {  # how an image is turned upright, by the orientation in its EXIF block
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
HALVED_PIXELS = 1 << 22  # number of pixels above which an image is read at half its width and height


@dataclass(eq=False)
class ImageEdit:
    """Image to edit, with the choice of the cells to generate again. The tokens of all other cells are preserved."""

    pixels: NDArray[np.uint8]  # original image in sRGB, [height, width, 3]
    regenerated_cells: Bools  # cells to generate again, [rows, columns]
    preserved_codes: Ints | None = field(init=False, default=None)  # -1 in regenerated cells, [cells]; see `encode`

    def encode(self, encoder: Callable[[Floats], Ints]) -> Ints:
        """Compute and return `preserved_codes`, or return the result of the first call.

        Args:
            encoder: converts pixels in -1 .. 1, float32 `[1, 3, height, width]`, to tokens, int64 `[1, cells]`.
        """
        if self.preserved_codes is None:
            codes = encoder(convert_to_encoder_input(self.pixels))[0]
            self.preserved_codes = np.where(self.regenerated_cells.ravel(), -1, codes)
        return self.preserved_codes

    def insert_source_codes(self, inputs: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        """Return the inputs of the condition graph, which do not depend on the image."""
        return inputs

    def blend_with_original(self, image: Image.Image) -> Image.Image:
        """Blend a generated image of the same size into the original image.

        The image decoder also changes pixels around a regenerated cell, so a sharp edge would be visible. The weight of
        the new image therefore falls to 0 over the width of a cell.
        """
        height, width, _ = self.pixels.shape
        cell = height // len(self.regenerated_cells)
        # `grown` begins with the pixels of regenerated cells, and grows by one pixel per iteration.
        grown = self.regenerated_cells.repeat(cell, 0).repeat(width // self.regenerated_cells.shape[1], 1)
        # number of iterations in which `grown` contains each pixel: `cell` in regenerated cells, 0 a cell away
        weight = np.zeros((height, width), np.float32)
        for _ in range(cell):
            weight += grown
            wider = grown.copy()
            for target, source in ((np.s_[1:], np.s_[:-1]), (np.s_[:-1], np.s_[1:])):
                wider[target] |= grown[source]
                wider[:, target] |= grown[:, source]
            grown = wider
        # weight / cell is 1 in regenerated cells, and 0 where the original image remains.
        mixed = self.pixels + (weight / cell)[..., None] * (np.asarray(image, np.float32) - self.pixels)
        return Image.fromarray(np.rint(mixed).astype(np.uint8))

    @property
    def digest(self) -> str:
        """SHA-256 hash of the pixels and of the regenerated cells, in hexadecimal."""
        return hashlib.sha256(self.pixels.tobytes() + self.regenerated_cells.tobytes()).hexdigest()


def convert_to_encoder_input(pixels: NDArray[np.uint8]) -> Floats:
    """Convert pixels, uint8 `[height, width, 3]`, to -1 .. 1, float32 `[1, 3, height, width]`."""
    scaled: Floats = np.moveaxis(pixels, 2, 0)[None].astype(np.float32) / np.float32(127.5) - 1
    return scaled


def crop_to_cover(original: Image.Image, size_in_pixels: tuple[int, int]) -> Image.Image:
    """Scale an RGBA image to cover a size, and crop its centre; the result is RGB."""
    visible = np.asarray(original)[np.asarray(original)[..., 3] > 0][:, :3]
    # The mean colour of the visible pixels disturbs neighbouring cells less than black would.
    background = tuple(visible.mean(0).round().astype(int).tolist()) if len(visible) else (128, 128, 128)
    opaque = Image.alpha_composite(Image.new("RGBA", original.size, (*background, 255)), original).convert("RGB")
    return ImageOps.fit(opaque, size_in_pixels, Image.Resampling.LANCZOS)


def read_image(name: str, source: ImageSource, header_only: bool = False) -> Image.Image:
    """Read an image, rotate it upright and convert it to RGBA in sRGB. A large image is read at half its size.

    Args:
        name: name of the request's parameter, for error messages.
        header_only: whether to return the opened image at once, not decoded, rotated or converted.
    """
    if not isinstance(source, Image.Image | np.ndarray | str | Path | bytes):
        expected = "a Pillow image, a NumPy array, a path, or the bytes of a file"
        raise RequestError(field=name, found=f"an object of type {type(source).__name__}", expected=expected)
    path = Path(source) if isinstance(source, str | Path) else Path(name)  # for error messages
    expected = "a PNG, JPEG or WebP file"
    with (
        convert_read_errors(path, expected, RequestError, "give another image"),
        warnings.catch_warnings(action="ignore"),
    ):
        if isinstance(source, np.ndarray) or (isinstance(source, Image.Image) and source.mode in ("I", "F")):
            image = _convert_array_to_image(name, np.asarray(source))
        elif isinstance(source, Image.Image):
            image = source
        else:
            data = source if isinstance(source, bytes) else read_regular_file(path, BYTES_LIMIT)
            image = Image.open(BytesIO(data), formats=("PNG", "JPEG", "WEBP"))
        if image.width * image.height > PIXELS_LIMIT:
            actual = f"{image.width:,} x {image.height:,} pixels"
            expected = f"at most {PIXELS_LIMIT:,} pixels"
            raise RequestError(field=str(path), found=actual, expected=expected, remedy="make it smaller")
        if header_only:
            return image
        # Bundles generate smaller images, and a halved image takes a quarter of the time and memory.
        factor = 2 if image.width * image.height > HALVED_PIXELS else 1
        if factor == 2 and image is not source and image.draft(None, (image.width // 2, image.height // 2)):
            factor = 1  # the JPEG decoder already halves the image
        image.load()  # an EXIF block may come after the pixels
        orientation = _read_orientation(image)
        if orientation in _UPRIGHT:
            image = image.transpose(_UPRIGHT[orientation])
        if image.mode.startswith("I"):  # 16-bit values, which Pillow would clip to 255
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        if factor > 1 and (image.mode not in ("L", "LA", "RGB", "RGBA", "CMYK") or "transparency" in image.info):
            image = image.convert("RGBA")  # palette indices cannot be averaged
        return _convert_to_srgb(image.reduce(factor))


def read_image_size(image: ImageSource, mask: ImageSource | None = None) -> tuple[int, int]:
    """Return width and height of an upright image, from its header, after comparing them with the mask's."""
    sources = {"image": image} if mask is None else {"image": image, "mask": mask}
    sizes = []
    for name, source in sources.items():
        header = read_image(name, source, header_only=True)
        rotated = _read_orientation(header) in range(5, 9)  # by 90 or 270 degrees
        if 0 in header.size:
            raise RequestError(field=name, found="no pixels", expected="an image")
        sizes.append(header.size[::-1] if rotated else header.size)
    if sizes[-1] != sizes[0]:
        expected, actual = (f"{width} x {height} pixels" for width, height in sizes)
        raise RequestError(field="mask", found=actual, expected=f"{expected}, the size of the image")
    return sizes[0]


def _read_orientation(image: Image.Image) -> int:
    """Return the orientation in an image's EXIF block; 1, upright, without such a block or if the block is damaged."""
    try:
        # The method of the base class reads the header only. `getexif` of PNG images would decode all pixels.
        return int(Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1))
    except Exception as error:  # Pillow raises any exception for a damaged block, which image viewers ignore
        reraise_error_of_signal_handler(error)
        return 1


def _convert_array_to_image(parameter_name: str, array: NDArray[Any]) -> Image.Image:
    """Convert an array to an 8-bit image: bool, floats 0 .. 1, integers 0 .. 255 or 0 .. 65535.

    A `mask` may also be an integer array of 0 and 1.
    """
    low = array.min(initial=0)  # `initial` also makes an empty array valid
    high = array.max(initial=0)
    has_unit_range = array.dtype.kind in "bf" or (parameter_name == "mask" and high <= 1)
    if array.dtype == np.uint8 and not has_unit_range:
        return Image.fromarray(array)
    limit = 1 if has_unit_range else 255 if high <= 255 else 65535
    if not 0 <= low <= high <= limit:
        actual = f"{array.dtype} from {low:g} to {high:g}"
        raise RequestError(field=parameter_name, found=actual, expected="integers 0 .. 255, floats 0 .. 1, or bool")
    return Image.fromarray(np.rint(array * (255 / limit)).astype(np.uint8))


def _convert_to_srgb(image: Image.Image) -> Image.Image:
    plain = image.convert("RGBA")
    profile = plain.info.pop("icc_profile", b"")
    # ImageCms reads neither palettes nor an alpha channel.
    colours = image.convert({"P": "RGB", "PA": "RGB", "LA": "L"}.get(image.mode, image.mode))
    with suppress(OSError, ImageCms.PyCMSError):  # no profile, or an invalid profile: image viewers ignore it, too
        source = ImageCms.ImageCmsProfile(BytesIO(profile))
        converted = ImageCms.profileToProfile(colours, source, ImageCms.createProfile("sRGB"), outputMode="RGB")
        assert converted is not None
        difference = ImageChops.difference(converted, plain.convert("RGB"))
        if np.asarray(difference).max() > ROUNDING:  # otherwise the image is in sRGB already
            converted.putalpha(plain.getchannel("A"))
            converted.info = plain.info
            return converted
    return plain


def prepare_edit(
    manifest: Manifest,
    size: Size,
    original: Image.Image,
    mask: ImageSource | None = None,
    keep_rows: int | None = None,
) -> ImageEdit:
    """Scale an image from `read_image` to cover a size, crop its centre, and select the cells to generate again.

    Mask and `keep_rows` are as `Options` describes. If the mask selects no cell, RequestError is raised.
    """
    check_supports_edits(manifest)
    width, height = manifest.size_in_pixels(size)
    if keep_rows is not None:
        if mask is not None:
            raise RequestError("given together with keep_rows", field="mask", remedy="give one of them")
        num_rows = check_int("keep_rows", keep_rows, 0, 1, size.rows - 1)
        regenerated_cells = np.repeat(np.arange(size.rows)[:, None] >= num_rows, size.columns, 1)
    else:
        selected = ImageOps.fit(_read_mask(original, mask), (width, height), Image.Resampling.BOX)
        # [rows, pixels per cell, columns, pixels per cell]
        cells = np.asarray(selected).reshape(size.rows, height // size.rows, size.columns, width // size.columns)
        # A cell is generated again if the mask selects any of its pixels. [rows, columns]
        regenerated_cells = cells.max((1, 3)) > 0
        if not regenerated_cells.any():
            actual = "no mask, and an image without transparent pixels" if mask is None else "no pixels to generate"
            expected = "some transparent pixels or, if there are none, some white pixels"
            raise RequestError(field="mask", found=actual, expected=expected)
    return ImageEdit(np.array(crop_to_cover(original, (width, height))), regenerated_cells)


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
    """Find the image size of a bundle that is nearest to a width and height: by aspect ratio, then by area.

    The result is its name; None if the bundle has a single image size.
    """

    def measure_size_difference(size: Size) -> tuple[float, float]:
        # Differences of logarithms compare ratios, so twice and half the size are equally far.
        log_width, log_height = np.log(manifest.size_in_pixels(size)) - np.log(size_in_pixels)
        return round(abs(log_width - log_height), 3), abs(log_width + log_height)

    return min(manifest.sizes, key=measure_size_difference).name if manifest.sizes else None


def _read_mask(original: Image.Image, mask: ImageSource | None) -> Image.Image:
    """Return an image that is white on the pixels to generate again."""
    marks = original if mask is None else read_image("mask", mask)
    alpha = np.asarray(marks.getchannel("A"))
    transparent = mask is None or bool((alpha < 128).any())
    selected = alpha < 128 if transparent else np.asarray(marks.convert("L")) >= 128
    return Image.fromarray(selected.astype(np.uint8) * 255)
