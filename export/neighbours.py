"""Which codes look alike: each code's nearest codes by Euclidean distance between codebook rows.

Distances come from matrix products in float64. Where their rounding could change the order, they are sums of squared
differences instead: the order is exact. A block of rows at a time, so memory stays small.

Rows that are all points of a grid have the same ones everywhere, but for its edges: seconds, not minutes, for 64,000.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST = 1024  # neighbours kept per code, where there are as many
_BLOCK_BYTES = 1 << 20  # of one float64 block of distances: it stays in a core's cache


def neighbour_table(
    codebook: NDArray[np.floating[Any]],
    k: int = MOST,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> NDArray[np.unsignedinteger[Any]]:
    """Sort the rows of a codebook by their distance to each.

    Args:
        codebook: `[codes, width]`.
        k: how many of the nearest are kept.
        progress: told how many rows are done, of how many.

    Returns:
        `[codes, k]`, nearest first, the code itself left out; equal distances in order of index.
    """
    codes, width = codebook.shape
    k = min(k, codes - 1)
    regular = _grid_table(codebook, k, progress)
    if regular is not None:
        return regular
    table = np.ascontiguousarray(codebook, np.float64)
    columns, norms = np.ascontiguousarray(table.T), np.square(table).sum(1)
    error = 8 * (width + 4) * np.finfo(np.float64).eps * norms.max()  # of a product's square, with room to spare
    indices = np.empty((codes, k), np.min_scalar_type(codes - 1))
    progress(0, codes)
    block = max(1, _BLOCK_BYTES // (8 * codes))
    for start in range(0, codes, block):
        rows = np.arange(start, min(start + block, codes))
        square = norms[rows, None] + norms - 2 * table[rows] @ table.T
        indices[rows], close = _nearest(square, rows, k)
        if (np.diff(close) < 2 * error).any():
            square[:] = 0
            for column in columns:
                difference = column[rows, None] - column
                square += np.square(difference, out=difference)
            indices[rows], _ = _nearest(square, rows, k)
        progress(int(rows[-1]) + 1, codes)
    return indices


def _nearest(
    square: NDArray[np.float64], rows: NDArray[np.int64], k: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The k nearest of each row in order, and their squares and the next one's; `square [rows, codes]`."""
    square[np.arange(len(rows)), rows] = np.inf  # itself, last of all
    some = np.sort(np.argpartition(square, k)[:, : k + 1])
    close = np.take_along_axis(square, some, 1)
    order = np.argsort(close, kind="stable")  # of equal distances, the smaller index stays first
    return np.take_along_axis(some, order, 1)[:, :k], np.take_along_axis(close, order, 1)


def _grid_table(
    codebook: NDArray[np.floating[Any]], k: int, progress: Callable[[int, int], None]
) -> NDArray[np.unsignedinteger[Any]] | None:
    """The table of rows that are all combinations of evenly spaced numbers, the first column changing fastest."""
    codes, points = len(codebook), [np.unique(column).astype(np.float64) for column in codebook.T]
    sizes, gaps = [len(own) for own in points], [np.unique(np.diff(own)) for own in points]
    if prod(sizes) != codes or any(len(gap) != 1 for gap in gaps):
        return None
    digits = np.unravel_index(np.arange(codes), sizes, order="F")
    if not np.array_equal(np.stack([own[at] for own, at in zip(points, digits, strict=True)], 1), codebook):
        return None
    # between any two rows, [steps, columns]
    steps = np.stack(np.meshgrid(*(np.arange(1 - n, n) for n in sizes), indexing="ij"), -1).reshape(-1, len(sizes))
    squares, shifts = np.square(steps * np.concatenate(gaps)).sum(1), steps @ np.cumprod([1, *sizes[:-1]])
    order = np.lexsort((shifts, squares))[1:]  # without the code itself; of equal distances, the smaller index first
    furthest = squares[order[(steps[order] >= 0).all(1)][k - 1]]  # of a corner's, which has the fewest around it
    order = order[squares[order] <= furthest]
    shifts, ends = shifts[order], [np.arange(n)[:, None] + own for n, own in zip(sizes, steps[order].T, strict=True)]
    within = [(own >= 0) & (own < len(own)) for own in ends]  # by column, [digits, steps]
    indices = np.empty((codes, k), np.min_scalar_type(codes - 1))
    for start in range(0, codes, block := max(1, _BLOCK_BYTES // len(order))):
        progress(start, codes)
        rows = np.arange(start, min(start + block, codes))
        inside = np.logical_and.reduce([own[at[rows]] for own, at in zip(within, digits, strict=True)])
        counts, places = inside.sum(1), np.nonzero(inside)[1]
        indices[rows] = rows[:, None] + shifts[places[(counts.cumsum() - counts)[:, None] + np.arange(k)]]
    progress(codes, codes)
    return indices
