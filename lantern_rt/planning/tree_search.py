"""The static tree, or the window, that gives the most tokens per second, from what was measured and costs.

Trees grow one node at a time, always by the node most likely to be accepted; among all trees met on the way, for
every limit on depth, the one with the highest rate of tokens wins (as in Sequoia, arXiv 2402.12374, and OPT-Tree,
arXiv 2406.17276, with measured costs in place of a budget of nodes). Of windows, the best of those measured.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ..methods import MethodConfig
from ..runtime.tree_names import tree_name
from .costs import HostCosts

MOST_NODES = 64

Path = tuple[int, ...]
Drafts = TypeVar("Drafts", bound=MethodConfig)


@dataclass(frozen=True)
class Plan:
    """A tree or a window (neither: plain decoding), the tokens a step should give, and the seconds it should take."""

    paths: tuple[Path, ...]
    tokens: float
    seconds: float
    window: int | None = None

    @property
    def drafts(self) -> bool:
        """Whether it is more than plain decoding."""
        return bool(self.paths) or self.window is not None

    @property
    def drafting(self) -> dict[str, str | int]:
        """The parameter that carries it out: `tree` or `window`; empty for plain decoding."""
        if self.window is not None:
            return {"window": self.window}
        return {"tree": tree_name(self.paths)} if self.paths else {}

    def applied_to(self, method: Drafts) -> Drafts:
        """The method with this tree or window."""
        return method.model_copy(update=self.drafting)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def best_plan(
    rates: NDArray[np.float64], windows: Mapping[int, float], costs: HostCosts, most_nodes: int = MOST_NODES
) -> Plan:
    """The plan with the most tokens per second; plain decoding if nothing beats it.

    rates: `[depth, rank]`, chance that a tried token is accepted; empty without a drafter. windows: tokens per forward
    pass by window. Nodes count the root.
    """
    best = Plan((), 1.0, costs.plain_seconds)
    plans = [Plan((), codes, costs.window_seconds(window), window) for window, codes in windows.items()]
    if costs.drafter is not None:
        plans += tree_plans(rates, costs, most_nodes)
    return max([best, *plans], key=lambda plan: plan.rate)


def tree_plans(rates: NDArray[np.float64], costs: HostCosts, most_nodes: int = MOST_NODES) -> list[Plan]:
    """Plans of 2, 3, ... nodes, for every limit on depth."""
    return [plan for depth in range(1, len(rates) + 1) for plan in _growing(rates, costs, depth, most_nodes)]


def speed_by_nodes(rates: NDArray[np.float64], windows: Mapping[int, float], costs: HostCosts) -> dict[int, float]:
    """Tokens per second over those of plain decoding, of the best plan with so many nodes in a target pass."""
    plans = [(window + 1, codes / costs.window_seconds(window)) for window, codes in windows.items()]
    if costs.drafter is not None:
        plans += [(len(plan.paths) + 1, plan.rate) for plan in tree_plans(rates, costs)]
    best: dict[int, float] = {}
    for nodes, rate in plans:
        best[nodes] = max(best.get(nodes, 0.0), rate * costs.plain_seconds)
    return dict(sorted(best.items()))


def expected_tokens(paths: tuple[Path, ...], rates: NDArray[np.float64]) -> float:
    """Tokens a step gives on average with a tree: every node's chance of being accepted, and the bonus."""
    chances = _chances(rates)
    return 1.0 + sum(_chance(path, chances) for path in paths)


def slots_per_level(paths: tuple[Path, ...]) -> list[int]:
    """Nodes of each drafter pass: the root's, then those that have children, level by level."""
    inner = {path[:-1] for path in paths}
    depth = max((len(path) for path in paths), default=0)
    return [sum(len(path) == level for path in inner) for level in range(depth)]


def _growing(rates: NDArray[np.float64], costs: HostCosts, depth: int, most_nodes: int) -> list[Plan]:
    """Plans of 2, 3, ... nodes whose trees are at most `depth` deep."""
    chances = _chances(rates)
    open_paths: list[tuple[float, Path]] = [(-chances[0][0], (0,))]
    paths: list[Path] = []
    inner: set[Path] = set()
    slots: list[int] = []
    codes, plans = 1.0, []
    while open_paths and len(paths) < most_nodes - 1:
        chance, path = heapq.heappop(open_paths)
        if chance >= 0:
            break
        paths.append(path)
        codes -= chance
        if path[:-1] not in inner:
            inner.add(path[:-1])
            slots += [0] * (len(path) - len(slots))
            slots[len(path) - 1] += 1
        plans.append(Plan(tuple(paths), codes, costs.tree_seconds(len(paths) + 1, slots)))
        sibling = (*path[:-1], path[-1] + 1)
        for following in (sibling, (*path, 0)):
            if len(following) <= depth and following[-1] < rates.shape[1]:
                heapq.heappush(open_paths, (-_chance(following, chances), following))
    return plans


def _chances(rates: NDArray[np.float64]) -> list[list[float]]:
    """Chance `[depth][rank]` that a child is accepted, given its parent: ranks before it are refused, it is not."""
    refused = np.cumprod(1 - rates, axis=1)
    before = np.concatenate([np.ones((len(rates), 1)), refused[:, :-1]], axis=1)
    return [[float(chance) for chance in row] for row in before * rates]


def _chance(path: Path, chances: list[list[float]]) -> float:
    """Chance that a node is accepted: at every depth its own, given its parent."""
    chance = 1.0
    for depth, rank in enumerate(path):
        if depth >= len(chances) or rank >= len(chances[depth]):
            return 0.0
        chance *= chances[depth][rank]
    return chance
