"""What a pass costs on this host: seconds against nodes, for target and drafter, at a typical past."""

from __future__ import annotations

import itertools
import statistics
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..bundle.manifest import Manifest
from ..runtime.engine import Engine, Pass
from ..runtime.passes import causal_pass

NODES = (2, 4, 8, 16, 32, 64)  # a pass never has fewer than two nodes
STEPS = 8  # steps timed by a probe; the first ones, whose past is short, are left out
PROBE_WINDOW, PROBE_CHAIN = 7, 4


@dataclass(frozen=True)
class PassCost:
    """Seconds of one pass at several numbers of nodes, ascending; between them a straight line."""

    nodes: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, nodes: int) -> float:
        """Seconds of a pass over `nodes` nodes; past the last measured number along the last line."""
        if nodes <= self.nodes[0] or len(self.nodes) < 2:
            return self.seconds[0]
        right = min(bisect_left(self.nodes, nodes), len(self.nodes) - 1)
        (n0, n1), (s0, s1) = self.nodes[right - 1 : right + 1], self.seconds[right - 1 : right + 1]
        return s1 + (nodes - n1) * (s1 - s0) / (n1 - n0)


@dataclass(frozen=True)
class HostCosts:
    """All a step costs: engine passes, and the work outside them.

    drafter: None where there is none. step: seconds outside the engines of a step that drafts nothing. level: further
    seconds for every drafter pass of a step. redraft: further seconds for every token of a window.
    """

    target: PassCost
    drafter: PassCost | None
    step: float
    level: float
    redraft: float = 0.0

    @property
    def plain_seconds(self) -> float:
        """Seconds of a step that drafts nothing."""
        return self.step + self.target.at(2)

    def tree_seconds(self, nodes: int, slots: Sequence[int]) -> float:
        """Seconds of a step over a tree of `nodes` nodes, drafted in one pass per level over `slots` nodes."""
        assert self.drafter is not None
        drafting = sum(self.drafter.at(max(2, count)) + self.level for count in slots)
        return self.step + self.target.at(max(2, nodes)) + drafting

    def window_seconds(self, window: int) -> float:
        """Seconds of a step of `sjd` with so many tokens drafted ahead."""
        return self.step + self.target.at(window + 1) + window * self.redraft


def measure_costs(manifest: Manifest, target: Engine, drafter: Engine | None, rows: int, seconds: float) -> HostCosts:
    """Cost curves of the engines at a past of half an image; nothing around them yet. Takes about `seconds`."""
    past = manifest.condition.prefix + manifest.codes_per_image // 2
    spec = manifest.target
    sizes = rows, past, spec.vocab_size, spec.max_positions - 1
    target_curve = measure_pass(target, *sizes, None, seconds / 2)
    drafter_curve = None if drafter is None else measure_pass(drafter, *sizes, spec.hidden_size, seconds / 2)
    return HostCosts(target_curve, drafter_curve, 0.0, 0.0)


def measure_pass(
    engine: Engine, rows: int, past: int, vocab_size: int, last_position: int, hidden_size: int | None, budget: float
) -> PassCost:
    """Time passes over 2, 4, 8, ... nodes after `past` committed ones; stops growing when `budget` seconds are spent.

    hidden_size: of drafters, None for targets. The cache takes in two nodes of every pass, as a step's does. The median
    of repeats; the smallest sizes come first, so that a short budget still gives a curve.
    """
    rng = np.random.default_rng(0)
    cache = engine.new_cache(rows, past + NODES[-1])
    padding = np.zeros((rows, 0), bool)

    def chain(nodes: int) -> Pass:
        hidden = None if hidden_size is None else rng.standard_normal((rows, nodes, hidden_size), np.float32)
        tokens = rng.integers(vocab_size, size=(rows, nodes))
        return causal_pass(engine, cache, tokens, last_position, padding, hidden)

    for start in range(0, past, 64):  # fill the past with what the graph itself computes
        nodes = min(64, past - start)
        cache.append(engine.run(chain(nodes), cache).new_kv, [np.arange(nodes)] * rows)
    began = time.perf_counter()
    sizes: list[int] = []
    seconds: list[float] = []
    for nodes in NODES:
        batch = chain(nodes)
        times: list[float] = []
        while len(times) < 9:
            start_of_pass = time.perf_counter()
            cache.append(engine.run(batch, cache).new_kv, [np.arange(2)] * rows)
            times.append(time.perf_counter() - start_of_pass)
            cache.truncate(np.full(rows, past))
            if len(times) >= 3 and time.perf_counter() - began > budget * (len(sizes) + 1) / len(NODES):
                break
        sizes.append(nodes)
        seconds.append(statistics.median(times[1:]))
        if len(sizes) >= 2 and time.perf_counter() - began > budget:
            break
    return PassCost(tuple(sizes), tuple(seconds))


def with_overhead(
    costs: HostCosts, plain: Iterator[object], window: Iterator[object], chain: Iterator[object] | None
) -> HostCosts:
    """The costs with what a step, a token of a window and a drafter pass take outside the engines.

    `plain`, `window` and `chain` are decodes of one request: with `ar`, with `sjd` over `PROBE_WINDOW` tokens, and with
    a chain of `PROBE_CHAIN` if there is a drafter.
    """
    costs = replace(costs, step=max(0.0, _seconds_per_step(plain) - costs.target.at(2)))
    redraft = max(0.0, (_seconds_per_step(window) - costs.window_seconds(PROBE_WINDOW)) / PROBE_WINDOW)
    level = 0.0
    if chain is not None:
        expected = costs.tree_seconds(PROBE_CHAIN + 1, [1] * PROBE_CHAIN)
        level = max(0.0, (_seconds_per_step(chain) - expected) / PROBE_CHAIN)
    return replace(costs, level=level, redraft=redraft)


def _seconds_per_step(steps: Iterator[object]) -> float:
    """Seconds of one step, over `STEPS` steps after the first three; the decode is left where it stands."""
    for _ in itertools.islice(steps, 3):
        pass
    began = time.perf_counter()
    taken = sum(1 for _ in itertools.islice(steps, STEPS))
    return (time.perf_counter() - began) / max(1, taken)
