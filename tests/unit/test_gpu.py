"""The first GPU by its driver, with one in the driver's place that writes down how it is called."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from lantern_rt.engines import gpu as gpu_module
from lantern_rt.engines.gpu import Gpu, Stream, find_gpu
from lantern_rt.errors import EngineError

CONTEXT, STREAM = 7, 9


class Driver:
    """CUDA's driver on a host with an L4. `failing`: a function that fails."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.failing = ""

    def __getattr__(self, name: str) -> Any:
        def function(*arguments: Any) -> int:
            self.calls.append((name, arguments))
            first = getattr(arguments[0], "_obj", arguments[0])  # of byref
            written = {"cuDriverGetVersion": 13000, "cuDevicePrimaryCtxRetain": CONTEXT, "cuStreamCreate": STREAM}
            if name == "cuDeviceGetName":
                first.value = b"NVIDIA L4"
            elif name == "cuDeviceGetAttribute":
                first.value = {75: 8, 76: 9}[arguments[1]]
            elif name in written:
                first.value = written[name]
            return 999 if name == self.failing else 0

        return function


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(gpu_module.ctypes, "CDLL", lambda name: driver)
    return driver


def test_the_gpu_is_known_by_driver_capability_and_name(driver: Driver) -> None:
    assert find_gpu() == Gpu("13.0", "SM89", "NVIDIA L4")
    driver.failing = "cuDeviceGet"
    assert find_gpu() is None


def test_a_stream_waits_for_no_other_in_the_context_that_cuda_uses_and_is_given_back(driver: Driver) -> None:
    stream = Stream()
    assert stream.handle == STREAM
    (flags,) = (arguments[1] for name, arguments in driver.calls if name == "cuStreamCreate")
    assert flags == 1  # CU_STREAM_NON_BLOCKING
    driver.calls.clear()
    stream.synchronize()
    names = [name for name, _ in driver.calls]
    values = [ctypes.cast(arguments[0], ctypes.c_void_p).value for _, arguments in driver.calls]
    assert (names, values) == (["cuCtxSetCurrent", "cuStreamSynchronize"], [CONTEXT, STREAM])
    driver.failing = "cuStreamSynchronize"
    with pytest.raises(EngineError, match="refuses cuStreamSynchronize"):
        stream.synchronize()
    del stream
    assert driver.calls[-1][0] == "cuStreamDestroy_v2"
