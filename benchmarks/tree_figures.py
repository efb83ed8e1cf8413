"""What a given tree should give and how it is drafted: what planning counts as it grows trees, tree by tree."""

from __future__ import annotations

import math
from collections.abc import Sequence

Path = tuple[int, ...]


def expected_tokens(paths: Sequence[Path], rates: Sequence[Sequence[float]]) -> float:
    """Tokens a step gives on average with a tree: every node's chance of being accepted, and the bonus.

    rates: `[depth][rank]`, chance that a tried token is accepted; 0 beyond.
    """

    def chance(depth: int, rank: int) -> float:
        if depth >= len(rates) or rank >= len(rates[depth]):
            return 0.0
        return rates[depth][rank] * math.prod(1 - rate for rate in rates[depth][:rank])

    return 1.0 + sum(math.prod(chance(depth, rank) for depth, rank in enumerate(path)) for path in paths)


def slots_per_level(paths: Sequence[Path]) -> list[int]:
    """Nodes of each drafter pass: the root's, then those that have children, level by level."""
    inner = {path[:-1] for path in paths}
    depth = max((len(path) for path in paths), default=0)
    return [sum(len(path) == level for path in inner) for level in range(depth)]
