"""The exported image tokenizers of LlamaGen and Chameleon against numbers of the published implementations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from goldens import Arrays, close, golden, observed

from lantern_rt.export.parity import Sessions
from lantern_rt.output.images import to_image

FOLDERS = {"c2i_bundle": "llamagen-vq", "anole_bundle": "chameleon-vqgan"}


@pytest.fixture(scope="module", params=FOLDERS, ids=FOLDERS.get)
def tokenizer(request: pytest.FixtureRequest) -> tuple[Path, Arrays]:
    """A bundle, and what was recorded of its image tokenizer."""
    return request.getfixturevalue(request.param), golden(FOLDERS[request.param])


def decode(bundle: Path, codes: np.ndarray) -> list[np.ndarray]:
    """Images, and what goes into and comes out of the decoder's first convolution."""
    path = bundle / "vq_decoder.onnx"
    first = next(node for node in onnx.load(path).graph.node if node.op_type == "Conv")
    return observed(path, ["images", first.input[0], first.output[0]], {"codes": codes})


def test_codes_become_the_recorded_vectors_latents_and_images(tokenizer: tuple[Path, Arrays]) -> None:
    bundle, arrays = tokenizer
    images, vectors, latents = decode(bundle, arrays["codes"])
    close(vectors, arrays["code_vectors"])
    close(images, arrays["decoded"])
    if "post_quant" in arrays:
        close(latents, arrays["post_quant"])
    for found, expected in zip(images, arrays.get("decoded_uint8", []), strict=False):
        assert np.abs(np.asarray(to_image(found)).astype(int) - expected).max() <= 1


def test_images_become_the_recorded_latents_and_codes_and_these_the_reconstruction(
    tokenizer: tuple[Path, Arrays],
) -> None:
    bundle, arrays = tokenizer
    found = Sessions(bundle / "vq_encoder.onnx").run({"images": arrays["image"]})
    close(found["pre_quant"], arrays["pre_quant"])
    np.testing.assert_array_equal(found["codes"], arrays["encoded_codes"])
    if "reconstruction" in arrays:
        image, vectors, _ = decode(bundle, found["codes"])
        close(vectors, arrays["quantized"])
        close(image, arrays["reconstruction"])
