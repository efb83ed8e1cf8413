"""Fixture of the ONNX Runtime providers to compare with the CPU: WebGPU (Vulkan, Metal or Direct3D) and CUDA."""

from __future__ import annotations

import pytest

from lantern_rt import EngineError
from lantern_rt.engines.gpu import find_gpu
from lantern_rt.engines.host import import_onnxruntime
from lantern_rt.engines.ort.providers import find_available_provider


@pytest.fixture(scope="module", params=["webgpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def provider(request: pytest.FixtureRequest) -> str:
    """Return the name of a provider; skip the test if it is not installed or has no device."""
    try:
        name: str = find_available_provider(request.param, import_onnxruntime()).name
    except EngineError as error:
        pytest.skip(str(error))
    if name == "cuda" and find_gpu() is None:
        pytest.skip("no NVIDIA GPU and driver here")
    return name
