"""What a pass costs on this host: seconds against nodes, for target and drafter, at a typical past."""

from __future__ import annotations

import math
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, Field

from ..bundle.manifest import Manifest
from ..methods import Ar, Eagle, MethodConfig, Sjd
from ..runtime.engine import Engine, Pass
from ..runtime.passes import causal_pass
from .intervals import BELIEVED, FEWEST, spread, time_in_rounds

NODES = (2, 4, 8, 16, 32, 64)  # a pass never has fewer than two nodes
FIRST_STEPS = 3  # left out: the prefill, and passes whose shapes are new
EARLY = 32  # codes of the image that a pass sees which is compared with its first steps
# Seconds that passes of one size go on: the first ones find the caches full of what others read. After one over 64
# nodes and one of the drafter, 2 nodes of `scenes` took 1.98 ms, and 1.70 from the sixth on (measured here).
TURN = 0.01
EXACT_WINDOW, PROBE_CHAIN = Sjd(window=7), 4
RELAXED_WINDOW = Sjd(window=7, neighbors=10, lambda_=2.0)  # whose tokens take more work
AS_BEFORE = 1.5  # times slower or faster than while passes were timed the host may be while steps are

Seconds = Annotated[float, Field(ge=0, le=1e6)]


def _rising(cost: dict[int, float]) -> dict[int, float]:
    values = list(cost.values())
    if list(cost) != sorted(cost) or values != sorted(values) or min(*cost, *values) <= 0:
        raise ValueError("expected seconds above 0 that never fall, by numbers of nodes that rise")
    return cost


# seconds of one pass by its nodes, ascending
PassCost = Annotated[dict[int, Seconds], Field(min_length=1, max_length=100), AfterValidator(_rising)]


def pass_seconds(cost: PassCost, nodes: int) -> float:
    """Seconds of a pass over `nodes` nodes: on a line between those measured, past the last along the last line."""
    sizes = list(cost)
    if nodes <= sizes[0] or len(sizes) < 2:
        return cost[sizes[0]]
    right = min(bisect_left(sizes, nodes), len(sizes) - 1)
    n0, n1 = sizes[right - 1 : right + 1]
    return cost[n1] + (nodes - n1) * (cost[n1] - cost[n0]) / (n1 - n0)


@dataclass(frozen=True)
class HostCosts:
    """All a step costs: engine passes, and the work outside them.

    drafter: None where there is none. step: seconds outside the engines of a step that drafts nothing. level: further
    seconds for every drafter pass of a step. redraft: further seconds for every token of a window. steady: whether all
    of it can be believed; a host that is busy gives anything.
    """

    target: PassCost
    drafter: PassCost | None
    step: Seconds = 0.0
    level: Seconds = 0.0
    redraft: Seconds = 0.0
    steady: bool = True

    @property
    def plain_seconds(self) -> float:
        """Seconds of a step that drafts nothing."""
        return self.step + pass_seconds(self.target, 2)

    def tree_seconds(self, nodes: int, slots: Sequence[int]) -> float:
        """Seconds of a step over a tree of `nodes` nodes, drafted in one pass per level over `slots` nodes."""
        assert self.drafter is not None
        drafting = sum(pass_seconds(self.drafter, max(2, count)) + self.level for count in slots)
        return self.step + pass_seconds(self.target, max(2, nodes)) + drafting

    def window_seconds(self, window: int) -> float:
        """Seconds of a step of `sjd` with so many tokens drafted ahead."""
        return self.step + pass_seconds(self.target, window + 1) + window * self.redraft

    def front_seconds(self, nodes: int) -> float:
        """Seconds of a step of `rows` over so many nodes; each takes about what a token of a window does."""
        return self.step + pass_seconds(self.target, max(2, nodes)) + nodes * self.redraft


def measure_costs(
    manifest: Manifest, target: Engine, drafter: Engine | None, rows: int, seconds: float, deadline: float = math.inf
) -> HostCosts:
    """Costs of passes over 2, 4, 8, ... nodes at a past of half an image; nothing around them yet.

    Takes about `seconds`: there are as many sizes as can be repeated in that time, smallest first, at least two. Sizes
    that stay unknown are left out; where that leaves one, or not the smallest, the costs are unsteady. Past `deadline`,
    of `time.monotonic`, there is at most the first pass of each engine.
    """
    past = manifest.codes_per_image // 2
    makers = [_pass_maker(target, manifest, rows, past, None)]
    if drafter is not None:
        makers.append(_pass_maker(drafter, manifest, rows, past, manifest.target.hidden_size))
    began, jobs, firsts = time.perf_counter(), list[Callable[[], None]](), list[float]()
    for nodes in NODES:
        for make in makers:
            jobs.append(make(nodes))
            start = time.perf_counter()
            jobs[-1]()  # takes memory for a new shape, so that it counts only where there is nothing better
            firsts.append(time.perf_counter() - start)
        spent, round_seconds = time.perf_counter() - began, sum(max(TURN, first) for first in firsts)
        if (nodes > NODES[0] and spent + FEWEST * round_seconds > seconds) or time.monotonic() > deadline:
            break
    times = time_in_rounds(jobs, seconds - spent, deadline, turn=TURN)
    known = [own or [first] for own, first in zip(times, firsts, strict=True)]
    engines = [dict(zip(NODES, known[i :: len(makers)], strict=False)) for i in range(len(makers))]
    believed = [nodes for nodes in engines[0] if all(spread(own[nodes]) <= BELIEVED for own in engines)]
    if steady := len(believed) > 1 and believed[0] == NODES[0]:
        engines = [{nodes: own[nodes] for nodes in believed} for own in engines]
    costs = [rising_medians(own) for own in engines]
    return HostCosts(costs[0], costs[1] if drafter is not None else None, steady=steady)


