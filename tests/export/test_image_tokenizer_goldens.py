"""Image tokenizers: codes to pixels and back, compared with arrays recorded from the published programs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import DATA, Arrays, assert_close, load_golden
from numpy.typing import NDArray

from lantern_rt.export.compare import GraphFileSession
from lantern_rt.output.images import convert_pixels_to_image


@dataclass(frozen=True)
class TokenizerGolden:
    """Recorded arrays of an image tokenizer.

    Attributes:
        bundle: name of the fixture that exports a bundle.
        prefixes: of the names of arrays; each has its own codes.
        level: added to decoded pixels; the published program of Emu3.5 truncates pixels and the product rounds, so the
            graph's pixels are smaller by half a level of 255.
        unit: whether recorded pixels are cut off to 0 .. 1 instead of the graph's -1 .. 1.
        equal_bytes: share of bytes that must be equal; others may differ by 1.
    """

    folder: str
    bundle: str
    prefixes: tuple[str, ...] = ("vq_",)
    level: float = 0
    equal_bytes: float = 0
    unit: bool = False


GOLDENS = [
    TokenizerGolden("llamagen-vq", "c2i_bundle", prefixes=("",)),
    TokenizerGolden("chameleon-vqgan", "anole_bundle", prefixes=("",)),
    TokenizerGolden("janus-deepseek", "janus_bundle"),
    TokenizerGolden("emu3", "emu3_bundle"),
    TokenizerGolden("emu3.5", "emu35_bundle", level=1 / 255, equal_bytes=0.998),
    TokenizerGolden("lumina-mgpt-2", "lumina2_bundle"),
    TokenizerGolden("gear-t2i", "gear_bundle"),
    TokenizerGolden("rar", "rar_bundle", level=1 / 255, unit=True),
    TokenizerGolden("simplear", "simplear_bundle", ("vq0_", "vq1_")),
]


@pytest.fixture(scope="module", params=GOLDENS, ids=lambda golden: golden.folder)
def golden(request: pytest.FixtureRequest) -> TokenizerGolden:
    param: TokenizerGolden = request.param
    return param


@pytest.fixture(scope="module")
def bundle(golden: TokenizerGolden, request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(golden.bundle)
    return path


@pytest.fixture(scope="module")
def arrays(golden: TokenizerGolden) -> Arrays:
    return load_golden(golden.folder)


def decode(golden: TokenizerGolden, bundle: Path, codes: NDArray[np.int64]) -> NDArray[np.float32]:
    images: NDArray[np.float32] = GraphFileSession(bundle / "vq_decoder.onnx").run({"codes": codes})["images"]
    images = images + np.float32(golden.level)
    return np.clip((images + 1) / 2, 0, 1) if golden.unit else images


def assert_recorded(values: NDArray[Any], expected: NDArray[Any]) -> None:
    """Compare values with an array, which may lack the axis of images."""
    assert_close(values.reshape(expected.shape), expected)


def assert_bytes(golden: TokenizerGolden, pixels: NDArray[np.float32], expected: NDArray[np.uint8]) -> None:
    levels = np.asarray(convert_pixels_to_image(pixels - np.float32(golden.level))).astype(int)
    assert np.abs(levels - expected).max() <= 1
    assert (levels == expected).mean() > golden.equal_bytes


def test_codes_decode_to_the_recorded_images(golden: TokenizerGolden, bundle: Path, arrays: Arrays) -> None:
    for prefix in golden.prefixes:
        has_images = arrays[f"{prefix}decoded"].ndim == 4
        codes = arrays[f"{prefix}codes"] if has_images else arrays[f"{prefix}codes"][None]
        images = decode(golden, bundle, codes)
        assert_recorded(images, arrays[f"{prefix}decoded"])
        if f"{prefix}uint8" in arrays:
            assert_bytes(golden, images[0], arrays[f"{prefix}uint8"])
        for image, expected in zip(images, arrays.get(f"{prefix}decoded_uint8", []), strict=False):
            assert_bytes(golden, image, expected)


def test_images_encode_to_the_recorded_codes(golden: TokenizerGolden, bundle: Path, arrays: Arrays) -> None:
    prefix = golden.prefixes[0].replace("0", "")
    if f"{prefix}image_uint8" in arrays:
        images = (arrays[f"{prefix}image_uint8"] / 127.5 - 1).astype(np.float32).transpose(2, 0, 1)[None]
    else:
        images = arrays[f"{prefix}image"]
    outputs = GraphFileSession(bundle / "vq_encoder.onnx").run({"images": images})
    assert_recorded(outputs["pre_quant"], arrays[f"{prefix}pre_quant"])
    encoded = arrays[f"{prefix}encoded" if prefix else "encoded_codes"]
    np.testing.assert_array_equal(outputs["codes"].reshape(encoded.shape), encoded)
    if f"{prefix}reconstruction" in arrays:
        # Decoders of one size take `[images, cells]`, others `[images, rows, columns]`.
        codes = encoded if golden.folder == "llamagen-vq" else encoded.reshape(1, *encoded.shape[-2:])
        assert_recorded(decode(golden, bundle, codes), arrays[f"{prefix}reconstruction"])


def test_codes_of_recorded_runs_decode_to_the_recorded_images(
    golden: TokenizerGolden, bundle: Path, arrays: Arrays
) -> None:
    path = DATA / golden.folder / "traces.json"
    traces = json.loads(path.read_text()) if path.is_file() else []
    for trace in [trace for trace in traces if "codes" in trace and f"{trace.get('name')}_uint8" in arrays]:
        (image,) = decode(golden, bundle, np.array([trace["codes"]]))
        assert_bytes(golden, image, arrays[f"{trace['name']}_uint8"])
        if f"{trace['name']}_pixels" in arrays:
            assert_close(image, arrays[f"{trace['name']}_pixels"])
