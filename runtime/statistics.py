"""Statistics of a decode: engine calls, seconds, acceptance lengths, and the effect of relaxed acceptance."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from .engine import Cache, Engine, Ints, PassInput, PassOutput


@dataclass
class EngineTimer:
    """Counter of the forward passes of one engine, and of the seconds spent in passes and in appending to its cache."""

    calls: int = 0
    seconds: float = 0.0
    start_time: float = field(default_factory=time.perf_counter)

    def copy(self) -> EngineTimer:
        """Return a timer with the same counts and a start time of now, to pass to `elapsed_since` later."""
        return EngineTimer(self.calls, self.seconds)

    def elapsed_since(self, start: EngineTimer) -> EngineTimer:
        """Return a timer that counts only the passes and seconds since the copy `start` was made."""
        return EngineTimer(self.calls - start.calls, self.seconds - start.seconds, start.start_time)

    def run_pass(self, engine: Engine, pass_input: PassInput, cache: Cache) -> PassOutput:
        start = time.perf_counter()
        output = engine.run(pass_input, cache)
        self.calls += 1
        self.seconds += time.perf_counter() - start
        return output

    def append_to_cache(self, cache: Cache, new_kv: Any, accepted_indices: list[Ints]) -> None:
        start = time.perf_counter()
        cache.append(new_kv, accepted_indices)
        self.seconds += time.perf_counter() - start


@dataclass
class SequenceStatistics:
    """Statistics of one image. The prefill pass, which samples the first token, is not a step."""

    accepted_per_step: list[int] = field(default_factory=list)  # accepted draft tokens; with `rows`, tokens - 1
    # Number of passes that recomputed near-ties: choices between two tokens that rounding could change.
    tie_passes: int = 0
    preserved: int = 0  # number of preserved codes, which are not generated
    # Total variation distance from the target's distribution that relaxed acceptance caused, summed over all tokens.
    realised_tvd: float = 0.0

    @property
    def target_passes(self) -> int:
        """Number of target passes that included this image: the prefill, the steps, and recomputed near-ties."""
        return 1 + len(self.accepted_per_step) + self.tie_passes


@dataclass(frozen=True)
class Statistics:
    """Statistics of a whole decode.

    Attributes:
        method: name of the method.
        images: number of images.
        target_passes: number of target passes, each over the batch, or over one sequence to recompute a near-tie.
        drafter_passes: number of drafter passes.
        tokens_per_forward_pass: generated tokens of an image divided by the target passes that included the image,
            averaged over images.
        accepted_lengths: number of steps that accepted 0, 1, 2, ... draft tokens. The token sampled after the accepted
            path does not count.
        seconds: wall-clock time of the decode.
        target_seconds: time in the target's passes and in appending to its cache.
        drafter_seconds: time in the drafter's passes and in appending to its cache.
        host_seconds: remaining time, spent in the Python code of the decode.
        realised_tvd: total variation distance from the target's distribution that relaxed acceptance caused, summed
            over the tokens of an image, averaged over images.
        per_image: statistics of each image.
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
    per_image: list[SequenceStatistics] = field(repr=False)


def summarize_decode(
    method: str,
    codes_per_image: int,
    target_timer: EngineTimer,
    drafter_timer: EngineTimer,
    sequence_statistics: list[SequenceStatistics],
) -> Statistics:
    """Return the statistics of a decode that began when `target_timer` was created and ends now."""
    seconds = time.perf_counter() - target_timer.start_time
    accepted = [count for sequence in sequence_statistics for count in sequence.accepted_per_step]
    tokens = [(codes_per_image - sequence.preserved) / sequence.target_passes for sequence in sequence_statistics]
    return Statistics(
        method=method,
        images=len(sequence_statistics),
        target_passes=target_timer.calls,
        drafter_passes=drafter_timer.calls,
        tokens_per_forward_pass=sum(tokens) / len(tokens),
        accepted_lengths=[accepted.count(length) for length in range(max(accepted, default=-1) + 1)],
        seconds=seconds,
        target_seconds=target_timer.seconds,
        drafter_seconds=drafter_timer.seconds,
        host_seconds=seconds - (target_timer.seconds + drafter_timer.seconds),
        realised_tvd=sum(sequence.realised_tvd for sequence in sequence_statistics) / len(sequence_statistics),
        per_image=sequence_statistics,
    )
