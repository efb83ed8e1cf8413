"""The exported image tokenizer against numbers of the published implementation."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from llamagen_golden import Arrays, golden

from lantern_rt.export.parity import Sessions


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    return golden("llamagen-vq")


@pytest.fixture(scope="module")
def decode(c2i_bundle: Path) -> onnxruntime.InferenceSession:
    """The decoder graph, showing also what goes into and comes out of its first convolution."""
    model = onnx.load(c2i_bundle / "vq_decoder.onnx")
    first = next(node for node in model.graph.node if node.op_type == "Conv")
    for name in (first.input[0], first.output[0]):
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4, strict=True)


def test_codes_become_the_recorded_vectors_latents_and_images(
    decode: onnxruntime.InferenceSession, arrays: Arrays
) -> None:
    image, vectors, latents = decode.run(None, {"codes": arrays["codes"]})
    close(vectors, arrays["code_vectors"])
    close(latents, arrays["post_quant"])
    close(image, arrays["decoded"])


def test_images_become_the_recorded_latents_and_codes(c2i_bundle: Path, arrays: Arrays) -> None:
    found = Sessions(c2i_bundle / "vq_encoder.onnx").run({"images": arrays["image"]})
    close(found["pre_quant"], arrays["pre_quant"])
    np.testing.assert_array_equal(found["codes"], arrays["encoded_codes"])


def test_decoding_what_was_encoded_gives_the_recorded_reconstruction(
    c2i_bundle: Path, decode: onnxruntime.InferenceSession, arrays: Arrays
) -> None:
    codes = Sessions(c2i_bundle / "vq_encoder.onnx").run({"images": arrays["image"]})["codes"]
    image, vectors, _ = decode.run(None, {"codes": codes})
    close(vectors, arrays["quantized"])
    close(image, arrays["reconstruction"])


def test_one_image_and_three_images_decode_alike(c2i_bundle: Path, arrays: Arrays) -> None:
    session = Sessions(c2i_bundle / "vq_decoder.onnx")
    three = session.run({"codes": arrays["codes"][[0, 1, 0]]})["images"]
    close(three, arrays["decoded"][[0, 1, 0]])
    close(session.run({"codes": arrays["codes"][:1]})["images"], arrays["decoded"][:1])
