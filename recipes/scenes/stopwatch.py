"""Measurement of training time."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """Counter of training seconds, which adds the seconds of earlier calls.

    When training runs on the CPU, only the computing time of the calling thread counts. So a process that is paused or
    waits for other processes loses no training time.

    Args:
        device: PyTorch device of the training.
        earlier_seconds: seconds of earlier calls.
    """

    def __init__(self, device: str, earlier_seconds: float = 0.0) -> None:
        self._now = time.thread_time if torch.device(device).type == "cpu" else time.monotonic
        self._start = self._now() - earlier_seconds

    def seconds(self) -> float:
        """Return the seconds of this call and earlier calls."""
        return self._now() - self._start
