"""Progress callbacks of exports; `Progress` takes the name of a task, the amount done and the whole amount."""

from __future__ import annotations

from collections.abc import Callable

from ..engines.contracts import Progress


def silent(what: str, done: int, total: int) -> None:
    """Ignore progress."""


def count_megabytes(what: str, total: int, progress: Progress) -> Callable[[int], None]:
    """Return a function that adds numbers of bytes and reports the sum in megabytes, rounded up.

    Args:
        what: name of the task.
        total: number of bytes of the whole task.
        progress: progress callback, first called with 0.
    """
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        progress(f"{what} (MB)", -(-done // 10**6), -(-total // 10**6))

    count(0)
    return count
