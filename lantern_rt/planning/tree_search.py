"""The static tree, window, or drafts of rows, that gives the most tokens per second, by what was measured and costs.

Trees grow one node at a time, always by the node most likely to be accepted; among all trees met on the way, for
every limit on depth, the one with the highest rate of tokens wins (as in Sequoia, arXiv 2402.12374, and OPT-Tree,
arXiv 2406.17276, with measured costs in place of a budget of nodes). Of windows and drafts, the best of those measured.
"""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

import numpy as np

from ..runtime.tree_names import tree_name
from .acceptance_statistics import MethodStatistics
from .costs import HostCosts

MOST_NODES = 64

Path = tuple[int, ...]


class Plan(NamedTuple):
    """A tree, a window, or drafts of rows (none: plain decoding), tokens that a step should give, and its seconds.

    front: most nodes of a pass of rows.
    """

    paths: tuple[Path, ...]
    tokens: float
    seconds: float
    window: int | None = None
    drafts: int | None = None
    front: int = 0

    @property
    def nodes(self) -> int:
        """Nodes of a target pass, the root included, or most of them of rows; 1 for plain decoding."""
        return self.front or 1 + (self.window or len(self.paths))

    @property
    def drafting(self) -> dict[str, str | int]:
        """The parameter that carries it out: `tree`, `window` or `drafts`; empty for plain decoding."""
        if self.window is not None:
            return {"window": self.window}
        if self.drafts is not None:
            return {"drafts": self.drafts}
        return {"tree": tree_name(self.paths)} if self.paths else {}

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def best_plan(found: MethodStatistics, costs: HostCosts, most_nodes: int = MOST_NODES) -> Plan:
    """The plan for a method with the most tokens per second; plain decoding if nothing beats it."""
    return max([Plan((), 1.0, costs.plain_seconds), *_plans(found, costs, most_nodes)], key=lambda plan: plan.rate)


def speed_by_nodes(found: MethodStatistics, costs: HostCosts) -> dict[int, float]:
    """Tokens per second over those of plain decoding, of the best plan with so many nodes in a target pass."""
    best: dict[int, float] = {}
    for plan in _plans(found, costs, MOST_NODES):
        best[plan.nodes] = max(best.get(plan.nodes, 0.0), plan.rate * costs.plain_seconds)
    return dict(sorted(best.items()))


def _plans(found: MethodStatistics, costs: HostCosts, most_nodes: int) -> list[Plan]:
    """Windows, drafts, and trees of 2, 3, ... nodes for every limit on depth; of at most so many nodes."""
    windows = [one for one in found.windows if one.window < most_nodes]
    plans = [Plan((), one.tokens, costs.window_seconds(one.window), one.window) for one in windows]
    for one in found.fronts:
        if (most := max(one.passes)) <= most_nodes:
            seconds = sum(costs.front_seconds(nodes) * count for nodes, count in one.passes.items())
            each = seconds / sum(one.passes.values())
            plans.append(Plan((), one.tokens_per_pass, each, drafts=one.drafts, front=most))
    if costs.drafter is not None and found.acceptance_rates:
        rates = np.array(found.acceptance_rates)  # [depth, rank]
        # A child's chance, given its parent: the ranks before it are refused, it is not.
        before = np.cumprod(np.insert(1 - rates[:, :-1], 0, 1, axis=1), axis=1)
        chances = (before * rates).tolist()
        for depth in range(1, len(rates) + 1):
            plans += _growing(chances[:depth], costs, most_nodes)
    return plans


def _growing(chances: list[list[float]], costs: HostCosts, most_nodes: int) -> list[Plan]:
    """Plans of 2, 3, ... nodes; chances: `[depth][rank]`, as deep as the trees may be."""
    open_paths: list[tuple[float, Path]] = [(-chances[0][0], (0,))]
    paths: list[Path] = []
    inner: set[Path] = set()
    slots: list[int] = []  # nodes of each drafter pass: the root's, then those that have children, level by level
    tokens, plans = 1.0, []
    while open_paths and len(paths) < most_nodes - 1:
        chance, path = heapq.heappop(open_paths)
        if chance >= 0:
            break
        paths.append(path)
        tokens -= chance
        if path[:-1] not in inner:
            inner.add(path[:-1])
            slots += [0] * (len(path) - len(slots))
            slots[len(path) - 1] += 1
        plans.append(Plan(tuple(paths), tokens, costs.tree_seconds(len(paths) + 1, slots)))
        sibling = (*path[:-1], path[-1] + 1)
        for following in (sibling, (*path, 0)):
            if len(following) <= len(chances) and following[-1] < len(chances[0]):
                chance = math.prod(chances[depth][rank] for depth, rank in enumerate(following))
                heapq.heappush(open_paths, (-chance, following))
    return plans
