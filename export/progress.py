"""Progress callbacks of exports. A callback takes the name of a task, the finished amount and the whole amount."""

from __future__ import annotations

from collections.abc import Callable

from ..engines.contracts import Progress


def ignore_progress(*_: object) -> None: ...


def make_megabyte_counter(task: str, total_bytes: int, progress: Progress) -> Callable[[int], None]:
    """Return a function that adds up numbers of bytes and reports the sum in megabytes, rounded up, at first 0."""
    done = 0

    def add_bytes(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(f"{task} (MB)", -(-done // 10**6), -(-total_bytes // 10**6))

    add_bytes(0)
    return add_bytes
