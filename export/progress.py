"""How much of a long piece of work is done: `Progress` takes what is done, an amount of it, and the whole amount."""

from __future__ import annotations

from collections.abc import Callable

from ..engines.contracts import Progress


def silent(what: str, done: int, total: int) -> None:
    """Says nothing."""


def count_megabytes(what: str, total: int, progress: Progress) -> Callable[[int], None]:
    """Takes sizes of pieces in bytes, and reports their sum in megabytes, begun ones too, at first 0."""
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        progress(f"{what} (MB)", -(-done // 10**6), -(-total // 10**6))

    count(0)
    return count
