"""What a pass costs on this host: seconds against nodes, for target and drafter, at a typical past."""

from __future__ import annotations

import itertools
import statistics
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from pydantic import Field

from ..bundle.manifest import Manifest
from ..methods import Ar, Eagle, MethodConfig, Sjd
from ..runtime.engine import Engine, Pass
from ..runtime.passes import causal_pass

NODES = (2, 4, 8, 16, 32, 64)  # a pass never has fewer than two nodes
STEPS = 8  # steps timed by a probe; the first ones, whose past is short, are left out
PROBE_WINDOW, PROBE_CHAIN = 7, 4

PassCost = Annotated[dict[int, float], Field(min_length=1)]  # seconds of one pass by its nodes, ascending


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
    seconds for every drafter pass of a step. redraft: further seconds for every token of a window.
    """

    target: PassCost
    drafter: PassCost | None
    step: float = 0.0
    level: float = 0.0
    redraft: float = 0.0

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


def measure_costs(manifest: Manifest, target: Engine, drafter: Engine | None, rows: int, seconds: float) -> HostCosts:
    """Costs of passes at a past of half an image; nothing around them yet. Takes about `seconds`."""
    of_target = _pass_cost(target, manifest, rows, None, seconds / 2)
    if drafter is None:
        return HostCosts(of_target, None)
    return HostCosts(of_target, _pass_cost(drafter, manifest, rows, manifest.target.hidden_size, seconds / 2))


def _pass_cost(engine: Engine, manifest: Manifest, rows: int, hidden_size: int | None, budget: float) -> PassCost:
    """Time passes over 2, 4, 8, ... nodes; stops growing when `budget` seconds are spent.

    hidden_size: of drafters, None for targets. The cache takes in two nodes of every pass, as a step's does. The median
    of repeats; the smallest sizes come first, so that a short budget still gives a curve.
    """
    rng = np.random.default_rng(0)
    past = manifest.condition.prefix + manifest.codes_per_image // 2
    cache = engine.new_cache(rows, past + NODES[-1])
    padding = np.zeros((rows, 0), bool)

    def chain(nodes: int) -> Pass:
        hidden = None if hidden_size is None else rng.standard_normal((rows, nodes, hidden_size), np.float32)
        tokens = rng.integers(manifest.target.vocab_size, size=(rows, nodes))
        return causal_pass(engine, cache, tokens, manifest.target.max_positions - 1, padding, hidden)

    for start in range(0, past, 64):  # fill the past with what the graph itself computes
        nodes = min(64, past - start)
        cache.append(engine.run(chain(nodes), cache).new_kv, [np.arange(nodes)] * rows)
    began = time.perf_counter()
    cost: dict[int, float] = {}
    for nodes in NODES:
        batch = chain(nodes)
        times: list[float] = []
        while len(times) < 9:
            start_of_pass = time.perf_counter()
            cache.append(engine.run(batch, cache).new_kv, [np.arange(2)] * rows)
            times.append(time.perf_counter() - start_of_pass)
            cache.truncate(np.full(rows, past))
            if len(times) >= 3 and time.perf_counter() - began > budget * (len(cost) + 1) / len(NODES):
                break
        cost[nodes] = statistics.median(times[1:])
        if len(cost) >= 2 and time.perf_counter() - began > budget:
            break
    return cost


def with_overhead(costs: HostCosts, decode: Callable[[MethodConfig], Iterator[object]]) -> HostCosts:
    """The costs with what a step, a token of a window and a drafter pass take outside the engines.

    decode: one request, step by step, with a method.
    """
    costs = replace(costs, step=max(0.0, _seconds_per_step(decode(Ar())) - pass_seconds(costs.target, 2)))
    of_window = _seconds_per_step(decode(Sjd(window=PROBE_WINDOW))) - costs.window_seconds(PROBE_WINDOW)
    of_chain = 0.0
    if costs.drafter is not None:
        expected = costs.tree_seconds(PROBE_CHAIN + 1, [1] * PROBE_CHAIN)
        of_chain = _seconds_per_step(decode(Eagle(tree=f"chain-{PROBE_CHAIN}"))) - expected
    return replace(costs, level=max(0.0, of_chain / PROBE_CHAIN), redraft=max(0.0, of_window / PROBE_WINDOW))


def _seconds_per_step(steps: Iterator[object]) -> float:
    """Seconds of one step, over `STEPS` steps after the first three; the decode is left where it stands."""
    deque(itertools.islice(steps, 3), maxlen=0)
    began = time.perf_counter()
    taken = sum(1 for _ in itertools.islice(steps, STEPS))
    return (time.perf_counter() - began) / max(1, taken)
