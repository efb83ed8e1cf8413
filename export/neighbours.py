"""Which codes look alike: each code's nearest codes by Euclidean distance between codebook rows.

Distances are sums of squared differences in float64, a block of rows at a time, so the order is exact and
memory stays small. Does not know where the rows come from or what neighbours are for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST = 1024  # neighbours kept per code, where there are as many
_BLOCK_BYTES = 1 << 20  # of one float64 block of distances: it stays in a core's cache


@dataclass(frozen=True)
class Neighbours:
    """`indices [codes, k]`, nearest first, the code itself left out; `distances [codes, k]` float32."""

    indices: NDArray[np.unsignedinteger[Any]]
    distances: NDArray[np.float32]


def neighbour_table(codebook: NDArray[np.floating[Any]], k: int = MOST) -> Neighbours:
    """The `k` nearest rows of every row of `codebook [codes, width]`; equal distances in order of index."""
    codes, _ = codebook.shape
    k = min(k, codes - 1)
    columns = np.ascontiguousarray(codebook.T, np.float64)  # [width, codes]
    indices = np.empty((codes, k), np.min_scalar_type(codes - 1))
    distances = np.empty((codes, k), np.float32)
    block = max(1, _BLOCK_BYTES // (8 * codes))
    for start in range(0, codes, block):
        rows = np.arange(start, min(start + block, codes))
        square = np.zeros((len(rows), codes))
        for column in columns:
            difference = column[rows, None] - column
            square += np.square(difference, out=difference)
        square[np.arange(len(rows)), rows] = np.inf  # itself, last of all
        nearest = np.sort(np.argpartition(square, k - 1)[:, :k]) if k < codes - 1 else _all_but(rows, codes)
        close = np.take_along_axis(square, nearest, 1)
        order = np.argsort(close, kind="stable")  # of equal distances, the smaller index stays first
        indices[rows] = np.take_along_axis(nearest, order, 1)
        distances[rows] = np.sqrt(np.take_along_axis(close, order, 1))
    return Neighbours(indices, distances)


def _all_but(rows: NDArray[np.int64], codes: int) -> NDArray[np.int64]:
    """Every code but the row's own, in order: `[rows, codes - 1]`."""
    others = np.arange(codes - 1)
    return others + (others >= rows[:, None])
