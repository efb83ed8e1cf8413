"""How well repeated timings agree on a host that does other things too: medians, where they lie, rounds until known.

Means believe every disturbance. A median does not, and its interval by order statistics assumes nothing about how
disturbances come.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

FEWEST = 5  # values that say anything: the least and the greatest of five enclose the median in 94 of 100 cases
WANTED = 0.03  # spread at which measuring ends before its time
BELIEVED = 0.1  # spread up to which a median counts: less than the gain that a prediction must promise


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Two of the values that enclose the median of all such values in about 90 of 100 cases; (0, inf) if too few.

    The k-th least and the k-th greatest miss it where fewer than k values lie on one side of it, as of so many coins.
    """
    count = len(values)
    if count < FEWEST:
        return 0.0, math.inf
    ordered, k = sorted(values), round((count - 1.645 * math.sqrt(count)) / 2)
    return ordered[k - 1], ordered[-k]


def spread(values: Sequence[float]) -> float:
    """How far the interval of the median reaches from it, as a share of it; infinite for too few values, or zeros."""
    if len(values) < FEWEST:
        return math.inf
    middle, (low, high) = statistics.median(values), median_interval(values)
    return max(high - middle, middle - low) / middle if middle > 0 else math.inf


def time_in_rounds(
    jobs: Sequence[Callable[[], object]],
    seconds: float,
    deadline: float = math.inf,
    untimed: int = 0,
    turn: float = 0.0,
) -> list[list[float]]:
    """Seconds of runs of each job, in rounds over all of them: what disturbs the host hits all alike, and is taken off.

    In a round a job runs again and again for `turn` seconds, at least once, and the later half of its runs counts: the
    first ones find the caches full of what others read. (Those of a turn are alike, so intervals come out narrow.)
    Rounds go on for `seconds`, at least `FEWEST`; from half of the time on they end when every median is known as well
    as is wanted, so that no passing disturbance is all that was seen. No run begins past `deadline`, of
    `time.monotonic`. The first `untimed` rounds do not count.
    """
    turns: list[list[list[float]]] = [[] for _ in jobs]
    began, rounds = time.perf_counter(), -untimed
    while True:
        for job, own in zip(jobs, turns, strict=True):
            until, took = time.perf_counter() + turn, list[float]()
            while not took or time.perf_counter() < until:
                if time.monotonic() > deadline:
                    return evened(turns)
                start = time.perf_counter()
                job()
                took.append(time.perf_counter() - start)
            own += [took[len(took) // 2 :]] if rounds >= 0 else ()
        rounds, spent = rounds + 1, time.perf_counter() - began
        if rounds >= FEWEST and spent > seconds / 2:
            times = evened(turns)
            if spent > seconds or all(spread(own) <= WANTED for own in times):
                return times


def evened(turns: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """All seconds of each job's turns, over the pace of their round: how much slower than usual most jobs were in it.

    Neighbours make a virtual machine slower by up to a third for seconds at a time, whatever it does. Of fewer than
    three jobs none can be told from the host; they stay as they are.
    """
    medians = [[statistics.median(took) for took in own] for own in turns]
    usual = [statistics.median(own or [0.0]) for own in medians]
    paces = []
    for number in range(max(map(len, turns), default=0)):
        slower = [own[number] / each for own, each in zip(medians, usual, strict=True) if number < len(own) and each]
        paces.append(statistics.median(slower) if len(slower) > 2 else 1.0)
    return [[took / pace for turn, pace in zip(own, paces, strict=False) for took in turn] for own in turns]
