"""Memory of the first GPU and one stream of work on it, through the NVIDIA driver's own library; nothing to install.

`DeviceMemory` is all that engines need of a device: memory by address, copies that take effect in the order in which
they were asked for, and recorded work that is asked for again as a whole (CUDA graphs). `CudaMemory` is the GPU; tests
put the host's memory in its place.

Does not know tensors, caches or TensorRT.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol

from ...errors import EngineError
from ..ort.session import Array
from .cuda_driver import LIBRARY

ALIGNMENT = 256  # bytes; what the driver gives, and what TensorRT asks of every tensor's address


class Allocator(Protocol):
    """Where blocks come from."""

    def allocate(self, size: int) -> int:
        """The address of `size` bytes, a multiple of `ALIGNMENT`; EngineError if there are none left."""
        ...

    def free(self, address: int) -> None:
        """Give back what `allocate` gave, once the work asked for so far is done."""
        ...


class DeviceMemory(Allocator, Protocol):
    """Memory addressed by integers, and a stream: everything asked for happens later, in that order.

    stream: its handle, for a library that puts work of its own on it.
    lock: to be held meanwhile, so that nothing of another thread gets into what is being recorded. Reentrant.
    """

    stream: int
    lock: AbstractContextManager[Any]

    def use(self) -> None:
        """Make the device the current one of this thread, for libraries that ask which one is."""
        ...

    def upload(self, target: int, source: Array) -> None:
        """Copy a contiguous array to the device; leave it unchanged until `synchronise`."""
        ...

    def download(self, target: Array, source: int) -> None:
        """Fill a contiguous array from the device; it is filled when `synchronise` has returned."""
        ...

    def copy2d(self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int) -> None:
        """Copy `height` lines of `width` bytes on the device; lines begin a pitch apart."""
        ...

    def zero(self, target: int, size: int) -> None:
        """Fill with zero bytes."""
        ...

    def synchronise(self) -> None:
        """Wait until everything asked for has happened; EngineError if something of it failed."""
        ...

    def capture(self, ask: Callable[[], object]) -> int:
        """Record what `ask` puts on the stream instead of doing it; EngineError if that cannot be recorded."""
        ...

    def launch(self, graph: int) -> None:
        """Do what `capture` recorded, on the same addresses."""
        ...

    def forget(self, graph: int) -> None:
        """Give back what `capture` made."""
        ...


class Block:
    """Device memory that is given back when nothing refers to it any more."""

    def __init__(self, memory: Allocator, size: int) -> None:
        self.size = max(size, ALIGNMENT)
        self.address = memory.allocate(self.size)
        weakref.finalize(self, memory.free, self.address).atexit = False  # at exit the driver takes all back


class Graph:
    """Recorded work that is forgotten when nothing refers to it any more."""

    def __init__(self, memory: DeviceMemory, ask: Callable[[], object]) -> None:
        self._memory, self._handle = memory, memory.capture(ask)
        weakref.finalize(self, memory.forget, self._handle).atexit = False

    def launch(self) -> None:
        """Ask for all of it once more."""
        self._memory.launch(self._handle)


_Word, _Size, _Pointer = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
_DEVICE_MEMORY = 2  # CU_MEMORYTYPE_DEVICE
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: what other threads do does not spoil a capture


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D_v2 of cuda.h."""

    _fields_ = (
        ("source_x", _Size),
        ("source_y", _Size),
        ("source_kind", ctypes.c_int),
        ("source_host", _Pointer),
        ("source_device", _Word),
        ("source_array", _Pointer),
        ("source_pitch", _Size),
        ("target_x", _Size),
        ("target_y", _Size),
        ("target_kind", ctypes.c_int),
        ("target_host", _Pointer),
        ("target_device", _Word),
        ("target_array", _Pointer),
        ("target_pitch", _Size),
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
    """The first GPU, in the primary context that TensorRT and others use too. Any thread may call.

    Host arrays are ordinary memory, not pinned: an upload has read its array, and a download has filled it, when the
    call returns. EngineError with the driver's own words if a call fails. One thread at a time uses the stream, also
    to wait for it: during a capture the driver allows neither.
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
        self.lock: AbstractContextManager[Any] = threading.RLock()
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
        """See `DeviceMemory`; once per thread."""
        if not getattr(self._threads, "current", False):
            self._call("cuCtxSetCurrent", self._context)
            self._threads.current = True

    def allocate(self, size: int) -> int:
        """See `Allocator`."""
        address = _Word()
        self._do("cuMemAllocAsync", ctypes.byref(address), size, self.stream, note=f" for {size / 2**20:,.0f} MiB")
        return address.value

    def free(self, address: int) -> None:
        """See `Allocator`."""
        self._give_back("cuMemFreeAsync", address, self.stream)

    def upload(self, target: int, source: Array) -> None:
        """See `DeviceMemory`."""
        self._do("cuMemcpyHtoDAsync_v2", target, _start(source), source.nbytes, self.stream)

    def download(self, target: Array, source: int) -> None:
        """See `DeviceMemory`."""
        self._do("cuMemcpyDtoHAsync_v2", _start(target), source, target.nbytes, self.stream)

    def copy2d(self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int) -> None:
        """See `DeviceMemory`."""
        copy = _Copy2D(
            source_kind=_DEVICE_MEMORY,
            source_device=source,
            source_pitch=source_pitch,
            target_kind=_DEVICE_MEMORY,
            target_device=target,
            target_pitch=target_pitch,
            width=width,
            height=height,
        )
        self._do("cuMemcpy2DAsync_v2", ctypes.byref(copy), self.stream)

    def zero(self, target: int, size: int) -> None:
        """See `DeviceMemory`."""
        self._do("cuMemsetD8Async", target, 0, size, self.stream)

    def synchronise(self) -> None:
        """See `DeviceMemory`."""
        self._do("cuStreamSynchronize", self.stream)

    def capture(self, ask: Callable[[], object]) -> int:
        """See `DeviceMemory`."""
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
        """See `DeviceMemory`."""
        self._do("cuGraphLaunch", graph, self.stream)

    def forget(self, graph: int) -> None:
        """See `DeviceMemory`."""
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


def _start(array: Array) -> int:
    """The address of a contiguous array's first byte."""
    if not array.flags.c_contiguous:
        raise ValueError(f"an array {array.shape} with strides {array.strides}, expected a contiguous one")
    return int(array.ctypes.data)


@cache
def open_gpu() -> CudaMemory:
    """The first GPU; one stream for the whole process, so that engines never wait for each other by events."""
    return CudaMemory()
