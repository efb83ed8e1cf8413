"""Time that counts as training."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """Counts seconds of work, starting from the seconds of earlier calls.

    On a processor, it counts time of the calling thread: a process that is paused or waits for others loses no training
    time.
    """

    def __init__(self, device: str, earlier_seconds: float = 0.0) -> None:
        self._now = time.thread_time if torch.device(device).type == "cpu" else time.monotonic
        self._start = self._now() - earlier_seconds

    def seconds(self) -> float:
        """Return the seconds so far."""
        return self._now() - self._start
