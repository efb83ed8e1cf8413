"""Parallel orders: an image is drawn in groups of cells, one group in a pass, by a model that was trained so.

PAR (arXiv 2412.15119) draws the same place of several distant regions at once. A pass reads the codes of the group
before, and its nodes attend to each other and to everything before them. Where a group has more cells than the group
before, the missing inputs are learned vectors, which the target embeds as the tokens behind the codes.

NAR (arXiv 2503.10696) draws the diagonals of the grid. Its target has two heads: after each code, one has logits for
the cell to the right, the other for the cell below. A cell has the mean of the logits after its two neighbours.

The runtime counts the codes of an image with an order in the order of drawing: in sequences, in guidance for the first
tokens, and in preserved codes. Positions, noise and results belong to cells.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .engine import Floats, Ints
from .noise import GROUP_SIZE, Noise
from .pass_layout import PassLayout


@dataclass(frozen=True)
class Order:
    """Order of drawing; the manifest's `OrderSpec` explains the groups."""

    groups: tuple[tuple[int, ...], ...]  # cells of each group
    first_vector: int  # token of the first learned vector; the others follow it
    columns: int = 1  # number of columns of the grid
    two_heads: bool = False  # whether the target has logits for two cells after each code

    @cached_property
    def cells(self) -> Ints:
        """Cells in the order of drawing, int64 `[codes]`."""
        return np.array([cell for group in self.groups for cell in group], np.int64)

    @cached_property
    def starts(self) -> list[int]:
        """Number of codes drawn before each group, and at last the number of all codes, `[groups + 1]`."""
        return [0, *np.cumsum([len(group) for group in self.groups]).tolist()]

    @cached_property
    def _last_drawn(self) -> Ints:
        """The number in the order of drawing at which each cell and all cells before it are known, int64 `[codes]`."""
        return np.maximum.accumulate(np.argsort(self.cells))

    def count_complete(self, drawn: int) -> int:
        """Return the number of cells before the first gap once `drawn` codes are known."""
        return int(np.searchsorted(self._last_drawn, drawn))

    def group_at(self, drawn: int) -> int:
        """Return the first group of which nothing is among the first `drawn` codes."""
        return bisect_left(self.starts, drawn)

    def lay_out(self, groups: range, codes: Sequence[int] | Ints) -> PassLayout:
        """Return the pass nodes that draw these groups: one for each of their cells, or each cell of the group before.

        Args:
            groups: consecutive groups, not the first; later groups attend to earlier groups.
            codes: codes in the order of drawing, at least all codes before the last of `groups`.
        """
        tokens: list[int] = []
        positions: list[int] = []
        sources: list[tuple[int, int]] = []
        counts = [self._num_nodes(group) for group in groups]
        for group, count in zip(groups, counts, strict=True):
            start, end = self.starts[group - 1 : group + 1]
            vectors = count - (end - start)
            if self.two_heads:
                sources += self._sources(group, len(tokens))
            tokens += [*codes[start:end], *range(self.first_vector, self.first_vector + vectors)]
            # a vector has the first position behind the image, whose row of the rotary table is zero
            positions += [*self.groups[group - 1], *[len(self.cells)] * vectors]
        passes = np.repeat(np.arange(len(counts)), counts)
        ancestors = passes[:, None] >= passes
        averaged = np.array(sources, np.int64) if self.two_heads else None
        return PassLayout(np.array(tokens, np.int64), np.array(positions, np.int64), ancestors, averaged=averaged)

    def _num_nodes(self, group: int) -> int:
        """Return the number of pass nodes that draw a group."""
        return len(self.groups[group - 1 if self.two_heads else group])

    def _sources(self, group: int, first: int) -> Iterator[tuple[int, int]]:
        """Yield `PassLayout.averaged` of each cell of a group whose nodes begin at `first`."""
        nodes = {cell: node for node, cell in enumerate(self.groups[group - 1], first)}
        for cell in self.groups[group]:
            right = 2 * nodes[cell - 1] if cell % self.columns else None
            below = 2 * nodes[cell - self.columns] + 1 if cell >= self.columns else right
            assert below is not None, "the manifest allows no cell without neighbours but the first"
            yield below if right is None else right, below

    def prefix_logits(self, logits: Floats) -> Floats:
        """Return the logits of the first cell, float32 `[rows, 1, vocab_size]`.

        Args:
            logits: logits after the prefix, float32 `[rows, 1, sizes of all heads]`.
        """
        return average_logits(logits, np.array([[0, 1]])) if self.two_heads else logits

    def spans(self, num_codes: int, max_nodes: int) -> Iterator[range]:
        """Yield the groups that can be computed at once from the first `num_codes` codes, in parts.

        Args:
            num_codes: number of known codes, in the order of drawing.
            max_nodes: maximum number of nodes of a part; a part has at least one group.
        """
        last = next((g for g, start in enumerate(self.starts[:-1]) if start > num_codes), len(self.groups))
        first = 1
        while first < last:
            end = first + 1
            while end < last and sum(map(self._num_nodes, range(first, end + 1))) <= max_nodes:
                end += 1
            yield range(first, end)
            first = end


def average_logits(logits: Floats, averaged: Ints) -> Floats:
    """Return the mean of two logits for each code, float32 `[rows, codes, vocab_size]`.

    Args:
        logits: logits of two heads, float32 `[rows, nodes, 2 * vocab_size]`.
        averaged: `PassLayout.averaged`, int64 `[codes, 2]`.
    """
    heads = logits.reshape(len(logits), 2 * logits.shape[1], -1)  # [rows, nodes * heads, vocab_size]
    mean: Floats = (heads[:, averaged[:, 0]] + heads[:, averaged[:, 1]]) / np.float32(2)
    return mean


class OrderedNoise(Noise):
    """Noise of an image whose positions count in the order of drawing: each position has the noise of its cell.

    Args:
        seed: seed of the image, 0 .. 2^64 - 1.
        order: order of drawing.
    """

    def __init__(self, seed: int, order: Order) -> None:
        super().__init__(seed)
        self._order = order

    def gumbel(self, first: int, count: int, size: int) -> Floats:
        """Generate the noise of cells as `Noise.gumbel` does, float32 `[count, size]`.

        Args:
            first: first position, in the order of drawing; positions behind the image are cells, too.
            count: number of positions.
            size: number of codes.
        """
        cells = self._order.cells[first : first + count].tolist()
        cells += range(first + len(cells), first + count)
        return np.concatenate([super(OrderedNoise, self).gumbel(cell, 1, size) for cell in cells])

    def prepare(self, group: int, size: int) -> None:
        """Generate the noise of the cells that are drawn at the positions of a group, as `Noise.prepare` does."""
        cells = self._order.cells[group * GROUP_SIZE : (group + 1) * GROUP_SIZE].tolist()
        for cell in cells:
            super().prepare(cell // GROUP_SIZE, size)

    def forget(self, before: int) -> None:
        """Delete stored noise of cells that come before the first gap once `before` codes are known."""
        super().forget(self._order.count_complete(before))
