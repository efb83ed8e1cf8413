"""Chameleon's exported image tokenizer against numbers of the published implementation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from llamagen_golden import Arrays, golden

from lantern_rt.export.parity import Sessions
from lantern_rt.output.images import to_image


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    return golden("chameleon-vqgan")


def close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4, strict=True)


def test_codes_become_the_recorded_vectors_and_images(anole_bundle: Path, arrays: Arrays) -> None:
    model = onnx.load(anole_bundle / "vq_decoder.onnx")
    first = next(node for node in model.graph.node if node.op_type == "Conv")
    model.graph.output.append(onnx.helper.make_tensor_value_info(first.input[0], onnx.TensorProto.FLOAT, None))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    images, vectors = session.run(None, {"codes": arrays["codes"]})
    close(vectors, arrays["code_vectors"])
    close(images, arrays["decoded"])


def test_pictures_are_the_recorded_ones_up_to_rounding(anole_bundle: Path, arrays: Arrays) -> None:
    images = Sessions(anole_bundle / "vq_decoder.onnx").run({"codes": arrays["codes"]})["images"]
    for found, expected in zip(images, arrays["decoded_uint8"], strict=True):
        assert np.abs(np.asarray(to_image(found)).astype(int) - expected).max() <= 1


def test_images_become_the_recorded_latents_and_codes(anole_bundle: Path, arrays: Arrays) -> None:
    found = Sessions(anole_bundle / "vq_encoder.onnx").run({"images": arrays["image"]})
    close(found["pre_quant"], arrays["pre_quant"])
    np.testing.assert_array_equal(found["codes"], arrays["encoded_codes"])
