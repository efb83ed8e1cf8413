"""The first GPU through the NVIDIA driver's own library: its memory, and one stream of work on it."""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from functools import cache
from typing import Any, NamedTuple

from ...errors import EngineError
from ..contracts import Array

LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
ALIGNMENT = 256  # bytes; what the driver gives, and what TensorRT asks of every tensor's address
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
_DEVICE_MEMORY = 2  # CU_MEMORYTYPE_DEVICE
_RELEASE_THRESHOLD = 4  # CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
_Word, _Size, _Pointer = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p


class Gpu(NamedTuple):
    """The first GPU: the CUDA version its driver supports, such as `13.0`, and its capability, such as `SM89`."""

    driver: str
    compute_capability: str


def find_gpu() -> Gpu | None:
    """The first GPU, or None where there is no driver or no device; allocates nothing."""
    try:
        driver = ctypes.CDLL(LIBRARY)
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


class Lines(NamedTuple):
    """Where lines of bytes begin: the first one, one to the next, and how many lines there are to the next slice."""

    address: int
    pitch: int
    height: int


class _Side(ctypes.Structure):  # of a copy
    _fields_ = (
        *(("x", _Size), ("y", _Size), ("z", _Size), ("lod", _Size), ("kind", ctypes.c_int), ("host", _Pointer)),
        *(("device", _Word), ("array", _Pointer), ("reserved", _Pointer), ("pitch", _Size), ("height", _Size)),
    )


class _Copy3D(ctypes.Structure):  # CUDA_MEMCPY3D_v2 of cuda.h
    _fields_ = (("source", _Side), ("target", _Side), ("width", _Size), ("height", _Size), ("depth", _Size))


# Functions of cuda.h and their arguments; all return a status. Names with _v2 are what cuda.h's macros choose.
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(_Pointer), ctypes.c_int),
    "cuCtxSetCurrent": (_Pointer,),
    "cuDeviceGetDefaultMemPool": (ctypes.POINTER(_Pointer), ctypes.c_int),
    "cuMemPoolSetAttribute": (_Pointer, ctypes.c_int, ctypes.POINTER(_Word)),
    "cuStreamCreate": (ctypes.POINTER(_Pointer), ctypes.c_uint),
    "cuStreamSynchronize": (_Pointer,),
    "cuMemAllocAsync": (ctypes.POINTER(_Word), _Size, _Pointer),
    "cuMemFreeAsync": (_Word, _Pointer),
    "cuMemcpyHtoDAsync_v2": (_Word, _Pointer, _Size, _Pointer),
    "cuMemcpyDtoHAsync_v2": (_Pointer, _Word, _Size, _Pointer),
    "cuMemcpy3DAsync_v2": (ctypes.POINTER(_Copy3D), _Pointer),
    "cuMemsetD8Async": (_Word, ctypes.c_ubyte, _Size, _Pointer),
    "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}


class CudaMemory:
    """The first GPU's memory and a stream, in the primary context that TensorRT and others use too.

    Everything asked for happens later, in that order. Any thread may call. stream: its handle, for a library that puts
    work of its own on it. lock: to be held meanwhile; reentrant.

    Raises: EngineError with the driver's own words if a call fails.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._driver = ctypes.CDLL(library)
            for name, arguments in _SIGNATURES.items():
                function = getattr(self._driver, name)
                function.argtypes, function.restype = arguments, ctypes.c_int
        except (OSError, AttributeError) as error:
            raise EngineError(f"{library}: cannot be used ({error}); install or update the NVIDIA driver") from error
        self.lock = threading.RLock()
        device, stream, pool, self._context = ctypes.c_int(), _Pointer(), _Pointer(), _Pointer()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self.use()
        # what was freed stays in the pool for the next who asks; by default every synchronisation gives it back
        self._call("cuDeviceGetDefaultMemPool", ctypes.byref(pool), device)
        self._call("cuMemPoolSetAttribute", pool, _RELEASE_THRESHOLD, ctypes.byref(_Word(2**64 - 1)))
        self._call("cuStreamCreate", ctypes.byref(stream), 1)  # 1: does not wait for the default stream
        self.stream = stream.value or 0

    def use(self) -> None:
        """Make the device the current one of this thread, for libraries that ask which one is."""
        self._call("cuCtxSetCurrent", self._context)

    def allocate(self, size: int) -> int:
        """The address of `size` bytes, a multiple of `ALIGNMENT`."""
        address = _Word()
        self._do("cuMemAllocAsync", ctypes.byref(address), size, self.stream, note=f" for {size / 2**20:,.0f} MiB")
        return address.value

    def free(self, address: int) -> None:
        """Give back what `allocate` gave, once the work asked for so far is done."""
        self._do("cuMemFreeAsync", address, self.stream)

    def upload(self, target: int, source: Array) -> None:
        """Copy a contiguous array to the device; leave it unchanged until `synchronise`."""
        self._do("cuMemcpyHtoDAsync_v2", target, _start(source), source.nbytes, self.stream)

    def download(self, target: Array, source: int) -> None:
        """Fill a contiguous array from the device; it is filled when `synchronise` has returned."""
        self._do("cuMemcpyDtoHAsync_v2", _start(target), source, target.nbytes, self.stream)

    def copy(self, target: Lines, source: Lines, width: int, height: int, depth: int = 1) -> None:
        """Copy `depth` slices of `height` lines of `width` bytes on the device; no byte may be read and written."""
        kind, both = _DEVICE_MEMORY, (source, target)
        ends = (_Side(kind=kind, device=address, pitch=pitch, height=lines) for address, pitch, lines in both)
        self._do("cuMemcpy3DAsync_v2", ctypes.byref(_Copy3D(*ends, width, height, depth)), self.stream)

    def zero(self, target: int, size: int) -> None:
        """Fill with zero bytes."""
        self._do("cuMemsetD8Async", target, 0, size, self.stream)

    def synchronise(self) -> None:
        """Wait until everything asked for has happened. Raises: EngineError if something of it failed."""
        self._do("cuStreamSynchronize", self.stream)

    def _do(self, name: str, *arguments: Any, note: str = "") -> None:
        with self.lock:
            self.use()
            self._call(name, *arguments, note=note)

    def _call(self, name: str, *arguments: Any, note: str = "") -> None:
        if status := getattr(self._driver, name)(*arguments):
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(status, ctypes.byref(text))
            reason = text.value.decode(errors="replace") if text.value else "unknown error"
            raise EngineError(f"the NVIDIA driver: {name}{note} failed: {reason} (status {status})")


class Block:
    """Device memory that is given back when nothing refers to it any more."""

    def __init__(self, memory: CudaMemory, size: int) -> None:
        self.size = max(size, ALIGNMENT)
        self.address = memory.allocate(self.size)
        weakref.finalize(self, memory.free, self.address).atexit = False  # at exit the driver takes all back


def _start(array: Array) -> int:
    """The address of a contiguous array's first byte."""
    if not array.flags.c_contiguous:
        raise ValueError(f"an array {array.shape} with strides {array.strides}, expected a contiguous one")
    return int(array.ctypes.data)


open_gpu = cache(CudaMemory)  # one stream for the whole process: engines never wait for each other by events
