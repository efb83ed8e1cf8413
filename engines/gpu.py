"""The first NVIDIA GPU, found through its driver."""

from __future__ import annotations

import ctypes
import sys
from typing import NamedTuple

DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


class Gpu(NamedTuple):
    """The first GPU: the CUDA version its driver supports, such as `13.0`, and its capability, such as `SM89`."""

    driver: str
    compute_capability: str


def find_gpu() -> Gpu | None:
    """The first GPU, or None where there is no driver or no device; allocates nothing."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return None
    version, device, major, minor = (ctypes.c_int() for _ in range(4))
    failed = (  # each call returns 0 for success
        driver.cuInit(0)
        or driver.cuDriverGetVersion(ctypes.byref(version))
        or driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
        or driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    )
    number = version.value
    return None if failed else Gpu(f"{number // 1000}.{number % 1000 // 10}", f"SM{major.value}{minor.value}")
