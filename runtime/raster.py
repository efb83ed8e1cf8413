"""How a picture's codes stand in their sequence: row after row, and perhaps a token that ends each row but the last.

Such a token is no choice: it follows the last code of a row whatever was drawn. It has a position and a place in the
cache, but no pass of its own: it stands in the pass of the code before it, as one more node, and is committed with it.
What is drawn after that code is drawn after the end of the row instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .engine import Bools, Ints
from .tree import DraftTree

MAX_BATCH_NODES = 64  # nodes of a pass over several rows of a grid


class PassLayout(NamedTuple):
    """A draft's nodes in a forward pass, each with the end of the row that follows it, if one does."""

    tokens: Ints  # of the pass's nodes, int64 `[pass nodes]`
    positions: Ints  # of each node, counted from the first token of the image, int64 `[pass nodes]`
    ancestors: Bools  # whether the column node is the row node or comes before it, bool `[pass nodes, pass nodes]`
    owners: Ints | None = None  # the draft's node that each belongs to, int64 `[pass nodes]`
    # of every node of the draft the pass's node after which its token is sampled, int64 `[nodes]`. Both are None
    # where the pass has just the draft's nodes
    last: Ints | None = None
    # whether each node attends to each cache entry behind the prefix, bool `[pass nodes, entries]`; None: to all
    past: Bools | None = None

    def path_nodes(self, path: Sequence[int]) -> Ints:
        """Return the pass's nodes on a path of the draft's."""
        return np.array(path, np.int64) if self.owners is None else np.flatnonzero(np.isin(self.owners, path))


@dataclass(frozen=True)
class Raster:
    """The order of a picture's codes."""

    codes: int  # of the picture
    columns: int = 1  # of its grid
    row_end: int | None = None  # the token at the end of every row but the last, or None

    @property
    def tokens(self) -> int:
        """Tokens of its sequence."""
        return self.place(self.codes - 1) + 1

    def place(self, cell: int) -> int:
        """Where a code stands in the sequence, counted from the first one; drafts may go on past the last."""
        return cell if self.row_end is None else cell + min(cell, self.codes - 1) // self.columns

    def ends(self, cell: int) -> bool:
        """Whether the end of a row follows a code."""
        return self.row_end is not None and cell % self.columns == self.columns - 1 and cell + 1 < self.codes

    def insert_row_ends(self, codes: Sequence[int] | Ints, first: int = 0) -> Ints:
        """Tokens of the codes from cell `first` on, the end of a row before the code that begins the next."""
        tokens = np.array(codes, np.int64)
        if self.row_end is None:
            return tokens
        cells = first + np.arange(len(codes))
        begins = (cells % self.columns == 0) & (cells > 0) & (cells < self.codes)
        return np.insert(tokens, np.flatnonzero(begins), self.row_end)

    def lay_out(self, tree: DraftTree, first: int) -> PassLayout:
        """Return the nodes of a tree in a pass, its root in cell `first`."""
        ancestors = tree.structure.ancestors
        if self.row_end is None:
            return PassLayout(tree.tokens, first + tree.structure.depths, ancestors)
        cells = first + tree.structure.depths
        before = np.minimum(cells, self.codes - 1) // self.columns
        ends = (cells % self.columns == self.columns - 1) & (cells + 1 < self.codes)
        owners = np.repeat(np.arange(tree.nodes), 1 + ends)  # a row's end stands behind its node
        last = np.cumsum(1 + ends) - 1
        seen = ancestors[owners][:, owners]
        seen[last[ends] - 1, last[ends]] = False
        tokens = tree.tokens[owners]
        positions = (cells + before)[owners]
        tokens[last[ends]] = self.row_end
        positions[last[ends]] += 1
        return PassLayout(tokens, positions, seen, owners, last)
