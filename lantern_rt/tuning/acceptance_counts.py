"""How often drafted tokens are accepted, by depth in the tree and rank among siblings: counted from decoding.

Rank r at depth d is *tried* when its parent is on the walked path and the siblings before it were refused. The
share of tried tokens that are accepted is nearly independent of the tree, so that rates measured with one tree
predict what another would accept (Sequoia, arXiv 2402.12374, calls them positional acceptance).
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..runtime.scheduler import RequestStep

DEPTHS, RANKS = 10, 12
PRIOR = 20.0  # tries that a depth borrows from the one above it
# Wide where siblings are often tried, deep along first children: every rate gets some tries.
PROBE_PATHS = (
    *((rank,) for rank in range(8)),
    *((0, rank) for rank in range(6)),
    *((1, rank) for rank in range(4)),
    *((2, 0), (2, 1), (3, 0)),
    *((0,) * depth + (rank,) for depth in range(2, 4) for rank in range(4)),
    *((1, 0, 0), (1, 0, 1), (0, 1, 0), (0, 1, 1)),
    *((0,) * depth + (rank,) for depth in range(4, 7) for rank in range(2)),
)
PROBE_DEPTH = max(map(len, PROBE_PATHS))


class AcceptanceCounts:
    """Tokens tried and accepted, float64 `[depth, rank]`; children of the root have depth 0."""

    def __init__(self) -> None:
        self.tried: NDArray[np.float64] = np.zeros((DEPTHS, RANKS))
        self.accepted: NDArray[np.float64] = np.zeros((DEPTHS, RANKS))

    def add(self, part: RequestStep) -> None:
        """Count one request's step; a step without a tree counts nothing."""
        if part.tree is None or part.acceptance is None:
            return
        path = [*part.acceptance.path, -1]
        for depth, (node, following) in zip(range(DEPTHS), pairwise(path), strict=False):
            for rank, child in enumerate(part.tree.structure.children[node][:RANKS]):
                self.tried[depth, rank] += 1
                if child == following:
                    self.accepted[depth, rank] += 1
                    break

    def rates(self) -> NDArray[np.float64]:
        """Acceptance rates `[depth, rank]`; a depth with few tries leans on the depth above, one with none is 0.

        A rank that was never tried anywhere has rate 0: no tree is built on what was not seen.
        """
        rates = np.zeros_like(self.tried)
        prior = self.accepted.sum(0) / np.maximum(self.tried.sum(0), 1)
        for depth in range(DEPTHS):
            if self.tried[depth].sum() == 0:
                break
            prior = (self.accepted[depth] + PRIOR * prior) / (self.tried[depth] + PRIOR)
            rates[depth] = prior
        return rates
