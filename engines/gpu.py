"""Queries of the first NVIDIA GPU through its driver."""

from __future__ import annotations

import ctypes
import logging
import sys
from typing import NamedTuple

DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
# CUDA version, and its oldest driver, for the packages of the extras gpu, tensorrt and tensorrt-rtx.
CUDA = 13
OLDEST_DRIVER = 580
_MAJOR = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
_MINOR = 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR


class Gpu(NamedTuple):
    """A GPU.

    Attributes:
        cuda_version: CUDA version that its driver supports, such as `13.0`.
        compute_capability: compute capability, such as `SM89`.
        name: product name.
    """

    cuda_version: str
    compute_capability: str
    name: str


def find_gpu() -> Gpu | None:
    """Return the first GPU, without allocating memory on it.

    Returns:
        The GPU; None without a driver or device, and, after a warning, if the driver fails.
    """
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
    if failed:
        return None
    number = version.value
    capability = f"SM{major.value}{minor.value}"
    return Gpu(f"{number // 1000}.{number % 1000 // 10}", capability, name.value.decode())
