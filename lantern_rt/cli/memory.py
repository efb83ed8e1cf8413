"""The most memory this process held at once, page cache aside.

Looked at by a thread: what the process itself allocated and touched, without files that are mapped, which the system
takes back whenever it likes. On Linux only: elsewhere the system does not tell them apart.
"""

from __future__ import annotations

import threading
from types import TracebackType

import psutil  # type: ignore[import-untyped]

_SECONDS = 0.01  # between looks


class PeakMemory:
    """`with PeakMemory() as peak: ...`, then `peak.bytes`; None where the system does not tell."""

    def __init__(self) -> None:
        self.bytes = anonymous_memory()
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="peak memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._watcher.join()

    def _watch(self) -> None:
        while self.bytes is not None and not self._done.wait(_SECONDS):
            self.bytes = max(self.bytes, anonymous_memory() or 0)


def anonymous_memory() -> int | None:
    """Bytes of memory in use, files aside; None where the system does not tell."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared) if psutil.LINUX else None
