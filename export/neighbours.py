"""Tables of each code's nearest codes, by Euclidean distance between codebook vectors.

Distances are computed by matrix products in float64. If rounding could change the sequence of neighbours, the distances
are computed again as sums of squared differences. Rows are processed in blocks to save memory.

The vectors of some codebooks are all points of a regular grid. Neighbours then lie at the same offsets from every code,
except at the edges. Tables for 64,000 codes of a regular grid take seconds instead of minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_NEIGHBORS = 1024  # maximum number of neighbours of each code in a bundle
_BLOCK_BYTES = 1 << 20  # size of a float64 block of distances, which stays in a core's cache
_BLOCK_ROWS = 64  # minimum rows of a block: with fewer, 131,072 codes of width 256 would be read from memory too often


def compute_neighbour_table(
    codebook: NDArray[np.floating[Any]],
    k: int = MAX_NEIGHBORS,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> NDArray[np.unsignedinteger[Any]]:
    """Compute the `k` nearest codes of each code, by codebook vectors `[codes, width]`.

    `progress` gets the number of finished rows and the number of all rows.

    Returns:
        Codes `[codes, k]`, nearest first, without the code itself. Of codes at equal distance, the smaller comes first.
    """
    codes, width = codebook.shape
    k = min(k, codes - 1)
    regular = _compute_grid_neighbours(codebook, k, progress)
    if regular is not None:
        return regular
    table = np.ascontiguousarray(codebook, np.float64)
    columns = np.ascontiguousarray(table.T)
    norms = np.square(table).sum(1)
    error = 8 * (width + 4) * np.finfo(np.float64).eps * norms.max()  # upper bound of a squared distance's error
    indices = np.empty((codes, k), np.min_scalar_type(codes - 1))
    progress(0, codes)
    block = max(_BLOCK_ROWS, _BLOCK_BYTES // (8 * codes))
    for start in range(0, codes, block):
        rows = np.arange(start, min(start + block, codes))
        square = norms[rows, None] + norms - 2 * table[rows] @ table.T
        indices[rows], close = _find_nearest_codes(square, rows, k)
        unsure = rows[(np.diff(close) < 2 * error).any(1)]
        if len(unsure):
            square = np.zeros((len(unsure), codes))
            for column in columns:
                difference = column[unsure, None] - column
                square += np.square(difference, out=difference)
            indices[unsure], _ = _find_nearest_codes(square, unsure, k)
        progress(int(rows[-1]) + 1, codes)
    return indices


def _find_nearest_codes(
    squared_distances: NDArray[np.float64], rows: NDArray[np.int64], k: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the k nearest codes of each row, nearest first, and the squared distances of the nearest k + 1 codes.

    The squared distances `[rows, codes]` are changed; row i has those of code `rows[i]`.
    """
    squared_distances[np.arange(len(rows)), rows] = np.inf  # sorts the code itself last
    candidates = np.sort(np.argpartition(squared_distances, k)[:, : k + 1])
    close = np.take_along_axis(squared_distances, candidates, 1)
    order = np.argsort(close, kind="stable")  # stable: the smaller of two indices at equal distance stays first
    return np.take_along_axis(candidates, order, 1)[:, :k], np.take_along_axis(close, order, 1)


def _compute_grid_neighbours(
    codebook: NDArray[np.floating[Any]], k: int, progress: Callable[[int, int], None]
) -> NDArray[np.unsignedinteger[Any]] | None:
    """Compute the neighbours of a codebook that is a regular grid of points; return None for any other codebook.

    In a grid, the values of each column are evenly spaced, and the first column changes fastest from code to code.
    """
    codes = len(codebook)
    points = [np.unique(column).astype(np.float64) for column in codebook.T]
    sizes = [len(column) for column in points]
    gaps = [np.unique(np.diff(column)) for column in points]
    if prod(sizes) != codes or any(len(gap) != 1 for gap in gaps):
        return None
    digits = np.unravel_index(np.arange(codes), sizes, order="F")
    if not np.array_equal(np.stack([column[digit] for column, digit in zip(points, digits, strict=True)], 1), codebook):
        return None
    # Offsets between any two rows, in grid steps, [offsets, columns].
    steps = np.stack(np.meshgrid(*(np.arange(1 - n, n) for n in sizes), indexing="ij"), -1).reshape(-1, len(sizes))
    squares = np.square(steps * np.concatenate(gaps)).sum(1)
    shifts = steps @ np.cumprod([1, *sizes[:-1]])
    order = np.lexsort((shifts, squares))[1:]  # without the code itself; of equal distances, the smaller index first
    # No code needs a farther neighbour than a corner of the grid does, because a corner has the fewest near codes.
    furthest = squares[order[(steps[order] >= 0).all(1)][k - 1]]
    order = order[squares[order] <= furthest]
    shifts = shifts[order]
    ends = [np.arange(n)[:, None] + column for n, column in zip(sizes, steps[order].T, strict=True)]
    within = [(column >= 0) & (column < len(column)) for column in ends]  # per column, [digits, offsets]
    indices = np.empty((codes, k), np.min_scalar_type(codes - 1))
    block = max(1, _BLOCK_BYTES // len(order))
    for start in range(0, codes, block):
        progress(start, codes)
        rows = np.arange(start, min(start + block, codes))
        inside = np.logical_and.reduce([column[digit[rows]] for column, digit in zip(within, digits, strict=True)])
        counts = inside.sum(1)
        offsets = np.nonzero(inside)[1]
        indices[rows] = rows[:, None] + shifts[offsets[(counts.cumsum() - counts)[:, None] + np.arange(k)]]
    progress(codes, codes)
    return indices
