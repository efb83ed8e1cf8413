"""The first GPU through the NVIDIA driver's own library, nothing to install: its memory, and one stream of work on it.

`CudaMemory` is all that engines need of a device: memory by address, copies that take effect in the order in which
they were asked for, and recorded work that is asked for again as a whole (CUDA graphs). Tests put the host's memory in
its place.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from ...errors import EngineError
from ..contracts import Array

LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
ALIGNMENT = 256  # bytes; what the driver gives, and what TensorRT asks of every tensor's address
MOST_KEPT = 8  # blocks of a pool: a cache, its narrower successors in a batch, and a few sizes of scratch memory
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
_DEVICE_MEMORY = 2  # CU_MEMORYTYPE_DEVICE
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: what other threads do does not spoil a capture
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
    status = (  # each call returns 0 for success
        driver.cuInit(0)
        or driver.cuDriverGetVersion(ctypes.byref(version))
        or driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
        or driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    )
    number = version.value
    return None if status else Gpu(f"{number // 1000}.{number % 1000 // 10}", f"SM{major.value}{minor.value}")


# One side of a two-dimensional copy in cuda.h.
_SIDE: tuple[tuple[str, Any], ...] = (
    *(("x", _Size), ("y", _Size), ("kind", ctypes.c_int)),
    *(("host", _Pointer), ("device", _Word), ("array", _Pointer), ("pitch", _Size)),
)


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D_v2 of cuda.h."""

    _fields_ = (
        *((f"source_{name}", kind) for name, kind in _SIDE),
        *((f"target_{name}", kind) for name, kind in _SIDE),
        ("width", _Size),
        ("height", _Size),
    )


# Functions of cuda.h and their arguments; all return a status. Names with _v2 are what cuda.h's macros choose.
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(_Pointer), ctypes.c_int),
    "cuCtxSetCurrent": (_Pointer,),
    "cuStreamCreate": (ctypes.POINTER(_Pointer), ctypes.c_uint),
    "cuStreamSynchronize": (_Pointer,),
    "cuMemAllocAsync": (ctypes.POINTER(_Word), _Size, _Pointer),
    "cuMemFreeAsync": (_Word, _Pointer),
    "cuMemcpyHtoDAsync_v2": (_Word, _Pointer, _Size, _Pointer),
    "cuMemcpyDtoHAsync_v2": (_Pointer, _Word, _Size, _Pointer),
    "cuMemcpy2DAsync_v2": (ctypes.POINTER(_Copy2D), _Pointer),
    "cuMemsetD8Async": (_Word, ctypes.c_ubyte, _Size, _Pointer),
    "cuStreamBeginCapture_v2": (_Pointer, ctypes.c_int),
    "cuStreamEndCapture": (_Pointer, ctypes.POINTER(_Pointer)),
    "cuGraphGetNodes": (_Pointer, ctypes.POINTER(_Pointer), ctypes.POINTER(_Size)),
    "cuGraphInstantiateWithFlags": (ctypes.POINTER(_Pointer), _Pointer, ctypes.c_ulonglong),
    "cuGraphLaunch": (_Pointer, _Pointer),
    "cuGraphDestroy": (_Pointer,),
    "cuGraphExecDestroy": (_Pointer,),
    "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}


