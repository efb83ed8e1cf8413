"""ONNX Runtime's OpenVINO plugin runs the bundle's graphs in float32 with the tokens of ONNX Runtime's CPU."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from lantern_rt import EngineError, Pipeline
from lantern_rt.engines.host import import_onnxruntime
from lantern_rt.engines.ort.engine import OrtEngine
from lantern_rt.engines.ort.providers import find_provider

try:
    find_provider("openvino", import_onnxruntime())
except EngineError as error:
    pytest.skip(str(error), allow_module_level=True)

if "LANTERN_BUNDLES" not in os.environ:
    pytest.skip("needs bundles written by benchmarks/precision.py --work", allow_module_level=True)

SCENES = (
    Path(os.environ["LANTERN_BUNDLES"]) / "scenes-fp32"
)  # OpenVINO does not support the int8 matmuls of the embedded bundle
PROMPTS = ["a red sphere on sand", "a blue cube in the snow"]
SEEDS = [5, 6]
STEPS = 12


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return Pipeline.from_bundle(SCENES, provider="openvino")


@pytest.fixture(scope="module")
def on_cpu() -> Pipeline:
    return Pipeline.from_bundle(SCENES, provider="cpu")


def first_codes(pipe: Pipeline, method: str, **options: float) -> list[list[int]]:
    steps = list(islice(pipe.stream(PROMPTS, seed=SEEDS, method=method, **options), STEPS))
    return [codes.tolist() for codes in steps[-1].codes]


@pytest.mark.parametrize(
    "method", ["ar", "sjd:window=3", "eagle:tree=chain-3", "eagle:tree=dynamic-8-4-2:drafter=eagle", "lantern++"]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_the_cpus(pipe: Pipeline, on_cpu: Pipeline, method: str, temperature: float) -> None:
    assert isinstance(pipe.engines.target, OrtEngine)
    assert first_codes(pipe, method, temperature=temperature) == first_codes(on_cpu, method, temperature=temperature)


def test_images_are_the_cpus(pipe: Pipeline, on_cpu: Pipeline) -> None:
    codes = np.random.default_rng(0).integers(0, 1024, (2, 256))
    np.testing.assert_allclose(pipe.engines.decode_images(codes), on_cpu.engines.decode_images(codes), atol=1e-4)


def test_only_the_image_decoder_may_run_on_openvino(on_cpu: Pipeline) -> None:
    codes = np.random.default_rng(1).integers(0, 1024, (1, 256))
    pipe = Pipeline.from_bundle(SCENES, provider=["cpu", "vq_decoder=openvino"])
    assert (pipe.engines.backend, pipe.engines.image_backend) == ("onnxruntime-cpu", "onnxruntime-openvino")
    np.testing.assert_allclose(pipe.engines.decode_images(codes), on_cpu.engines.decode_images(codes), atol=1e-4)


def test_bfloat16_images_differ_from_the_cpus_by_less_than_a_level_and_tokens_are_the_same(on_cpu: Pipeline) -> None:
    pipe = Pipeline.from_bundle(SCENES, provider="cpu,vq_decoder=openvino-bf16")
    bfloat16_result, cpu_result = (pipeline(PROMPTS, seed=SEEDS, method="ar") for pipeline in (pipe, on_cpu))
    for i in range(len(PROMPTS)):
        np.testing.assert_array_equal(bfloat16_result.codes[i], cpu_result.codes[i])
        difference = np.abs(np.asarray(bfloat16_result.images[i], float) - np.asarray(cpu_result.images[i], float))
        assert difference.mean() < 0.5
        assert difference.max() <= 3
