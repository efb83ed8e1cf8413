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


class Laid(NamedTuple):
    """A tree's nodes in a pass, each with the end of the row that follows it, if one does.

    tokens, depths: of the pass's nodes, int64 `[pass nodes]`; depths count tokens from the root. ancestors: whether the
    column node is the row node or comes before it, bool `[pass nodes, pass nodes]`. owners: the tree's node that each
    belongs to, int64 `[pass nodes]`. last: of every node of the tree the pass's node after which its choice is drawn;
    None where both have the same nodes.
    """

    tokens: Ints
    depths: Ints
    ancestors: Bools
    owners: Ints | None = None
    last: Ints | None = None

    def kept(self, path: Sequence[int]) -> Ints:
        """The pass's nodes that stay with a path of the tree's."""
        return np.array(path, np.int64) if self.owners is None else np.flatnonzero(np.isin(self.owners, path))


@dataclass(frozen=True)
class Raster:
    """codes: of a picture. columns: of its grid. row_end: the token at the end of every row but the last, or None."""

    codes: int
    columns: int = 1
    row_end: int | None = None

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

    def spell(self, codes: Sequence[int] | Ints, first: int = 0) -> Ints:
        """Tokens of the codes from cell `first` on, the end of a row before the code that begins the next."""
        tokens, cells = np.array(codes, np.int64), first + np.arange(len(codes))
        if self.row_end is None:
            return tokens
        begins = (cells % self.columns == 0) & (cells > 0) & (cells < self.codes)
        return np.insert(tokens, np.flatnonzero(begins), self.row_end)

    def lay_out(self, tree: DraftTree, first: int) -> Laid:
        """The nodes of a tree in a pass, its root in cell `first`."""
        depths, ancestors = tree.structure.depths, tree.structure.ancestors
        if self.row_end is None:
            return Laid(tree.tokens, depths, ancestors)
        cells = first + depths
        before = np.minimum(cells, self.codes - 1) // self.columns
        ends = (cells % self.columns == self.columns - 1) & (cells + 1 < self.codes)
        owners = np.repeat(np.arange(tree.nodes), 1 + ends)  # a row's end stands behind its node
        last = np.cumsum(1 + ends) - 1
        seen = ancestors[owners][:, owners]
        seen[last[ends] - 1, last[ends]] = False
        tokens, places = tree.tokens[owners], (cells + before - self.place(first))[owners]
        tokens[last[ends]] = self.row_end
        places[last[ends]] += 1
        return Laid(tokens, places, seen, owners, last)
