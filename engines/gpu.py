"""Name, compute capability and CUDA version of the first NVIDIA GPU, read from its driver."""

from __future__ import annotations

import ctypes
import logging
import sys
from typing import NamedTuple

DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
# CUDA version that the packages of the extras gpu, tensorrt and tensorrt-rtx need, and the oldest driver that has it.
CUDA = 13
OLDEST_DRIVER = 580
_MAJOR = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
_MINOR = 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR


class Gpu(NamedTuple):
    """Properties of an NVIDIA GPU and its driver."""

    cuda_version: str  # CUDA version that the driver supports, such as `13.0`
    compute_capability: str  # compute capability, such as `SM89`
    name: str


def find_gpu() -> Gpu | None:
    """Find the first NVIDIA GPU, without allocating memory on it.

    None if there is no driver or no GPU, and, after a warning in the log, if the driver fails.
    """
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return None
    version, device, major, minor = (ctypes.c_int() for _ in range(4))
    name = ctypes.create_string_buffer(256)
    # Each call returns 0 for success, otherwise an error number. `or` stops at the first error.
    failed = (
        driver.cuInit(0)
        or driver.cuDriverGetVersion(ctypes.byref(version))
        or driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
        or driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
        or driver.cuDeviceGetName(name, len(name), device)
    )
    if failed not in (0, 100):  # 100 is CUDA_ERROR_NO_DEVICE, which needs no warning
        problem = "no GPU can be used, NVIDIA's driver fails with CUDA error %d: see what `nvidia-smi` says"
        logging.getLogger(__name__).warning(problem, failed)
    if failed:
        return None
    number = version.value  # 1000 * major + 10 * minor
    capability = f"SM{major.value}{minor.value}"
    return Gpu(f"{number // 1000}.{number % 1000 // 10}", capability, name.value.decode())
