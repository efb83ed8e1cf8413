"""What a pass costs on this host: seconds against nodes, for target and drafter, at a typical past.

Does not know trees, acceptance or prompts.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..runtime.engine import Engine, Pass

NODES = (2, 4, 8, 16, 32, 64)  # a pass never has fewer than two nodes


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
    seconds for every drafter pass of a step. redraft: further seconds for every code of a window.
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
        """Seconds of a step of `sjd` with so many codes drafted ahead."""
        return self.step + self.target.at(window + 1) + window * self.redraft


def measure_pass(
    engine: Engine, rows: int, past: int, width: int, vocabulary: int, drafts: bool, budget: float
) -> PassCost:
    """Time passes over 2, 4, 8, ... nodes after `past` committed ones; stops growing when `budget` seconds are spent.

    The cache takes in two nodes of every pass, as a step's does. The median of repeats; the smallest sizes come first,
    so that a short budget still gives a curve.
    """
    rng = np.random.default_rng(0)
    cache = engine.new_cache(rows, past + NODES[-1])
    for start in range(0, past, 64):  # fill the past with what the graph itself computes
        nodes = min(64, past - start)
        output = engine.run(_pass(engine, cache, rows, nodes, start, width, vocabulary, drafts, rng), cache)
        cache.append(output.new_kv, [np.arange(nodes)] * rows)
    began = time.perf_counter()
    sizes: list[int] = []
    seconds: list[float] = []
    for nodes in NODES:
        batch = _pass(engine, cache, rows, nodes, past, width, vocabulary, drafts, rng)
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


def _pass(
    engine: Engine,
    cache: object,
    rows: int,
    nodes: int,
    past: int,
    width: int,
    vocabulary: int,
    drafts: bool,
    rng: np.random.Generator,
) -> Pass:
    """A causal chain of random codes after `past` columns."""
    past_length = engine.next_past_length(cache, nodes)  # type: ignore[arg-type]
    attention_mask = np.zeros((rows, nodes, past_length + nodes), bool)
    attention_mask[:, :, :past] = True
    attention_mask[:, :, past_length:] = np.tri(nodes, dtype=bool)
    return Pass(
        positions=np.broadcast_to(past + np.arange(nodes) % 8, (rows, nodes)),
        attention_mask=attention_mask,
        tokens=rng.integers(vocabulary, size=(rows, nodes)),
        hidden=rng.standard_normal((rows, nodes, width), np.float32) if drafts else None,
    )
