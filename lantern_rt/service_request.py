"""State of one request in a `Service`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from .prepared import PreparedRequest
from .results import StreamStep, StreamStepBuilder
from .runtime import state
from .runtime.statistics import EngineTimer, Statistics, summarize_decode

Listener = Callable[[StreamStep | BaseException], None]


@dataclass(eq=False)
class ServiceRequest:
    """Request in a `Service`, whose thread alone may use it, but for `prepared_request` and `cancel`."""

    cancel_callback: Callable[[ServiceRequest], None]  # cancels a request in the service
    prepared_request: PreparedRequest
    listener: Listener  # called with each step, or with the error that ended the request
    wants_all_steps: bool  # whether the listener receives every step, or the last step only
    caller: str  # name of the caller; callers share the service equally
    deadline: float  # time limit in seconds after `arrival_time`
    arrival_time: float = field(default_factory=time.perf_counter)
    queue_seconds: float | None = None  # time before the first forward pass
    reserved_images: int = 0  # images that count toward the capacity; 0 after the end or a cancellation
    sequences: list[state.ImageSequence] = field(default_factory=list)  # one per image, once its prefix is computed
    # copies of the service's timers of target and drafter, made when the images were queued
    timers: tuple[EngineTimer, EngineTimer] = field(default_factory=lambda: (EngineTimer(), EngineTimer()))
    has_ended: bool = False  # whether the listener has received the last step or an error, or the request was cancelled

    def __post_init__(self) -> None:
        self.stream_state = StreamStepBuilder(
            len(self.prepared_request.images), self.prepared_request.plan.layout.num_codes
        )

    @property
    def is_waiting(self) -> bool:
        """Whether no image has a token yet, and the request is neither cancelled nor ended."""
        return bool(self.reserved_images) and not any(sequence.codes for sequence in self.sequences)

    def build_statistics(self, timers: tuple[EngineTimer, EngineTimer]) -> Statistics:
        """Return the statistics of a request that has just ended, from the service's timers of target and drafter."""
        target, drafter = (timer.elapsed_since(start) for timer, start in zip(timers, self.timers, strict=True))
        plan = self.prepared_request.plan
        records = [sequence.statistics for sequence in self.sequences]
        return summarize_decode(plan.method.method, plan.layout.num_codes, target, drafter, records)

    def cancel(self) -> None:
        """Cancel the request.

        Its capacity is free at once, and its KV cache after the current forward pass. The listener may still receive
        the result of this pass.
        """
        self.cancel_callback(self)
