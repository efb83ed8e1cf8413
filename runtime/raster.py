"""Raster order: the codes of an image row after row and, in some families, a token at the end of each row but the last.

An end-of-row token is not sampled: it always follows the last code of a row. It has a position and a cache entry, but
no forward pass: it is a further node in the pass of the code before it, and is committed with it. The next code is
then sampled after the end-of-row token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .engine import Ints
from .order import Order
from .pass_layout import PassLayout
from .tree import DraftTree

MAX_BATCH_NODES = 64  # maximum number of nodes in a pass over several grid rows


@dataclass(frozen=True)
class Raster:
    """Raster order of the codes of an image."""

    num_codes: int  # number of codes of the image
    columns: int = 1  # number of codes in a grid row
    row_end: int | None = None  # end-of-row token, after every row but the last; None without one
    order: Order | None = None  # order of drawing in groups of cells, see `order.py`; None: one code after another
    first_grid: tuple[int, int] = (0, 0)  # rows and columns of a smaller grid, whose codes come before the image's

    @property
    def first_codes(self) -> int:
        """Number of codes of the smaller grid."""
        return self.first_grid[0] * self.first_grid[1]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the image, end-of-row tokens included."""
        return self.position_of(self.num_codes - 1) + 1

    def position_of(self, cell: int) -> int:
        """Return the position of a cell's token, from 0 at the first token; drafts may extend past the last cell."""
        return cell if self.row_end is None else cell + min(cell, self.num_codes - 1) // self.columns

    def count_before(self, cell: int) -> int:
        """Return how many codes the distribution of code `cell` depends on; both count in the order of drawing."""
        return cell if self.order is None else self.order.starts[self.order.group_at(cell + 1) - 1]

    def cell_above(self, cell: int) -> int:
        """Return the cell above a cell of the same grid; a negative number in the first row of a grid."""
        first_codes = self.first_codes
        if cell < first_codes:
            return cell - self.first_grid[1]
        above = cell - self.columns
        return above if above >= first_codes else -1

    def ends_row(self, cell: int) -> bool:
        """Return whether an end-of-row token follows a cell."""
        return self.row_end is not None and cell % self.columns == self.columns - 1 and cell + 1 < self.num_codes

    def insert_row_ends(self, codes: Sequence[int] | Ints, first: int = 0) -> Ints:
        """Return the codes from cell `first` on with an end-of-row token before each code that begins a row."""
        tokens = np.array(codes, np.int64)
        if self.row_end is None:
            return tokens
        cells = first + np.arange(len(codes))
        begins = (cells % self.columns == 0) & (cells > 0) & (cells < self.num_codes)
        return np.insert(tokens, np.flatnonzero(begins), self.row_end)

    def lay_out(self, tree: DraftTree, first: int) -> PassLayout:
        """Return the pass nodes of a tree whose root is in cell `first`."""
        ancestors = tree.structure.ancestors
        if self.row_end is None:
            return PassLayout(tree.tokens, first + tree.structure.depths, ancestors)
        cells = first + tree.structure.depths
        ends_before = np.minimum(cells, self.num_codes - 1) // self.columns
        ends = (cells % self.columns == self.columns - 1) & (cells + 1 < self.num_codes)
        draft_nodes = np.repeat(np.arange(tree.nodes), 1 + ends)  # an end-of-row token follows its node
        sampling_nodes = np.cumsum(1 + ends) - 1
        end_nodes = sampling_nodes[ends]
        pass_ancestors = ancestors[draft_nodes][:, draft_nodes]
        pass_ancestors[end_nodes - 1, end_nodes] = False  # a node comes before its end-of-row token
        tokens = tree.tokens[draft_nodes]
        positions = (cells + ends_before)[draft_nodes]
        tokens[end_nodes] = self.row_end
        positions[end_nodes] += 1
        return PassLayout(tokens, positions, pass_ancestors, draft_nodes, sampling_nodes)
