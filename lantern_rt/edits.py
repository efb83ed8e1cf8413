"""Image editing: which cells are preserved, which are generated again, and how old and new pixels are blended.

The image files may be hostile. Limits are checked first, and any exception of a library becomes a `RequestError`.
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
from .inputs import check_int, convert_read_errors, read_regular_file
from .options import ImageSource
from .runtime.engine import Bools, Floats, Ints

BYTES_LIMIT = 1 << 23  # maximum size of an image file
PIXELS_LIMIT = 1 << 24  # maximum number of pixels of an image
ROUNDING = 2  # levels of 255 by which two conversions to sRGB may differ
HALVED_PIXELS = 1 << 22  # larger images are read at half their width and height


@dataclass(eq=False)
class ImageEdit:
    """An image and the cells of it to generate again; the tokens of all other cells are preserved.

    Attributes:
        pixels: uint8 `[height, width, 3]`.
        regenerated_cells: cells to generate again, bool `[rows, columns]`.
        preserved_codes: tokens of preserved cells, -1 in the others, int64 `[cells]`; None before `encode`.
    """

    pixels: NDArray[np.uint8]
    regenerated_cells: Bools
    preserved_codes: Ints | None = field(init=False, default=None)

    def encode(self, encoder: Callable[[Floats], Ints]) -> Ints:
        """Encode the image once and return `preserved_codes`.

        Args:
            encoder: image encoder, from float32 `[1, 3, height, width]` in -1 .. 1 to int64 `[1, cells]`.
        """
        if self.preserved_codes is None:
            codes = encoder(to_encoder_input(self.pixels))[0]
            self.preserved_codes = np.where(self.regenerated_cells.ravel(), -1, codes)
        return self.preserved_codes

    def complete_inputs(self, inputs: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        """Return the inputs of the condition graph, which do not depend on the image."""
        return inputs

    def blend_with_original(self, image: Image.Image) -> Image.Image:
        """Blend the edit into the original.

        Regenerated cells show the new image. Outside, the weight of the new image falls to 0 over the width of a cell.
        A token also changes pixels around its cell, so that a sharp edge would be visible.
        """
        height, width, _ = self.pixels.shape
        cell = height // len(self.regenerated_cells)
        grown = self.regenerated_cells.repeat(cell, 0).repeat(width // self.regenerated_cells.shape[1], 1)
        weight = np.zeros((height, width), np.float32)
        for _ in range(cell):
            weight += grown
            wider = grown.copy()
            for target, source in ((np.s_[1:], np.s_[:-1]), (np.s_[:-1], np.s_[1:])):
                wider[target] |= grown[source]
                wider[:, target] |= grown[:, source]
            grown = wider
        mixed = self.pixels + (weight / cell)[..., None] * (np.asarray(image, np.float32) - self.pixels)
        return Image.fromarray(np.rint(mixed).astype(np.uint8))

    @property
    def digest(self) -> str:
        """SHA-256 hash of the pixels and of the regenerated cells, in hexadecimal."""
        return hashlib.sha256(self.pixels.tobytes() + self.regenerated_cells.tobytes()).hexdigest()


def to_encoder_input(pixels: NDArray[np.uint8]) -> Floats:
    """Return pixels `[height, width, 3]` as the input of an image encoder, float32 `[1, 3, height, width]`."""
    scaled: Floats = np.moveaxis(pixels, 2, 0)[None].astype(np.float32) / np.float32(127.5) - 1
    return scaled


def crop_to_cover(original: Image.Image, size_in_pixels: tuple[int, int]) -> Image.Image:
    """Scale an image to cover width and height in pixels, crop its centre, and fill transparent pixels."""
    visible = np.asarray(original)[np.asarray(original)[..., 3] > 0][:, :3]
    background = tuple(visible.mean(0).round().astype(int).tolist()) if len(visible) else (128, 128, 128)
    opaque = Image.alpha_composite(Image.new("RGBA", original.size, (*background, 255)), original).convert("RGB")
    return ImageOps.fit(opaque, size_in_pixels, Image.Resampling.LANCZOS)


def read_image(name: str, source: ImageSource, header_only: bool = False) -> Image.Image:
    """Read an image as upright sRGB with alpha, with the `info` of its file; read a large image at half its size.

    Args:
        name: name of the request's parameter, for error messages.
        source: Pillow image, array, path of a file, or bytes of a file.
        header_only: whether to return the image before decoding pixels, rotation and conversion.

    Returns:
        A Pillow image of mode RGBA.

    Raises:
        RequestError: the image cannot be read, or is too large.
    """
    if not isinstance(source, Image.Image | np.ndarray | str | Path | bytes):
        expected = "a Pillow image, a NumPy array, a path, or the bytes of a file"
        raise RequestError(field=name, found=f"an object of type {type(source).__name__}", expected=expected)
    path = Path(source) if isinstance(source, str | Path) else Path(name)
    expected = "a PNG, JPEG or WebP file"
    with (
        convert_read_errors(path, expected, RequestError, "give another image"),
        warnings.catch_warnings(action="ignore"),
    ):
        if isinstance(source, np.ndarray) or (isinstance(source, Image.Image) and source.mode in ("I", "F")):
            image = _image_from_array(name, np.asarray(source))
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
        factor = 2 if image.width * image.height > HALVED_PIXELS else 1
        if factor == 2 and image is not source and image.draft(None, (image.width // 2, image.height // 2)):
            factor = 1  # the JPEG decoder already halves the image
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I"):  # 16-bit values, which Pillow would clip to 255
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        if factor > 1 and (image.mode not in ("L", "LA", "RGB", "RGBA", "CMYK") or "transparency" in image.info):
            image = image.convert("RGBA")  # palette indices cannot be averaged
        return _to_srgb(image.reduce(factor))


def read_image_size(image: ImageSource, mask: ImageSource | None = None) -> tuple[int, int]:
    """Read the size of an image from its header, after the rotation by its EXIF orientation.

    Args:
        mask: mask, which must have the same size; None: no mask.

    Returns:
        Width and height in pixels.

    Raises:
        RequestError: a file cannot be read, or the mask has another size.
    """
    sources = {"image": image} if mask is None else {"image": image, "mask": mask}
    sizes = []
    for name, source in sources.items():
        header = read_image(name, source, header_only=True)
        with convert_read_errors(Path(name), "an orientation", RequestError, "give another image"):
            # The `getexif` of PNG images would decode all pixels.
            rotated = Image.Image.getexif(header).get(ExifTags.Base.Orientation) in range(5, 9)
        if 0 in header.size:
            raise RequestError(field=name, found="no pixels", expected="an image")
        sizes.append(header.size[::-1] if rotated else header.size)
    if sizes[-1] != sizes[0]:
        expected, actual = (f"{width} x {height} pixels" for width, height in sizes)
        raise RequestError(field="mask", found=actual, expected=f"{expected}, as the image has")
    return sizes[0]


def _image_from_array(parameter_name: str, array: NDArray[Any]) -> Image.Image:
    """Convert an array to an 8-bit image: bool, floats 0 .. 1, integers of 8 or 16 bits; a mask may be 0 and 1."""
    low = array.min(initial=0)
    high = array.max(initial=0)
    binary = array.dtype.kind in "bf" or (parameter_name == "mask" and high <= 1)
    if array.dtype == np.uint8 and not binary:
        return Image.fromarray(array)
    limit = 1 if binary else 255 if high <= 255 else 65535
    if not 0 <= low <= high <= limit:
        actual = f"{array.dtype} from {low:g} to {high:g}"
        raise RequestError(field=parameter_name, found=actual, expected="integers 0 .. 255, floats 0 .. 1, or bool")
    return Image.fromarray(np.rint(array * (255 / limit)).astype(np.uint8))


def _to_srgb(image: Image.Image) -> Image.Image:
    """Convert an image to sRGB with alpha by the colour profile in its file, if the profile is valid."""
    plain = image.convert("RGBA")
    profile = plain.info.pop("icc_profile", b"")
    colours = image.convert({"P": "RGB", "PA": "RGB", "LA": "L"}.get(image.mode, image.mode))
    with suppress(OSError, ImageCms.PyCMSError):  # no profile, or an invalid profile, which viewers ignore, too
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
    """Prepare an edit: scale the image to cover the size, crop its centre, and select the cells to generate again.

    Args:
        size: size of the images to generate.
        original: image from `read_image`.
        mask: image of the same size. Cells are generated again where it is transparent or, if it has no transparent
            pixel, white. None: where the image is transparent.
        keep_rows: number of grid rows at the top to preserve, in place of a mask.

    Raises:
        RequestError: the bundle cannot edit, or the mask selects no cell.
    """
    check_supports_edits(manifest)
    width, height = manifest.size_in_pixels(size)
    if keep_rows is not None:
        if mask is not None:
            raise RequestError("given with keep_rows", field="mask", remedy="give one of them")
        num_rows = check_int("keep_rows", keep_rows, 0, 1, size.rows - 1)
        regenerated_cells = np.repeat(np.arange(size.rows)[:, None] >= num_rows, size.columns, 1)
    else:
        hole = ImageOps.fit(_read_mask(original, mask), (width, height), Image.Resampling.BOX)
        cells = np.asarray(hole).reshape(size.rows, height // size.rows, size.columns, width // size.columns)
        regenerated_cells = cells.max((1, 3)) > 0  # [rows, columns]
        if not regenerated_cells.any():
            actual = "no mask, and an image without transparent pixels" if mask is None else "no pixels to generate"
            expected = "some transparent pixels or, if there are none, some white pixels"
            raise RequestError(field="mask", found=actual, expected=expected)
    return ImageEdit(np.array(crop_to_cover(original, (width, height))), regenerated_cells)


def check_supports_edits(manifest: Manifest) -> None:
    """Raise RequestError if the bundle cannot regenerate a part of an image.

    It cannot if it has no image encoder, or one whose codes only serve as the source of image to image.
    """
    if manifest.source is not None:
        problem = f"bundle {manifest.name} generates whole images from an image, and no part of it"
        raise RequestError(problem, field="image", remedy="give it to `lantern-rt run --image`, without a mask")
    if not manifest.can_edit_images:
        problem = f"bundle {manifest.name} has no image encoder"
        remedy = "export it again from its checkpoint, with this version" if manifest.makes_images else ""
        raise RequestError(problem, field="image", remedy=remedy)


def find_nearest_size(manifest: Manifest, size_in_pixels: tuple[int, int]) -> str | None:
    """Return the name of the size nearest to an image's: by aspect ratio, then by area.

    Args:
        size_in_pixels: width and height of the image.

    Returns:
        The name; None if the bundle has a single size.
    """

    def compute_size_distance(size: Size) -> tuple[float, float]:
        log_width, log_height = np.log(manifest.size_in_pixels(size)) - np.log(size_in_pixels)
        return round(abs(log_width - log_height), 3), abs(log_width + log_height)

    return min(manifest.sizes, key=compute_size_distance).name if manifest.sizes else None


def _read_mask(original: Image.Image, mask: ImageSource | None) -> Image.Image:
    marks = original if mask is None else read_image("mask", mask)
    alpha = np.asarray(marks.getchannel("A"))
    transparent = mask is None or bool((alpha < 128).any())
    hole = alpha < 128 if transparent else np.asarray(marks.convert("L")) >= 128
    return Image.fromarray(hole.astype(np.uint8) * 255)
