"""What the NVIDIA driver says about this host, asked of the driver's own library; nothing to install.

Does not allocate or run anything.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass

LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


@dataclass(frozen=True)
class Gpu:
    """The first GPU: the CUDA version its driver supports, such as `13.0`, and its capability, such as `SM89`."""

    driver: str
    compute_capability: str


def find_gpu() -> Gpu | None:
    """The first GPU, or None where there is no driver or no device."""
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    version, device, major, minor = (ctypes.c_int() for _ in range(4))
    calls: tuple[Callable[[], int], ...] = (
        lambda: driver.cuInit(0),
        lambda: driver.cuDriverGetVersion(ctypes.byref(version)),
        lambda: driver.cuDeviceGet(ctypes.byref(device), 0),
        lambda: driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device),
        lambda: driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device),
    )
    if any(call() for call in calls):  # each returns 0 for success
        return None
    number = version.value
    return Gpu(f"{number // 1000}.{number % 1000 // 10}", f"SM{major.value}{minor.value}")
