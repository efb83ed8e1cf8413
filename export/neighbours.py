"""Which codes look alike: each code's nearest codes by Euclidean distance between codebook rows.

Distances come from matrix products in float64. Where their rounding could change the order, they are sums of squared
differences instead: the order is exact. A block of rows at a time, so memory stays small.

Rows that are all points of a grid have the same neighbours everywhere, but for those beyond its edges: they are sorted
once. For 64,000 codes that takes seconds instead of minutes.
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
    counted: Callable[[int, int], None] = lambda done, total: None,
) -> NDArray[np.unsignedinteger[Any]]:
    """Sort the rows of a codebook by their distance to each.

    Args:
        codebook: `[codes, width]`.
        k: how many of the nearest are kept.
        counted: told how many rows are done, of how many.

    Returns:
        `[codes, k]`, nearest first, the code itself left out; equal distances in order of index.
    """
    codes, width = codebook.shape
    k = min(k, codes - 1)
    if points := _grid_points(codebook):
        return _grid_table(points, k, counted)
    table = np.ascontiguousarray(codebook, np.float64)
    columns, norms = np.ascontiguousarray(table.T), np.square(table).sum(1)
    error = 8 * (width + 4) * np.finfo(np.float64).eps * norms.max()  # of a product's square, with room to spare
    indices = np.empty((codes, k), np.min_scalar_type(codes - 1))
    counted(0, codes)
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
        counted(int(rows[-1]) + 1, codes)
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


def _grid_points(codebook: NDArray[np.floating[Any]]) -> list[NDArray[np.float64]]:
    """The numbers of each column, if rows are all their combinations, the first column changing fastest; else none."""
    points = [np.unique(column).astype(np.float64) for column in codebook.T]
    if prod(map(len, points)) != len(codebook) or any(len({*np.diff(own)}) != 1 for own in points):
        return []
    rows = np.stack([axis.ravel(order="F") for axis in np.meshgrid(*points, indexing="ij")], 1)
    return points if np.array_equal(rows, codebook) else []


def _grid_table(
    points: list[NDArray[np.float64]], k: int, counted: Callable[[int, int], None]
) -> NDArray[np.unsignedinteger[Any]]:
    """As `neighbour_table`, of all combinations of evenly spaced numbers."""
    sizes = [len(own) for own in points]
    bases, codes = np.cumprod([1, *sizes[:-1]]), prod(sizes)
    steps = np.stack(np.meshgrid(*(np.arange(1 - n, n) for n in sizes), indexing="ij"), -1).reshape(-1, len(sizes))
    squares, shifts = np.square(steps * [own[1] - own[0] for own in points]).sum(1), steps @ bases
    order = np.lexsort((shifts, squares))[1:]  # without the code itself; of equal distances, the smaller index first
    furthest = squares[order[(steps[order] >= 0).all(1)][k - 1]]  # of a corner's, which has the fewest around it
    order = order[squares[order] <= furthest]
    shifts, steps = shifts[order], steps[order]
    within = []  # per column, [numbers, steps]
    for size, own in zip(sizes, steps.T, strict=True):
        ends = np.arange(size)[:, None] + own
        within.append((ends >= 0) & (ends < size))
    indices = np.empty((codes, k), np.min_scalar_type(codes - 1))
    block = max(1, _BLOCK_BYTES // len(order))
    for start in range(0, codes, block):
        counted(start, codes)
        rows = np.arange(start, min(start + block, codes))
        inside = np.logical_and.reduce([own[rows // base % len(own)] for own, base in zip(within, bases, strict=True)])
        places = np.nonzero(inside)[1]
        counts = inside.sum(1)
        indices[rows] = rows[:, None] + shifts[places[(counts.cumsum() - counts)[:, None] + np.arange(k)]]
    counted(codes, codes)
    return indices
