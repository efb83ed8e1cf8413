"""What a decode cost and gave: calls, seconds, accepted lengths, relaxation."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from .engine import Cache, Engine, Ints, Pass, PassOutput


class Clock:
    """Passes of one engine, and the seconds spent in it: in passes and in its cache taking in accepted nodes."""

    def __init__(self) -> None:
        self.calls = 0
        self.seconds = 0.0
        self.began = time.perf_counter()

    def copy(self) -> Clock:
        """The clock as it stands, and the moment."""
        clock = Clock()
        clock.calls, clock.seconds = self.calls, self.seconds
        return clock

    def since(self, before: Clock) -> Clock:
        """What has been counted since a copy was made."""
        clock = Clock()
        clock.calls, clock.seconds, clock.began = self.calls - before.calls, self.seconds - before.seconds, before.began
        return clock

    def run(self, engine: Engine, batch: Pass, cache: Cache) -> PassOutput:
        """Run one pass and count it."""
        start = time.perf_counter()
        output = engine.run(batch, cache)
        self.calls += 1
        self.seconds += time.perf_counter() - start
        return output

    def append(self, cache: Cache, new_kv: Any, accepted_indices: list[Ints]) -> None:
        """Have the engine's cache take in accepted nodes."""
        start = time.perf_counter()
        cache.append(new_kv, accepted_indices)
        self.seconds += time.perf_counter() - start


@dataclass
class SequenceStatistics:
    """What one image cost. Its first token comes from the prefill pass and is no step."""

    accepted_per_step: list[int] = field(default_factory=list)  # drafted codes by step; of `rows`, codes but one
    tie_passes: int = 0  # passes that decided ties
    preserved: int = 0  # codes that were given, not drawn
    realised_tvd: float = 0.0  # summed total variation distance that relaxed acceptance gave away

    @property
    def target_passes(self) -> int:
        """Target passes this image took part in, the prefill and those for ties included."""
        return 1 + len(self.accepted_per_step) + self.tie_passes


@dataclass(frozen=True)
class Statistics:
    """What a whole decode cost."""

    method: str  # its name
    images: int  # how many were decoded
    target_passes: int  # engine calls, each over the whole batch, or over one sequence where it decides a tie
    drafter_passes: int  # engine calls of the drafter
    # drawn tokens of an image over the target passes it took part in (the prefill and those for ties included),
    # averaged over images
    tokens_per_forward_pass: float
    accepted_lengths: list[int]  # how many steps accepted 0, 1, 2, ... drafted tokens, the bonus not counted
    seconds: float  # wall time
    target_seconds: float  # inside the target's engine, in passes and appending to its cache
    drafter_seconds: float  # inside the drafter's
    host_seconds: float  # the rest
    realised_tvd: float  # mean over images of the summed total variation distance that relaxed acceptance gave away
    per_image: list[SequenceStatistics] = field(repr=False)  # of each image


def summarise(
    method: str, codes_per_image: int, target: Clock, drafter: Clock, sequences: list[SequenceStatistics]
) -> Statistics:
    """Statistics of a decode that began with the target's clock and ends now."""
    seconds = time.perf_counter() - target.began
    steps = [n for sequence in sequences for n in sequence.accepted_per_step]
    tokens = [(codes_per_image - sequence.preserved) / sequence.target_passes for sequence in sequences]
    return Statistics(
        method=method,
        images=len(sequences),
        target_passes=target.calls,
        drafter_passes=drafter.calls,
        tokens_per_forward_pass=sum(tokens) / len(tokens),
        accepted_lengths=[steps.count(n) for n in range(max(steps, default=-1) + 1)],
        seconds=seconds,
        target_seconds=target.seconds,
        drafter_seconds=drafter.seconds,
        host_seconds=seconds - (target.seconds + drafter.seconds),
        realised_tvd=sum(r.realised_tvd for r in sequences) / len(sequences),
        per_image=sequences,
    )
