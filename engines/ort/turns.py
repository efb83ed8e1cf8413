"""Turns on a device: many passes side by side, or one alone while it is recorded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from .providers import PROVIDERS


class Turns:
    """While a pass is recorded on a device nobody else may use it: CUDA fails whatever takes memory meanwhile."""

    def __init__(self) -> None:
        self._changed, self._running = threading.Condition(), 0

    @contextmanager
    def among_others(self) -> Iterator[None]:
        """Use the device beside other threads."""
        with self._changed:
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Use the device while no other thread does."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running)
            yield


_turns = {provider.name: Turns() for provider in PROVIDERS.values() if provider.recording}
_AT_ONCE = nullcontext()


def turn(provider: str, alone: bool = False) -> AbstractContextManager[None]:
    """Wait until this thread may use a provider's device, or use it alone; nobody waits where nothing is recorded."""
    if (turns := _turns.get(provider)) is None:
        return _AT_ONCE
    return turns.alone() if alone else turns.among_others()