class CudaMemory:
    """The first GPU's memory and a stream, in the primary context that TensorRT and others use too.

    Everything asked for happens later, in that order. Any thread may call; one at a time uses the stream, also to wait
    for it: during a capture the driver allows neither. Host arrays are ordinary memory, not pinned: an upload has read
    its array, and a download has filled it, when the call returns.

    stream: its handle, for a library that puts work of its own on it. lock: to be held meanwhile, so that nothing of
    another thread gets into what is being recorded; reentrant.

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
        self._threads = threading.local()
        self.lock = threading.RLock()
        self._capturing = False
        self._late: list[tuple[Any, ...]] = []  # calls that must not become part of what is being captured
        device, context, stream = ctypes.c_int(), _Pointer(), _Pointer()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._context = context
        self.use()
        self._call("cuStreamCreate", ctypes.byref(stream), 1)  # 1: does not wait for the default stream
        self.stream = stream.value or 0

    def use(self) -> None:
        """Make the device the current one of this thread, for libraries that ask which one is."""
        if not getattr(self._threads, "current", False):
            self._call("cuCtxSetCurrent", self._context)
            self._threads.current = True

    def allocate(self, size: int) -> int:
        """The address of `size` bytes, a multiple of `ALIGNMENT`."""
        address = _Word()
        self._do("cuMemAllocAsync", ctypes.byref(address), size, self.stream, note=f" for {size / 2**20:,.0f} MiB")
        return address.value

    def free(self, address: int) -> None:
        """Give back what `allocate` gave, once the work asked for so far is done."""
        self._give_back("cuMemFreeAsync", address, self.stream)

    def upload(self, target: int, source: Array) -> None:
        """Copy a contiguous array to the device; leave it unchanged until `synchronise`."""
        self._do("cuMemcpyHtoDAsync_v2", target, _start(source), source.nbytes, self.stream)

    def download(self, target: Array, source: int) -> None:
        """Fill a contiguous array from the device; it is filled when `synchronise` has returned."""
        self._do("cuMemcpyDtoHAsync_v2", _start(target), source, target.nbytes, self.stream)

    def copy2d(self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int) -> None:
        """Copy `height` lines of `width` bytes on the device; lines begin a pitch apart."""
        copy = _Copy2D(source_kind=_DEVICE_MEMORY, target_kind=_DEVICE_MEMORY, width=width, height=height)
        copy.source_device, copy.source_pitch = source, source_pitch
        copy.target_device, copy.target_pitch = target, target_pitch
        self._do("cuMemcpy2DAsync_v2", ctypes.byref(copy), self.stream)

    def zero(self, target: int, size: int) -> None:
        """Fill with zero bytes."""
        self._do("cuMemsetD8Async", target, 0, size, self.stream)

    def synchronise(self) -> None:
        """Wait until everything asked for has happened. Raises: EngineError if something of it failed."""
        self._do("cuStreamSynchronize", self.stream)

    def capture(self, ask: Callable[[], object]) -> int:
        """Record what `ask` puts on the stream instead of doing it. Raises: EngineError if that cannot be recorded."""
        graph, executable, nodes = _Pointer(), _Pointer(), _Size()
        with self.lock:
            self._do("cuStreamBeginCapture_v2", self.stream, _THREAD_LOCAL)
            self._capturing = True
            try:
                ask()
            except BaseException:
                self._driver.cuStreamEndCapture(self.stream, ctypes.byref(graph))  # or the stream stays unusable
                raise
            else:
                self._call("cuStreamEndCapture", self.stream, ctypes.byref(graph))
                self._call("cuGraphGetNodes", graph, None, ctypes.byref(nodes))
                if nodes.value == 0:
                    raise EngineError("the NVIDIA driver: found no work on the stream that was captured")
                self._call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, 0)
            finally:
                self._capturing = False
                if graph:
                    self._call("cuGraphDestroy", graph)
                late, self._late = self._late, []
                for call in late:
                    self._call(*call)
        return executable.value or 0

    def launch(self, graph: int) -> None:
        """Do what `capture` recorded, on the same addresses."""
        self._do("cuGraphLaunch", graph, self.stream)

    def forget(self, graph: int) -> None:
        """Give back what `capture` made."""
        self._give_back("cuGraphExecDestroy", graph)

    def _give_back(self, name: str, *arguments: Any) -> None:
        """Garbage is collected at any time, so also by the thread that is capturing."""
        with self.lock:
            if self._capturing:
                self._late.append((name, *arguments))
            else:
                self._do(name, *arguments)

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


class BlockPool:
    """Hands out device memory, and keeps the `most` blocks freed last; none of them rather than run out of memory.

    Decodes of the same shapes ask for the same sizes in the same order, so they find the same addresses: what was
    captured at them for one request (CUDA graphs) serves the next. What a block holds is left as it is.
    """

    def __init__(self, memory: CudaMemory, most: int = MOST_KEPT) -> None:
        self._memory, self._most = memory, most
        self._used: dict[int, Block] = {}
        self._kept: dict[int, Block] = {}  # by address, the one freed last at the end

    def allocate(self, size: int) -> int:
        """The address of `size` bytes, those of a freed block of that size if there is one."""
        with self._memory.lock:
            fitting = [address for address, block in list(self._kept.items()) if block.size == size]
            block = self._kept.pop(fitting[-1], None) if fitting else None
            if block is None:  # also if garbage was collected meanwhile, which frees blocks
                block = self._new(size)
            self._used[block.address] = block
            return block.address

    def free(self, address: int) -> None:
        """Keep what `allocate` gave; the oldest beyond `most` go back to the device."""
        with self._memory.lock:
            self._kept[address] = self._used.pop(address)
            for oldest in list(self._kept)[: -self._most]:
                self._kept.pop(oldest, None)

    def _new(self, size: int) -> Block:
        try:
            return Block(self._memory, size)
        except EngineError:
            if not self._kept:
                raise
            self._kept.clear()
            return Block(self._memory, size)


class Block:
    """Device memory that is given back when nothing refers to it any more."""

    def __init__(self, memory: CudaMemory | BlockPool, size: int) -> None:
        self.size = max(size, ALIGNMENT)
        self.address = memory.allocate(self.size)
        weakref.finalize(self, memory.free, self.address).atexit = False  # at exit the driver takes all back


class Graph:
    """Recorded work that is forgotten when nothing refers to it any more."""

    def __init__(self, memory: CudaMemory, ask: Callable[[], object]) -> None:
        self._memory, self._handle = memory, memory.capture(ask)
        weakref.finalize(self, memory.forget, self._handle).atexit = False

    def launch(self) -> None:
        """Ask for all of it once more."""
        self._memory.launch(self._handle)


def _start(array: Array) -> int:
    """The address of a contiguous array's first byte."""
    if not array.flags.c_contiguous:
        raise ValueError(f"an array {array.shape} with strides {array.strides}, expected a contiguous one")
    return int(array.ctypes.data)


@cache
def open_gpu() -> CudaMemory:
    """The first GPU; one stream for the whole process, so that engines never wait for each other by events."""
    return CudaMemory()
