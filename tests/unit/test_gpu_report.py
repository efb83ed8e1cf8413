"""What doctor says of GPUs, for environments and machines of every kind."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from lantern_rt.engines import gpu
from lantern_rt.engines.gpu import Gpu


@dataclass
class Distribution:
    name: str
    version: str

    @property
    def metadata(self) -> dict[str, str]:
        return {"Name": self.name}


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Installed distributions, to be filled in; libraries load and there is no device, unless a test says otherwise."""
    installed: dict[str, str] = {}
    monkeypatch.setattr(gpu, "_distributions", lambda: [Distribution(*one) for one in installed.items()])
    monkeypatch.setattr(gpu, "_missing_library", lambda: None)
    monkeypatch.setattr(gpu, "_missing_device", lambda provider: None)
    monkeypatch.setattr(gpu, "find_gpu", lambda: None)
    return installed


def test_without_a_gpu_build_of_onnxruntime_nothing_is_missing(found: dict[str, str]) -> None:
    found |= {"onnxruntime": "1.31.1", "onnxruntime_ep_openvino": "1.8"}
    report = gpu.gpu_report()
    assert report.problems == ()
    assert report.plugin_providers == {"onnxruntime-ep-openvino": "1.8"}
    assert report.rows()[0] == ("gpu", "none found")


def test_a_plugin_that_is_installed_and_finds_no_device_is_a_problem(
    found: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(gpu, "_missing_device", lambda provider: asked.append(provider.name) or "no device")
    found |= {"onnxruntime": "1.31.1", "onnxruntime-ep-webgpu": "0.4.0"}
    assert gpu.gpu_report().problems == ("no device",)
    assert asked == ["webgpu"]


def test_a_gpu_build_without_its_libraries_or_driver_says_what_to_install(
    found: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found |= {"onnxruntime-gpu": "1.31.1"}
    monkeypatch.setattr(gpu, "_missing_library", lambda: "libcublasLt.so.13: cannot open shared object file")
    libraries, driver = gpu.gpu_report().problems
    assert "libcublasLt.so.13" in libraries
    assert "pip install 'lantern-rt[gpu]'" in libraries
    assert driver.startswith("provider cuda: found no NVIDIA GPU and driver; install the driver")


def test_a_gpu_without_cudnn_says_so_and_a_complete_one_is_described(
    found: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found |= {"onnxruntime-gpu": "1.31.1", "nvidia-cuda-runtime": "13.0.88", "tensorrt_rtx": "1.7.1"}
    monkeypatch.setattr(gpu, "find_gpu", lambda: Gpu("13.0", "SM89"))
    (problem,) = gpu.gpu_report().problems
    assert "cuDNN" in problem
    found["nvidia-cudnn-cu13"] = "9.13"
    report = gpu.gpu_report()
    assert report.problems == ()
    assert report.rows()[:3] == [
        ("gpu", "SM89, driver for CUDA 13.0"),
        ("gpu libraries", "nvidia-cuda-runtime 13.0.88, nvidia-cudnn-cu13 9.13"),
        ("gpu builders", "tensorrt-rtx 1.7.1"),
    ]


def test_a_provider_whose_library_does_not_load_is_told_by_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(gpu, "preload", lambda *_: (_ for _ in ()).throw(OSError("libcudart.so.13: no such file")))
    assert gpu._missing_library() == "libcudart.so.13: no such file"
