"""How a picture's codes stand in their sequence: row after row, and perhaps a token that ends each row but the last.

Such a token is no choice: it follows the last code of a row whatever was drawn. It has a position and a place in the
cache, but no pass of its own: it stands in the pass of the code before it, as one more node, and is committed with it.
What is drawn after that code is drawn after the end of the row instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .engine import Bools, Ints
from .tree import DraftTree, TreeStructure

MAX_BATCH_NODES = 64  # nodes of a pass over several rows of a grid


class PassLayout(NamedTuple):
    """A tree's nodes in a pass, each with the end of the row that follows it, if one does."""

    tokens: Ints  # of the pass's nodes, int64 `[pass nodes]`
    depths: Ints  # tokens from the root to each, int64 `[pass nodes]`
    ancestors: Bools  # whether the column node is the row node or comes before it, bool `[pass nodes, pass nodes]`
    owners: Ints | None = None  # the tree's node that each belongs to, int64 `[pass nodes]`
    # of every node of the tree the pass's node after which its choice is drawn, int64 `[nodes]`. Both are None
    # where the pass has just the tree's nodes
    last: Ints | None = None

    def kept(self, path: Sequence[int]) -> Ints:
        """The pass's nodes that stay with a path of the tree's."""
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

    def spell(self, codes: Sequence[int] | Ints, first: int = 0) -> Ints:
        """Tokens of the codes from cell `first` on, the end of a row before the code that begins the next."""
        tokens = np.array(codes, np.int64)
        if self.row_end is None:
            return tokens
        cells = first + np.arange(len(codes))
        begins = (cells % self.columns == 0) & (cells > 0) & (cells < self.codes)
        return np.insert(tokens, np.flatnonzero(begins), self.row_end)

    def lay_out(self, tree: DraftTree, first: int) -> PassLayout:
        """The nodes of a tree in a pass, its root in cell `first`."""
        ancestors = tree.structure.ancestors
        if self.row_end is None:
            return PassLayout(tree.tokens, tree.structure.depths, ancestors)
        cells = first + tree.structure.depths
        before = np.minimum(cells, self.codes - 1) // self.columns
        ends = (cells % self.columns == self.columns - 1) & (cells + 1 < self.codes)
        owners = np.repeat(np.arange(tree.nodes), 1 + ends)  # a row's end stands behind its node
        last = np.cumsum(1 + ends) - 1
        seen = ancestors[owners][:, owners]
        seen[last[ends] - 1, last[ends]] = False
        tokens = tree.tokens[owners]
        places = (cells + before - self.place(first))[owners]
        tokens[last[ends]] = self.row_end
        places[last[ends]] += 1
        return PassLayout(tokens, places, seen, owners, last)


@dataclass(frozen=True)
class RowBatch:
    """The nodes of one pass over the active rows of a grid, see `rows.py`; what a tree is to other methods.

    Where rows end with a token, that is the last column of this grid.
    """

    tokens: Ints  # int64 `[nodes]`
    cells: Ints  # the cell each token stands in, or stands in for, int64 `[nodes]`; after it comes the next cell
    rows: Ints  # the row each node belongs to, int64 `[nodes]`
    # how many tokens of that row it sees, itself included, int64 `[nodes]`; 0 of one that only stands in, which
    # no other sees
    counts: Ints
    sampled: list[int]  # nodes after which a code is drawn
    cached: Ints  # cells in the order in which the cache has them, int64 `[entries]`
    known: Ints  # their tokens, int64 `[entries]`
    columns: int  # of the grid
    window: int  # how far rows are apart
    next_codes: Ints  # the code that comes after each node, ends of rows not counted, int64 `[nodes]`

    @property
    def nodes(self) -> int:
        """Nodes of the pass."""
        return len(self.tokens)

    @cached_property
    def structure(self) -> TreeStructure:
        """What nodes see of each other, and themselves. `depths` are their cells."""
        seen = self.sees(self.cells) & (self.counts > 0) | np.eye(self.nodes, dtype=bool)
        return TreeStructure(self.cells, (), seen, self.cells, False)

    def sees(self, cells: Ints) -> Bools:
        """Which of these cells each node may see, bool `[nodes, cells]`; those of rows above as far as the window."""
        row, column = np.divmod(cells, self.columns)
        above = self.rows[:, None] - row
        seen: Bools = (above >= 0) & (column < self.counts[:, None] + above * self.window)
        return seen

    def before(self, node: int) -> Ints:
        """The tokens that a node sees, and its own."""
        seen = self.known[self.sees(self.cached)[node]]
        return np.concatenate([seen, self.tokens[self.structure.ancestors[node]]])


class Placed(NamedTuple):
    """Codes that a pass drew, and the cells they stand in, both int64 `[count]`; ends of rows are not counted."""

    cells: Ints
    codes: Ints