def rising_medians(times: Mapping[int, Sequence[float]]) -> PassCost:
    """Medians by nodes, which never fall: sizes that contradict each other share the median of all their times.

    So one disturbed size lifts no other, as a running maximum would. It is isotonic regression by absolute errors.
    """
    blocks: list[tuple[list[int], list[float]]] = []
    for nodes, own in times.items():
        sizes, pooled = [nodes], list(own)
        while blocks and statistics.median(blocks[-1][1]) > statistics.median(pooled):
            smaller, earlier = blocks.pop()
            sizes, pooled = smaller + sizes, earlier + pooled
        blocks.append((sizes, pooled))
    return {nodes: statistics.median(pooled) for sizes, pooled in blocks for nodes in sizes}


def early_pass(manifest: Manifest, target: Engine, rows: int) -> Callable[[], None]:
    """A pass of plain decoding early in an image, to be timed again and again."""
    return _pass_maker(target, manifest, rows, EARLY, None)(NODES[0])


def _pass_maker(
    engine: Engine, manifest: Manifest, rows: int, codes: int, hidden_size: int | None
) -> Callable[[int], Callable[[], None]]:
    """Gives, for a number of nodes, a pass over a chain of them that can be run again and again.

    codes: of the image before them. hidden_size: of drafters, None for targets. The cache takes in two nodes of every
    pass, as a step's does.
    """
    past = manifest.condition.prefix + codes
    rng = np.random.default_rng(0)
    cache = engine.new_cache(rows, past + NODES[-1])
    padding = np.zeros((rows, 0), bool)

    def chain(nodes: int) -> Pass:
        hidden = None if hidden_size is None else rng.standard_normal((rows, nodes, hidden_size), np.float32)
        tokens = rng.integers(manifest.target.vocab_size, size=(rows, nodes))
        return causal_pass(engine, cache, tokens, manifest.target.max_positions - 1, padding, hidden)

    def run(batch: Pass) -> None:
        cache.append(engine.run(batch, cache).new_kv, [np.arange(2)] * rows)
        cache.truncate(np.full(rows, past))

    new_kv = engine.run(chain(min(NODES[-1], past)), cache).new_kv
    for start in range(0, past, NODES[-1]):  # a past that the graph itself computed, the same again and again
        cache.append(new_kv, [np.arange(min(NODES[-1], past - start))] * rows)
    return lambda nodes: partial(run, chain(nodes))


def with_overhead(
    costs: HostCosts,
    plain: Callable[[], object],
    decode: Callable[[MethodConfig], Iterator[object]],
    seconds: float,
    deadline: float = math.inf,
    window: Sjd = EXACT_WINDOW,
) -> HostCosts:
    """The costs with what a step, a token of a window like this one and a drafter pass take outside the engines.

    plain: an `early_pass`, timed beside the steps, as the host may be faster or slower by now. decode: one request,
    step by step, with a method. Takes about `seconds`; past `deadline` nothing is added.
    """
    methods: list[MethodConfig] = [Ar(), window]
    if costs.drafter is not None:
        methods.append(Eagle(tree=f"chain-{PROBE_CHAIN}"))
    steps = [partial(next, _endless(decode, method)) for method in methods]
    for step in steps * FIRST_STEPS:
        if time.monotonic() <= deadline:
            step()
    jobs: list[Callable[[], object]] = [plain, *steps]
    times = time_in_rounds(jobs, seconds, deadline, turn=min(TURN, seconds / (FEWEST * len(jobs))))
    if not all(times):
        return replace(costs, steady=False)
    alone, *medians = map(statistics.median, times)
    pace = alone / pass_seconds(costs.target, NODES[0])
    single, jacobi, *chain = (took / pace for took in medians)
    costs = replace(costs, step=max(0.0, single - pass_seconds(costs.target, NODES[0])))
    redraft = max(0.0, jacobi - costs.window_seconds(window.window)) / window.window
    level = max(0.0, chain[0] - costs.tree_seconds(PROBE_CHAIN + 1, [1] * PROBE_CHAIN)) / PROBE_CHAIN if chain else 0.0
    as_before = 1 / AS_BEFORE <= pace <= AS_BEFORE
    steady = costs.steady and as_before and all(spread(own) <= BELIEVED for own in times)
    return replace(costs, level=level, redraft=redraft, steady=steady)


def _endless(decode: Callable[[MethodConfig], Iterator[object]], method: MethodConfig) -> Iterator[object]:
    while True:
        yield from decode(method)
