"""Images that a request contains, as files, arrays or Pillow images, and their conversion to upright sRGB.

Image files may come from an attacker. Size limits are therefore checked before pixels are decoded.
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageChops, ImageCms, ImageOps

from ..errors import RequestError
from ..inputs import convert_read_errors, read_regular_file, reraise_error_of_signal_handler
from ..options import ImageSource
from ..runtime.engine import Floats

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


def read_image(name: str, source: ImageSource, header_only: bool = False) -> Image.Image:
    """Read an upright RGBA image in sRGB, a large one at half its size. `name`: a parameter, for errors."""
    place = str(source) if isinstance(source, str | Path) else name  # for error messages
    with (
        convert_read_errors(Path(place), "a PNG, JPEG or WebP file", RequestError, "give another image"),
        warnings.catch_warnings(action="ignore"),
    ):
        image = _open_image(name, source)
        if image.width * image.height > PIXELS_LIMIT:
            actual = f"{image.width:,} x {image.height:,} pixels"
            expected = f"at most {PIXELS_LIMIT:,} pixels"
            raise RequestError(field=place, found=actual, expected=expected, remedy="make it smaller")
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


def _open_image(name: str, source: ImageSource) -> Image.Image:
    match source:
        case Image.Image() if source.mode not in ("I", "F"):
            return source
        case Image.Image() | np.ndarray():
            return _convert_array_to_image(name, np.asarray(source))
        case bytes():
            return Image.open(BytesIO(source), formats=("PNG", "JPEG", "WEBP"))
        case str() | Path():
            data = read_regular_file(Path(source), BYTES_LIMIT)
            return Image.open(BytesIO(data), formats=("PNG", "JPEG", "WEBP"))
    expected = "a Pillow image, a NumPy array, a path, or the bytes of a file"
    raise RequestError(field=name, found=f"an object of type {type(source).__name__}", expected=expected)


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
