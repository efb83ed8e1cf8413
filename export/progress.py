"""Who is told how much of a long piece of work is done, and of how much.

Readers of checkpoints are called through families and parts of models, which know nothing of progress: they find who is
told in their context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from ..engines.contracts import Progress

Item = TypeVar("Item")


def _nobody(what: str, done: int, total: int) -> None:
    pass


_told: ContextVar[Progress] = ContextVar("told", default=_nobody)


@contextmanager
def telling(progress: Progress) -> Iterator[None]:
    """Whoever reads a checkpoint inside the block tells `progress`."""
    token = _told.set(progress)
    try:
        yield
    finally:
        _told.reset(token)


def count_read(what: str, total: int) -> Callable[[int], None]:
    """As `count_megabytes`, for whoever is told in this context."""
    return count_megabytes(what, total, _told.get())


def count_megabytes(what: str, total: int, progress: Progress) -> Callable[[int], None]:
    """Takes sizes of pieces in bytes, and tells `progress` in megabytes, begun ones too, at first of none."""
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        progress(f"{what} (MB)", -(-done // 10**6), -(-total // 10**6))

    count(0)
    return count


def count_each(what: str, items: Sequence[Item], progress: Progress) -> Iterator[Item]:
    """The items, counted as they are done."""
    for done, item in enumerate(items):
        progress(what, done, len(items))
        yield item
    progress(what, len(items), len(items))
