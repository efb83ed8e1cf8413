"""Tokens and images on the OpenVINO provider of ONNX Runtime, compared with the CPU provider."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from lantern_rt import EngineError, Pipeline
from lantern_rt.engines.host import import_onnxruntime
from lantern_rt.engines.ort.engine import OrtEngine
from lantern_rt.engines.ort.providers import find_available_provider

try:
    find_available_provider("openvino", import_onnxruntime())
except EngineError as error:
    pytest.skip(str(error), allow_module_level=True)

if "LANTERN_BUNDLES" not in os.environ:
    pytest.skip("needs bundles written by benchmarks/precision.py --work", allow_module_level=True)

# The embedded bundle has int8 matmuls, which OpenVINO does not support.
SCENES = Path(os.environ["LANTERN_BUNDLES"]) / "scenes-fp32"
PROMPTS = ["a red sphere on sand", "a blue cube in the snow"]
SEEDS = [5, 6]
STEPS = 12  # steps of a generation that tests compare


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return Pipeline.from_bundle(SCENES, provider="openvino")


@pytest.fixture(scope="module")
def cpu_pipe() -> Pipeline:
    return Pipeline.from_bundle(SCENES, provider="cpu")


def generate_first_codes(pipe: Pipeline, method: str, **options: float) -> list[list[int]]:
    steps = list(islice(pipe.stream(PROMPTS, seed=SEEDS, method=method, **options), STEPS))
    return [codes.tolist() for codes in steps[-1].codes]


@pytest.mark.parametrize(
    "method", ["ar", "sjd:window=3", "eagle:tree=chain-3", "eagle:tree=dynamic-8-4-2:drafter=eagle", "lantern++"]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_on_openvino_equal_the_tokens_on_the_cpu(
    pipe: Pipeline, cpu_pipe: Pipeline, method: str, temperature: float
) -> None:
    assert isinstance(pipe.engines.target, OrtEngine)
    assert generate_first_codes(pipe, method, temperature=temperature) == generate_first_codes(
        cpu_pipe, method, temperature=temperature
    )


def test_decoded_images_agree_with_the_cpus_images(pipe: Pipeline, cpu_pipe: Pipeline) -> None:
    codes = np.random.default_rng(0).integers(0, 1024, (2, 256))
    np.testing.assert_allclose(pipe.engines.decode_images(codes), cpu_pipe.engines.decode_images(codes), atol=1e-4)


def test_the_image_decoder_can_run_alone_on_openvino(cpu_pipe: Pipeline) -> None:
    codes = np.random.default_rng(1).integers(0, 1024, (1, 256))
    pipe = Pipeline.from_bundle(SCENES, provider=["cpu", "vq_decoder=openvino"])
    assert (pipe.engines.backend, pipe.engines.image_backend) == ("onnxruntime-cpu", "onnxruntime-openvino")
    np.testing.assert_allclose(pipe.engines.decode_images(codes), cpu_pipe.engines.decode_images(codes), atol=1e-4)


def test_a_bfloat16_decoder_changes_few_pixel_levels(cpu_pipe: Pipeline) -> None:
    pipe = Pipeline.from_bundle(SCENES, provider="cpu,vq_decoder=openvino-bf16")
    bfloat16_result, cpu_result = (pipeline(PROMPTS, seed=SEEDS, method="ar") for pipeline in (pipe, cpu_pipe))
    for i in range(len(PROMPTS)):
        np.testing.assert_array_equal(bfloat16_result.codes[i], cpu_result.codes[i])
        difference = np.abs(np.asarray(bfloat16_result.images[i], float) - np.asarray(cpu_result.images[i], float))
        assert difference.mean() < 0.5  # pixel levels from 0 to 255
        assert difference.max() <= 3
