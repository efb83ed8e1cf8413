"""Limits of the operating system on threads and memory of this process."""

from __future__ import annotations

import os
import threading
import time

from ..errors import EngineError


def check_thread_count(count: int) -> None:
    """Raise EngineError if the system does not allow `count` threads at once, the calling thread included.

    They are started to find out. ONNX Runtime and other libraries hang if they cannot start a thread.
    """
    done = threading.Event()
    threads = [threading.Thread(target=done.wait) for _ in range(count - 1)]
    try:
        for thread in threads:
            thread.start()
    except RuntimeError as error:
        problem = "the system does not allow so many threads"
        remedy = "raise `ulimit -u`, or give fewer threads"
        raise EngineError(problem, field="threads", found=str(count), remedy=remedy) from error
    finally:
        done.set()
        for thread in (thread for thread in threads if thread.ident):  # `ident` is None if the thread was not started
            thread.join()
            while os.path.exists(f"/proc/self/task/{thread.native_id}"):  # until then, the system counts the thread
                time.sleep(0.0001)


def read_host_memory(field: str) -> int:
    """Return a field of `psutil.virtual_memory()`, such as `available`, in bytes.

    On a host without /proc, psutil fails, and the size of the physical memory is returned instead.
    """
    import psutil  # type: ignore[import-untyped]

    try:
        return int(getattr(psutil.virtual_memory(), field))
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
