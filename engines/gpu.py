"""The first NVIDIA GPU, through its driver: what it is, and streams on it."""

from __future__ import annotations

import ctypes
import logging
import sys
import weakref
from typing import NamedTuple

from ..errors import EngineError

DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
CUDA, OLDEST_DRIVER = 13, 580  # of what the extras gpu, tensorrt and tensorrt-rtx install
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
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


class Stream:
    """A stream of the first GPU, which waits for no other: what is on the default one would, and cannot be recorded.

    What runs on it must find all that it reads in memory already, as ONNX Runtime leaves it when a call returns.
    """

    def __init__(self) -> None:
        self._driver, self._context, self._stream = ctypes.CDLL(DRIVER), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), 0)  # that of CUDA's runtime
        self._call("cuCtxSetCurrent", self._context)
        self._call("cuStreamCreate", ctypes.byref(self._stream), _NON_BLOCKING)
        self.handle = self._stream.value or 0
        weakref.finalize(self, self._driver.cuStreamDestroy_v2, self._stream).atexit = False

    def synchronize(self) -> None:
        """Wait until everything on it is done."""
        self._call("cuCtxSetCurrent", self._context)  # of the thread that waits
        self._call("cuStreamSynchronize", self._stream)

    def _call(self, function: str, *arguments: object) -> None:
        if code := getattr(self._driver, function)(*arguments):
            raise EngineError(f"the driver refuses {function} (error {code})", field="GPU", remedy="update the driver")