class Grid:
    """One picture that is drawn row-parallel, after the prefill.

    Args:
        raster: of its codes.
        first: its first code, which the prefill drew.
        window: how far a row stays behind the one above.
        drafts: tokens drafted ahead in every row; may be changed between passes.
        max_nodes: of a pass; what finds no room in one waits.
        kept: codes that are given, -1 where one is drawn, int64 `[codes]`.

    Attributes:
        cells: its tokens as far as they are known, -1 elsewhere.
        columns: of the grid, with that of the ends of rows; `codes` without it.
        lengths: how many tokens of every row are drawn, its end counted with the last of them.
        cached_lengths: how many of them the cache has: all, or all but the newest, and the end.
    """

    def __init__(
        self,
        raster: Raster,
        first: int,
        window: int,
        drafts: int = 0,
        max_nodes: int = MAX_BATCH_NODES,
        kept: Ints | None = None,
    ) -> None:
        self.has_ends = raster.row_end is not None
        self.codes = raster.columns
        self.columns = self.codes + self.has_ends
        rows = raster.codes // self.codes
        cells = np.full((rows, self.columns), -1 if raster.row_end is None else raster.row_end)
        cells[:, : self.codes] = -1
        cells[0, 0] = first
        self.cells: list[int] = cells.ravel().tolist()
        self.window = min(window, self.codes)
        self.drafts, self.max_nodes = drafts, max_nodes
        self.lengths = [0] * rows
        self.cached_lengths = [0] * rows
        self._cached: list[int] = []  # cells in the cache, in its order
        given = enumerate([] if kept is None else kept.tolist())
        self._kept = {i + self.has_ends * (i // self.codes): code for i, code in given if code >= 0}  # by cell
        self._guesses = dict(self._kept)  # of cells whose turn it was not yet: also what passes gave for them
        self._count(0)

    def next_batch(self) -> RowBatch:
        """The next pass: of every row that sees what it has to, its newest tokens and drafts of the next ones."""
        nodes: list[tuple[int, int, int, int]] = []  # token, cell, row, count
        present: list[int] = []  # tokens of each row in the cache or the pass
        for row, count in enumerate(self.lengths):
            first = row * self.columns
            own = self.cached_lengths[row]
            begins = count == 0 and row > 0 and self.window <= self.lengths[row - 1] and self.window < self.columns
            done = row + 1 == len(self.lengths) and count >= self.codes
            if (begins or own < count) and not done and self._sees(row, count, present):
                if begins:
                    stands_in = first - 1 if self.has_ends else first - self.columns + self.window - 1
                    nodes.append((self.cells[stands_in], first - 1, row, 0))
                nodes += [(self.cells[first + n - 1], first + n - 1, row, n) for n in range(own + 1, count + 1)]
                own = count
                drafts = self.drafts
                while own < self.codes - 1 and self._sees(row, own + 1, present):
                    if first + own not in self._kept:
                        if not drafts:
                            break
                        drafts -= 1
                    nodes.append((self._guesses.get(first + own, nodes[-1][0]), first + own, row, own + 1))
                    own += 1
            present.append(own)
        tokens, cells, rows, counts = np.array(nodes[: self.max_nodes], np.int64).T
        # after the end of a row only where no other node stands in for it
        follows = (counts < self.codes) | (self.window == self.columns)
        sampled = np.flatnonzero(follows).tolist()
        next_codes = rows * self.codes + np.minimum(counts, self.codes)
        cached = np.array(self._cached, np.int64)
        known = np.array(self.cells, np.int64)[cached]
        return RowBatch(tokens, cells, rows, counts, sampled, cached, known, self.columns, self.window, next_codes)

    def take(self, batch: RowBatch, codes: Ints) -> tuple[Ints, Ints]:
        """Take in the codes drawn after a batch's nodes `batch.sampled`.

        Returns:
            The nodes whose keys and values stay, and the cells that were drawn, both int64 `[count]`.
        """
        choices = dict(zip(batch.sampled, codes.tolist(), strict=True))
        lengths = [*self.lengths]  # before this pass: what goes beyond is a draft
        kept: list[int] = []
        drawn: list[int] = []
        expected = -1  # the code drawn after the node before, where that one was right
        nodes = zip(batch.tokens.tolist(), batch.rows.tolist(), batch.counts.tolist(), strict=True)
        for node, (token, row, count) in enumerate(nodes):
            cell = row * self.columns + count
            code = self._kept.get(cell, choices[node]) if node in choices else -1
            right = (count <= lengths[row] or token == expected) and self._sees(row, count, self.cached_lengths)
            expected = code if right else -1
            if not right:
                if code >= 0:
                    self._guesses[cell] = code
                continue
            if count:  # what only stands in is forgotten again
                kept.append(node)
                self._cached.append(cell - 1)
                self.cached_lengths[row] = count
            if code >= 0:
                self.cells[cell] = code
                self._count(cell // self.columns)
                drawn.append(cell)
                self._guesses.pop(cell, None)
        return np.array(kept, np.int64), np.array(drawn, np.int64)

    def _count(self, row: int) -> None:
        self.lengths[row] += 1
        if self.lengths[row] == self.codes:
            self.lengths[row] = self.columns

    def _sees(self, row: int, count: int, present: list[int]) -> bool:
        """Whether the rows above have what token `count` of a row sees, given how many tokens each one has."""
        for above in range(row - 1, -1, -1):
            count += self.window
            if present[above] < min(self.columns, count):
                return False
            if count >= self.columns and present[above] == self.columns:
                return True  # as do all rows above it
        return True
