"""The most memory this process held at once, page cache aside.

Looked at by a thread: what the process itself allocated and touched, without files that are mapped, which the system
takes back whenever it likes. On Linux only: elsewhere the system does not tell them apart.
"""

from __future__ import annotations

import threading

import psutil  # type: ignore[import-untyped]

_SECONDS = 0.01  # between looks


class PeakMemory(threading.Thread):
    """`with PeakMemory() as peak: ...`, then `peak.bytes`; None where the system does not tell."""

    def __init__(self) -> None:
        super().__init__(name="peak memory", daemon=True)
        self.bytes = anonymous_memory()
        self._done = threading.Event()

    def __enter__(self) -> PeakMemory:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()

    def run(self) -> None:
        """Look until the block ends."""
        while self.bytes is not None and not self._done.wait(_SECONDS):
            self.bytes = max(self.bytes, anonymous_memory() or 0)


def anonymous_memory() -> int | None:
    """Bytes of memory in use, files aside; None where the system does not tell."""
    try:
        memory = psutil.Process().memory_info()
    except psutil.Error:  # Linux without /proc
        return None
    return int(memory.rss - memory.shared) if psutil.LINUX else None
