"""Images and masks of edit requests: valid formats, rejected input, and the pixels of the result."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageCms
from refusals import catch_error

from lantern_rt import RequestError, open_bundle
from lantern_rt.bundle.files import Bundle
from lantern_rt.bundle.manifest import Manifest
from lantern_rt.requests import check_request
from lantern_rt.subjects.edited_image import ImageEdit, prepare_edit
from lantern_rt.subjects.image_files import read_image, read_image_size
from lantern_rt.text.tokenizers import load_bundle_tokenizer

IMAGE_SIDE = 256  # pixels
CELL_SIZE = 16  # pixels
COLOURS = np.random.default_rng(0).integers(0, 255, (IMAGE_SIDE, IMAGE_SIDE, 3)).astype(np.uint8)

_EXIF = Image.Exif()
_EXIF[0x112] = 6  # rotated by 90 degrees
ROTATED = _EXIF.tobytes()


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return open_bundle("scenes", verify=False)


@pytest.fixture(scope="module")
def manifest(bundle: Bundle) -> Manifest:
    return bundle.manifest


def encode_image(image: Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def make_edit(manifest: Manifest, image: Any, mask: Any = None, keep_rows: int | None = None) -> ImageEdit:
    return prepare_edit(manifest, manifest.size(), read_image("image", image), mask, keep_rows)


def make_decompression_bomb(side: int) -> bytes:
    head = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    data = b"IDAT" + zlib.compress(b"\0" * 1000)
    file = b"\x89PNG\r\n\x1a\n"
    for chunk in (head, data):
        file += struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return file


def test_an_image_is_read_with_the_rotation_that_viewers_show() -> None:
    small = Image.fromarray(COLOURS[:6, :4])
    rotated = read_image("image", encode_image(small, exif=ROTATED))
    np.testing.assert_array_equal(np.asarray(rotated)[..., :3], np.rot90(COLOURS[:6, :4], -1))
    pixels_16_bit = np.arange(0, 65536, 4096, dtype=np.uint16).reshape(4, 4)
    pixels = np.asarray(read_image("image", encode_image(Image.fromarray(pixels_16_bit))))
    np.testing.assert_array_equal(pixels[..., 0], pixels_16_bit >> 8)
    palette = small.quantize(8)
    palette_pixels = np.asarray(read_image("image", encode_image(palette, transparency=bytes([0] + [255] * 7))))
    np.testing.assert_array_equal(palette_pixels[..., :3], np.asarray(palette.convert("RGB")))
    np.testing.assert_array_equal(palette_pixels[..., 3] == 0, np.asarray(palette) == 0)
    for image in (small, np.asarray(small), encode_image(small), encode_image(small, "WEBP", lossless=True)):
        np.testing.assert_array_equal(np.asarray(read_image("image", image))[..., :3], COLOURS[:6, :4])


@pytest.mark.parametrize("file_format", ["PNG", "WEBP", "JPEG"])
@pytest.mark.parametrize(
    "block",
    [b"Exif\0\0garbage!", b"\0\x08\0\x02\x01\x12\0\x03\0\0\0\x01", ROTATED[:14], b"Exif\0\0" + ROTATED[6:8]],
    ids=["text", "no byte order", "cut in an entry", "cut in the header"],
)
def test_an_image_with_a_damaged_exif_block_is_upright(file_format: str, block: bytes) -> None:
    image = Image.fromarray(COLOURS[:6, :4])
    damaged = encode_image(image, file_format, exif=block)
    assert read_image_size(damaged) == (4, 6)
    plain = encode_image(image, file_format)
    np.testing.assert_array_equal(np.asarray(read_image("image", damaged)), np.asarray(read_image("image", plain)))


def test_masks_of_all_number_types_mark_the_same_cells(manifest: Manifest) -> None:
    marked = np.zeros((IMAGE_SIDE, IMAGE_SIDE), bool)
    marked[40:50, 100:130] = True
    types: list[tuple[Any, float]] = [(np.uint8, 1), (np.int64, 1), (np.float32, 1), (np.float64, 0.9)]
    types += [(np.int32, 255), (np.uint16, 255), (np.uint16, 65535)]
    masks: list[Any] = [marked.astype(number_type) * value for number_type, value in types]
    masks += [Image.fromarray(marked.astype(np.int32) * 255), Image.fromarray(marked.astype(np.float32))]
    expected = make_edit(manifest, COLOURS, marked).regenerated_cells
    for mask in masks:
        np.testing.assert_array_equal(make_edit(manifest, COLOURS, mask).regenerated_cells, expected)


@pytest.mark.parametrize("number_type", [np.int32, np.uint16, np.int64])
def test_arrays_of_wide_integers_and_floats_have_8_bit_colours(number_type: Any) -> None:
    np.testing.assert_array_equal(np.asarray(read_image("image", COLOURS.astype(number_type)))[..., :3], COLOURS)
    np.testing.assert_array_equal(np.asarray(read_image("image", COLOURS / 255))[..., :3], COLOURS)


@pytest.mark.parametrize("source", [np.full((4, 4), -1), np.full((4, 4), 1.5), np.full((4, 4), np.nan)])
def test_mask_values_out_of_range_are_rejected(source: Any) -> None:
    assert catch_error(RequestError, read_image, "mask", source).expected == "integers 0 .. 255, floats 0 .. 1, or bool"


def test_an_object_that_is_not_an_image_is_named_by_type() -> None:
    torch = pytest.importorskip("torch")
    for source, type_name in ((torch.zeros(4, 4), "Tensor"), (io.BytesIO(), "BytesIO"), ([[1]], "list")):
        for name in ("image", "mask"):
            error = catch_error(RequestError, read_image, name, source)
            assert (error.field, error.found) == (name, f"an object of type {type_name}")


def make_icc_profile(space: bytes, gamma: float, colours: dict[bytes, tuple[float, float, float]]) -> bytes:
    def encode_numbers(*values: float) -> bytes:
        return b"".join(struct.pack(">i", round(value * 65536)) for value in values)

    white = (0.9642, 1.0, 0.8249)
    curve = b"curv\0\0\0\0" + struct.pack(">IH", 1, round(gamma * 256)) + bytes(2)
    tags = {b"wtpt": b"XYZ \0\0\0\0" + encode_numbers(*white), (b"rTRC" if colours else b"kTRC"): curve}
    for name, coordinates in colours.items():
        tags |= {name + b"XYZ": b"XYZ \0\0\0\0" + encode_numbers(*coordinates), name + b"TRC": curve}
    tags |= {b"desc": b"desc\0\0\0\0" + struct.pack(">I", 2) + b"x\0" + bytes(80)}
    table = struct.pack(">I", len(tags))
    data = b""
    for name, tag in tags.items():
        table += name + struct.pack(">II", 132 + 12 * len(tags) + len(data), len(tag))
        data += tag
    head = struct.pack(">I4sI4s4s4s", 128 + len(table + data), bytes(4), 0x02400000, b"mntr", space, b"XYZ ")
    return (head + bytes(12) + b"acsp" + bytes(28) + encode_numbers(*white)).ljust(128, b"\0") + table + data


P3_COLOURS = {b"r": (0.51512, 0.2412, -0.00105), b"g": (0.29198, 0.69225, 0.04189), b"b": (0.1571, 0.06657, 0.78407)}
P3 = make_icc_profile(b"RGB ", 2.2, P3_COLOURS)
GREY = make_icc_profile(b"GRAY", 1.0, {})
SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def test_colours_are_converted_from_the_icc_profile() -> None:
    red = Image.new("RGBA", (4, 4), (240, 60, 40, 128))
    expected_colour = (255, 19, 0)
    for image, alpha in ((red, 128), (red.convert("RGB"), 255), (red.convert("RGB").quantize(8), 255)):
        read_back = read_image("image", encode_image(image, icc_profile=P3))
        assert np.abs(np.array(read_back.getpixel((0, 0))) - (*expected_colour, alpha)).max() <= 2
        read_again = read_image("image", read_back)
        assert read_again.getpixel((0, 0)) == read_back.getpixel((0, 0)), "the colour was converted twice"
    grey = read_image("image", encode_image(Image.new("L", (4, 4), 55), icc_profile=GREY))
    assert grey.getpixel((0, 0)) == (128, 128, 128, 255)


@pytest.mark.parametrize("profile", [SRGB, GREY, b"no profile", P3[:200]], ids=["sRGB", "grey", "text", "truncated"])
def test_srgb_and_unusable_icc_profiles_leave_colours_unchanged(profile: bytes) -> None:
    converted = read_image("image", encode_image(Image.fromarray(COLOURS), icc_profile=profile))
    np.testing.assert_array_equal(np.asarray(converted)[..., :3], COLOURS)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (encode_image(Image.fromarray(COLOURS))[:20_000], "truncated"),
        (b"no image", "cannot identify"),
        (encode_image(Image.fromarray(COLOURS), "GIF"), "cannot identify"),
        (make_decompression_bomb(5000), "5,000 x 5,000 pixels"),
        (make_decompression_bomb(60_000), "exceeds limit"),
        (Path("/dev/zero"), "a pipe or a device"),
        (np.zeros((4, 4, 7)), "Cannot handle"),
    ],
    ids=["truncated", "text", "gif", "large", "bomb", "device", "array"],
)
def test_a_damaged_unsupported_or_too_large_image_is_rejected(source: Any, message: str) -> None:
    error = catch_error(RequestError, read_image, "image", source)
    assert error.field == (str(source) if isinstance(source, Path) else "image")
    assert message in str(error)


def test_every_form_of_a_mask_regenerates_the_touched_cells(manifest: Manifest) -> None:
    marked = np.zeros((IMAGE_SIDE, IMAGE_SIDE), bool)
    marked[40:50, 100:130] = True  # touches rows 2 .. 3 and columns 6 .. 8 of the grid
    expected = np.zeros((16, 16), bool)
    expected[2:4, 6:9] = True
    transparent = np.dstack([COLOURS, np.where(marked, 0, 255).astype(np.uint8)])
    white = encode_image(Image.fromarray(np.where(marked, 255, 0).astype(np.uint8)))
    for image, mask in (
        (COLOURS, marked),
        (COLOURS, white),
        (COLOURS, transparent),
        (transparent, None),
    ):
        np.testing.assert_array_equal(make_edit(manifest, image, mask).regenerated_cells, expected)
    double = Image.fromarray(COLOURS).resize((2 * IMAGE_SIDE + 64, 2 * IMAGE_SIDE), Image.Resampling.NEAREST)
    scaled_edit = make_edit(manifest, double, np.ones((2 * IMAGE_SIDE, 2 * IMAGE_SIDE + 64), bool))
    assert scaled_edit.regenerated_cells.all()
    assert scaled_edit.pixels.shape == COLOURS.shape, "the image is not scaled and cropped to its middle"
    assert make_edit(manifest, COLOURS, keep_rows=5).regenerated_cells.any(1).tolist() == [False] * 5 + [True] * 11


def get_request_error(bundle: Bundle, options: dict[str, Any]) -> RequestError:
    request = {"prompts": "a red cube", **options}
    return catch_error(RequestError, check_request, bundle.manifest, load_bundle_tokenizer(bundle), request)


def test_edit_options_that_contradict_each_other_are_rejected(bundle: Bundle) -> None:
    wrong_options: list[dict[str, Any]] = [{"keep_rows": rows, "image": COLOURS} for rows in (0, 16)]
    wrong_options += [{"mask": COLOURS}, {"keep_rows": 3}]
    for options in wrong_options:
        assert get_request_error(bundle, options).field == next(iter(options))


def test_sizes_and_prompts_are_checked_before_pixels(bundle: Bundle) -> None:
    damaged = encode_image(Image.fromarray(COLOURS))[:20_000]
    rotated = encode_image(Image.fromarray(COLOURS[:4, :6]), exif=ROTATED)  # upright: 4 pixels wide, 6 pixels high
    with_long_class_id = Image.fromarray(COLOURS)
    with_long_class_id.info["class_id"] = "9" * 5000
    wrong_options: list[tuple[dict[str, Any], str, str]] = [
        ({"image": damaged, "mask": COLOURS[:9]}, "mask", "256 x 9 pixels"),
        ({"image": rotated, "mask": damaged}, "mask", "256 x 256 pixels, expected 4 x 6"),
        ({"image": damaged, "prompts": "a magic cube"}, "prompt", "magic"),
        ({"image": damaged, "num_images": 0}, "num_images", "0"),
        ({"image": damaged, "keep_rows": 3}, "image", "truncated"),
        ({"image": with_long_class_id, "prompts": None}, "prompts", "nothing to generate"),
    ]
    for options, field, message in wrong_options:
        error = get_request_error(bundle, options)
        assert (error.field, message in str(error)) == (field, True), str(error)


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP"])
def test_large_images_and_masks_are_read_at_half_size(manifest: Manifest, file_format: str) -> None:
    side = 2561  # more than four million pixels, and odd
    marked = np.zeros((side, side), np.uint8)
    marked[side // 2 + 8 :] = 255
    large = Image.fromarray(np.where(marked, 200, 50).astype(np.uint8)).convert("RGB")
    source = encode_image(large, file_format, quality=90)
    assert read_image("image", source).size == (1281, 1281)
    edit = make_edit(manifest, source, encode_image(Image.fromarray(marked)))
    assert edit.regenerated_cells.any(1).tolist() == [False] * 8 + [True] * 8
    assert (abs(edit.pixels[:126].astype(int) - 50) < 4).all()
    assert (abs(edit.pixels[130:].astype(int) - 200) < 4).all()
    palette = large.quantize(2)
    assert set(np.asarray(read_image("image", encode_image(palette)).convert("L")).flat) >= {50, 200}
    opened = Image.open(io.BytesIO(source))
    read_image("image", opened)
    assert opened.size == (side, side), "the caller's image was changed"


def test_an_edit_changes_pixels_only_next_to_regenerated_cells(manifest: Manifest) -> None:
    marked: NDArray[np.bool_] = np.zeros((IMAGE_SIDE, IMAGE_SIDE), bool)
    marked[96:128, 96:128] = True
    red = Image.new("RGB", (IMAGE_SIDE, IMAGE_SIDE), (255, 0, 0))
    blended = np.asarray(make_edit(manifest, COLOURS, marked).finish_image(red))
    assert (blended[marked] == (255, 0, 0)).all()
    near_cells = slice(96 - CELL_SIZE + 1, 128 + CELL_SIZE - 1)
    outside = np.ones_like(marked)
    outside[near_cells, near_cells] = False
    np.testing.assert_array_equal(blended[outside], COLOURS[outside])
