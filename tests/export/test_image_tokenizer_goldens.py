"""Image tokenizers: codes to pixels and back, compared with every array recorded from the published programs."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from goldens import DATA, Arrays, assert_close, compute_graph_values, load_golden
from numpy.typing import NDArray

from lantern_rt.export.compare import GraphFileSession
from lantern_rt.output.images import convert_pixels_to_image

Value = tuple[str, str]  # "in" or "out", and the weight of the convolution that has this input or output
FIRST_CONVOLUTION = {"code_vectors": ("in", ""), "post_quant": ("out", "")}


@dataclass(frozen=True)
class TokenizerGolden:
    """Recorded arrays of an image tokenizer.

    Attributes:
        bundle: name of the fixture that exports a bundle.
        values: inner values of the decoder's graph, by name of the recorded array.
        prefixes: of the names of arrays; each has its own codes.
        level: added to decoded pixels; the published program of Emu3.5 truncates pixels and the product rounds, so the
            graph's pixels are smaller by half a level of 255.
        equal_bytes: share of bytes that must be equal; others may differ by 1.
    """

    folder: str
    bundle: str
    values: dict[str, Value] = field(default_factory=lambda: dict(FIRST_CONVOLUTION))
    prefixes: tuple[str, ...] = ("vq_",)
    level: float = 0
    equal_bytes: float = 0


def make_decoder_values(post_quant: str, **others: Value) -> dict[str, Value]:
    return {"code_vectors": ("in", post_quant), "post_quant": ("out", post_quant), **others}


GOLDENS = [
    TokenizerGolden("llamagen-vq", "c2i_bundle", prefixes=("",)),
    TokenizerGolden("chameleon-vqgan", "anole_bundle", prefixes=("",)),
    TokenizerGolden("janus-deepseek", "janus_bundle"),
    TokenizerGolden(
        "emu3",
        "emu3_bundle",
        make_decoder_values(
            "decoder.post_quant_conv.weight",
            z=("in", "decoder.conv_in.weight"),
            zq=("in", "decoder.mid.0.norm1.conv_y.weight"),  # in the layers where a pixel is a cell of the grid
        ),
    ),
    TokenizerGolden(
        "emu3.5",
        "emu35_bundle",
        make_decoder_values("post_quant_conv.weight", conv_in=("out", "decoder.conv_in.weight")),
        level=1 / 255,
        equal_bytes=0.998,
    ),
    TokenizerGolden(
        "lumina-mgpt-2",
        "lumina2_bundle",
        make_decoder_values("decoder.post_quant_conv.weight", conv_in=("out", "decoder.conv_in.weight")),
    ),
    TokenizerGolden("simplear", "simplear_bundle", make_decoder_values("post_quant_conv.weight"), ("vq0_", "vq1_")),
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


def compute_values(path: Path, values: list[Value], output: str, feeds: Arrays) -> list[NDArray[np.float32]]:
    """Return inner values of a graph, and an output."""
    nodes = [node for node in onnx.load(path).graph.node if node.op_type == "Conv"]
    convolutions = {node.input[1]: node for node in nodes} | {"": nodes[0]}
    names = [convolutions[name].input[0] if end == "in" else convolutions[name].output[0] for end, name in values]
    return compute_graph_values(path, [*names, output], feeds)


def assert_recorded(values: NDArray[Any], arrays: Arrays, name: str) -> None:
    """Compare values with an array, which may lack the axis of images."""
    assert_close(values.reshape(arrays[name].shape), arrays[name])


def assert_bytes(golden: TokenizerGolden, pixels: NDArray[np.float32], expected: NDArray[np.uint8]) -> None:
    levels = np.asarray(convert_pixels_to_image(pixels)).astype(int)
    assert np.abs(levels - expected).max() <= 1
    assert (levels == expected).mean() > golden.equal_bytes


def test_codes_decode_to_the_recorded_values_and_images(golden: TokenizerGolden, bundle: Path, arrays: Arrays) -> None:
    for prefix in golden.prefixes:
        has_images = arrays[f"{prefix}decoded"].ndim == 4
        codes = arrays[f"{prefix}codes"] if has_images else arrays[f"{prefix}codes"][None]
        *values, images = compute_values(
            bundle / "vq_decoder.onnx", list(golden.values.values()), "images", {"codes": codes}
        )
        for name, value in zip(golden.values, values, strict=True):
            if f"{prefix}{name}" in arrays:
                assert_recorded(value, arrays, f"{prefix}{name}")
        assert_recorded(images + np.float32(golden.level), arrays, f"{prefix}decoded")
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
    assert_recorded(outputs["pre_quant"], arrays, f"{prefix}pre_quant")
    encoded = arrays[f"{prefix}encoded" if prefix else "encoded_codes"]
    np.testing.assert_array_equal(outputs["codes"].reshape(encoded.shape), encoded)
    # Decoders of one size take `[images, cells]`, others `[images, rows, columns]`.
    codes = outputs["codes"] if golden.values == FIRST_CONVOLUTION else encoded.reshape(1, *encoded.shape[-2:])
    vectors, image = compute_values(
        bundle / "vq_decoder.onnx", [golden.values["code_vectors"]], "images", {"codes": codes}
    )
    for name, values in (("quantized", vectors), ("reconstruction", image + np.float32(golden.level))):
        if f"{prefix}{name}" in arrays:
            assert_recorded(values, arrays, f"{prefix}{name}")


def test_codes_of_recorded_runs_decode_to_the_recorded_images(
    golden: TokenizerGolden, bundle: Path, arrays: Arrays
) -> None:
    path = DATA / golden.folder / "traces.json"
    traces = json.loads(path.read_text()) if path.is_file() else []
    decoder = GraphFileSession(bundle / "vq_decoder.onnx")
    for trace in [trace for trace in traces if f"{trace.get('name')}_uint8" in arrays]:
        (image,) = decoder.run({"codes": np.array([trace["codes"]])})["images"]
        assert_bytes(golden, image, arrays[f"{trace['name']}_uint8"])
        if f"{trace['name']}_pixels" in arrays:
            assert_close(image + np.float32(golden.level), arrays[f"{trace['name']}_pixels"])
