"""Time that counts as training."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """Seconds of work, on from those of earlier calls.

    On a processor they are the calling thread's own: a process that is paused, or waits for others, loses nothing of
    the time that it was given.
    """

    def __init__(self, device: str, before: float = 0.0) -> None:
        self._now = time.thread_time if torch.device(device).type == "cpu" else time.monotonic
        self._start = self._now() - before

    def seconds(self) -> float:
        """Seconds so far."""
        return self._now() - self._start
