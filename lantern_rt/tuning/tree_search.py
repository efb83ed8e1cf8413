"""The static tree that gives the most codes per second, from acceptance rates and costs.

Trees grow one node at a time, always by the node most likely to be accepted; among all trees met on the way, for
every limit on depth, the one with the highest rate of codes wins (as in Sequoia, arXiv 2402.12374, and OPT-Tree,
arXiv 2406.17276, with measured costs in place of a budget of nodes).

Does not know how rates and costs were measured.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .costs import HostCosts

MOST_NODES = 64

Path = tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """A tree (no paths: plain decoding), the codes a step is expected to give, and the seconds it should take."""

    paths: tuple[Path, ...]
    codes: float
    seconds: float

    @property
    def rate(self) -> float:
        """Codes per second."""
        return self.codes / self.seconds


def best_plan(rates: NDArray[np.float64], costs: HostCosts, most_nodes: int = MOST_NODES) -> Plan:
    """The plan with the most codes per second; plain decoding if nothing beats it.

    rates: `[depth, rank]`, chance that a tried code is accepted. Nodes count the root.
    """
    best = Plan((), 1.0, costs.seconds(1, ()))
    for depth in range(1, len(rates) + 1):
        for plan in _growing(rates, costs, depth, most_nodes):
            if plan.rate > best.rate:
                best = plan
    return best


def expected_codes(paths: tuple[Path, ...], rates: NDArray[np.float64]) -> float:
    """Codes a step gives on average with a tree: every node's chance of being accepted, and the bonus."""
    return 1.0 + sum(_chance(path, rates) for path in paths)


def slots_per_level(paths: tuple[Path, ...]) -> list[int]:
    """Nodes of each drafter pass: the root's, then those that have children, level by level."""
    inner = {path[:-1] for path in paths}
    depth = max((len(path) for path in paths), default=0)
    return [sum(len(path) == level for path in inner) for level in range(depth)]


def _growing(rates: NDArray[np.float64], costs: HostCosts, depth: int, most_nodes: int) -> list[Plan]:
    """Plans of 2, 3, ... nodes whose trees are at most `depth` deep."""
    open_paths: list[tuple[float, Path]] = [(-float(rates[0, 0]), (0,))]
    paths: list[Path] = []
    codes, plans = 1.0, []
    while open_paths and len(paths) < most_nodes - 1:
        chance, path = heapq.heappop(open_paths)
        if chance >= 0:
            break
        paths.append(path)
        codes -= chance
        plans.append(Plan(tuple(paths), codes, costs.seconds(len(paths) + 1, slots_per_level(tuple(paths)))))
        sibling = (*path[:-1], path[-1] + 1)
        for following in (sibling, (*path, 0)):
            if len(following) <= depth and following[-1] < rates.shape[1]:
                heapq.heappush(open_paths, (-_chance(following, rates), following))
    return plans


def _chance(path: Path, rates: NDArray[np.float64]) -> float:
    """Chance that a node is accepted: at every depth the ranks before it are refused, then it is accepted."""
    chance = 1.0
    for depth, rank in enumerate(path):
        if depth >= len(rates) or rank >= rates.shape[1]:
            return 0.0
        chance *= float(np.prod(1 - rates[depth, :rank]) * rates[depth, rank])
    return chance
