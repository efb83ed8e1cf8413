"""What a decode cost and gave: calls, seconds, accepted lengths, relaxation. Plain counting."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class CallClock:
    """Passes of one engine, and the seconds spent in it: in passes and in its cache taking in accepted nodes."""

    calls: int = 0
    seconds: float = 0.0


@dataclass
class Clock:
    """The engines' clocks of one decode, and when it began."""

    target: CallClock = field(default_factory=CallClock)
    drafter: CallClock = field(default_factory=CallClock)
    began: float = field(default_factory=time.perf_counter)


@dataclass
class RequestStatistics:
    """One image: tokens committed by each step (bonus included), candidates tried, and summed realised TVD.

    The first token comes from the prefill pass and is no step.
    """

    codes_per_step: list[int] = field(default_factory=list)
    tried: int = 0
    realised_tvd: float = 0.0

    def add(self, codes: int, tried: int, realised_tvd: float) -> None:
        """Count a step."""
        self.codes_per_step.append(codes)
        self.tried += tried
        self.realised_tvd += realised_tvd

    @property
    def target_passes(self) -> int:
        """Target passes this image took part in, the prefill included."""
        return 1 + len(self.codes_per_step)


@dataclass(frozen=True)
class Statistics:
    """A whole decode.

    target_passes, drafter_passes: engine calls, each over the whole batch. tokens_per_forward_pass: tokens of
    an image over the target passes it took part in (prefill included), averaged over images.
    accepted_lengths: how many steps accepted 0, 1, 2, ... drafted tokens, the bonus not counted. seconds:
    wall time; target_seconds and drafter_seconds: inside the engines, in passes and appending to their caches;
    host_seconds: the rest.
    realised_tvd: mean over images of the summed total variation distance that relaxed acceptance gave away.
    per_image: the same of every image.
    """

    method: str
    images: int
    target_passes: int
    drafter_passes: int
    tokens_per_forward_pass: float
    accepted_lengths: list[int]
    seconds: float
    target_seconds: float
    drafter_seconds: float
    host_seconds: float
    realised_tvd: float
    per_image: list[RequestStatistics]


def summarise(method: str, codes_per_image: int, clock: Clock, requests: list[RequestStatistics]) -> Statistics:
    """Statistics of a decode that ends now."""
    seconds = time.perf_counter() - clock.began
    steps = [n - 1 for request in requests for n in request.codes_per_step]
    lengths = [steps.count(n) for n in range(max(steps) + 1)] if steps else []
    in_engines = clock.target.seconds + clock.drafter.seconds
    return Statistics(
        method=method,
        images=len(requests),
        target_passes=clock.target.calls,
        drafter_passes=clock.drafter.calls,
        tokens_per_forward_pass=sum(codes_per_image / r.target_passes for r in requests) / len(requests),
        accepted_lengths=lengths,
        seconds=seconds,
        target_seconds=clock.target.seconds,
        drafter_seconds=clock.drafter.seconds,
        host_seconds=seconds - in_engines,
        realised_tvd=sum(r.realised_tvd for r in requests) / len(requests),
        per_image=requests,
    )
