"""Requests of a service."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from .prepared import PreparedRequest
from .results import StreamState, StreamStep
from .runtime import state
from .runtime.statistics import EngineTimer, Statistics, summarize_decode

Listener = Callable[[StreamStep | BaseException], None]


@dataclass(eq=False)
class ServiceRequest:
    """Request in a service. Only `prepared_request` and `cancel` may be used outside the service's thread."""

    cancel_callback: Callable[[ServiceRequest], None]  # cancels the request in the service
    prepared_request: PreparedRequest
    listener: Listener
    wants_all_steps: bool  # whether the listener receives every step
    caller: str
    deadline: float  # time limit in seconds after `arrival_time`
    arrival_time: float = field(default_factory=time.perf_counter)
    queue_seconds: float | None = None  # time before the first forward pass
    reserved_images: int = 0  # images that count toward the capacity; 0 after the end or a cancellation
    sequences: list[state.ImageSequence] = field(default_factory=list)
    timers: tuple[EngineTimer, EngineTimer] = field(
        default_factory=lambda: (EngineTimer(), EngineTimer())
    )  # target and drafter clock at the start
    has_ended: bool = False

    def __post_init__(self) -> None:
        self.stream_state = StreamState(len(self.prepared_request.images), self.prepared_request.plan.layout.num_codes)

    @property
    def is_waiting(self) -> bool:
        """Whether the request is neither cancelled nor ended, and no image has begun."""
        return bool(self.reserved_images) and not any(sequence.codes for sequence in self.sequences)

    def build_statistics(self, timers: tuple[EngineTimer, EngineTimer]) -> Statistics:
        """Return the statistics of the request, which has just ended.

        Args:
            timers: clocks of the service's target and drafter.
        """
        target, drafter = (timer.elapsed_since(start) for timer, start in zip(timers, self.timers, strict=True))
        plan = self.prepared_request.plan
        records = [sequence.statistics for sequence in self.sequences]
        return summarize_decode(plan.method.method, plan.layout.num_codes, target, drafter, records)

    def cancel(self) -> None:
        """Cancel the request: free its capacity at once and its cache soon; the listener is not called again."""
        self.cancel_callback(self)
