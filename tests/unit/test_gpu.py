"""`find_gpu`, with a Python object in place of the CUDA driver."""

from __future__ import annotations

from typing import Any

import pytest

from lantern_rt.engines import gpu as gpu_module
from lantern_rt.engines.gpu import Gpu, find_gpu


class FakeDriver:
    """Stand-in for the CUDA driver of a host with an NVIDIA L4."""

    def __init__(self) -> None:
        self.failing = ""

    def __getattr__(self, name: str) -> Any:
        def function(*arguments: Any) -> int:
            output = getattr(arguments[0], "_obj", arguments[0])  # the argument of `ctypes.byref`
            if name == "cuDeviceGetName":
                output.value = b"NVIDIA L4"
            elif name == "cuDeviceGetAttribute":
                output.value = {75: 8, 76: 9}[arguments[1]]  # major and minor compute capability
            elif name == "cuDriverGetVersion":
                output.value = 13000
            return 999 if name == self.failing else 0

        return function


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver()
    monkeypatch.setattr(gpu_module.ctypes, "CDLL", lambda name: driver)
    return driver


def test_find_gpu_reads_version_capability_and_name(driver: FakeDriver) -> None:
    assert find_gpu() == Gpu("13.0", "SM89", "NVIDIA L4")
    driver.failing = "cuDeviceGet"
    assert find_gpu() is None
