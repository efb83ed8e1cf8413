"""Reading the first GPU from the driver, which a Python object replaces."""

from __future__ import annotations

from typing import Any

import pytest

from lantern_rt.engines import gpu as gpu_module
from lantern_rt.engines.gpu import Gpu, find_gpu


class Driver:
    """Stand-in for CUDA's driver on a host with an L4; the function named `failing` fails."""

    def __init__(self) -> None:
        self.failing = ""

    def __getattr__(self, name: str) -> Any:
        def function(*arguments: Any) -> int:
            first = getattr(arguments[0], "_obj", arguments[0])  # the argument of `ctypes.byref`
            if name == "cuDeviceGetName":
                first.value = b"NVIDIA L4"
            elif name == "cuDeviceGetAttribute":
                first.value = {75: 8, 76: 9}[arguments[1]]
            elif name == "cuDriverGetVersion":
                first.value = 13000
            return 999 if name == self.failing else 0

        return function


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(gpu_module.ctypes, "CDLL", lambda name: driver)
    return driver


def test_find_gpu_reads_driver_version_capability_and_name(driver: Driver) -> None:
    assert find_gpu() == Gpu("13.0", "SM89", "NVIDIA L4")
    driver.failing = "cuDeviceGet"
    assert find_gpu() is None
