"""The first NVIDIA GPU, through its driver."""

from __future__ import annotations

import ctypes
import logging
import sys
from typing import NamedTuple

DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
CUDA, OLDEST_DRIVER = 13, 580  # of what the extras gpu, tensorrt and tensorrt-rtx install
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


class Gpu(NamedTuple):
    """The first GPU: the CUDA version its driver supports, such as `13.0`, its capability, such as `SM89`, its name."""

    driver: str
    compute_capability: str
    name: str


def find_gpu() -> Gpu | None:
    """The first GPU, or None where there is no driver or no device, or, with a warning, it fails; allocates nothing."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return None
    version, device, major, minor = (ctypes.c_int() for _ in range(4))
    name = ctypes.create_string_buffer(256)
    failed = (  # each call returns 0 for success
        driver.cuInit(0)
        or driver.cuDriverGetVersion(ctypes.byref(version))
        or driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
        or driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
        or driver.cuDeviceGetName(name, len(name), device)
    )
    if failed not in (0, 100):  # CUDA_ERROR_NO_DEVICE
        problem = "no GPU can be used, NVIDIA's driver fails with CUDA error %d: see what `nvidia-smi` says"
        logging.getLogger(__name__).warning(problem, failed)
    number, capability = version.value, f"SM{major.value}{minor.value}"
    return None if failed else Gpu(f"{number // 1000}.{number % 1000 // 10}", capability, name.value.decode())
