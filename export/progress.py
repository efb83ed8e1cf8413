"""Progress callbacks of exports; `Progress` takes the name of a task, the amount done and the whole amount."""

from __future__ import annotations

from collections.abc import Callable

from ..engines.contracts import Progress


def ignore_progress(*_: object) -> None:
    """Ignore progress; the default progress callback."""


def count_megabytes(task: str, total: int, progress: Progress) -> Callable[[int], None]:
    """Return a function that adds numbers of bytes and reports the sum in megabytes, rounded up.

    Args:
        total: number of bytes of the whole task.
        progress: progress callback, first called with 0.
    """
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        progress(f"{task} (MB)", -(-done // 10**6), -(-total // 10**6))

    count(0)
    return count
