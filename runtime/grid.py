"""How a picture's codes stand in their sequence: row after row, and perhaps a token that ends each row but the last.

Such a token is no choice: it follows the last code of a row whatever was drawn. It has a position and a place in the
cache, but no pass of its own: it stands in the pass of the code before it, as one more node, and is committed with it.
What is drawn after that code is drawn after the end of the row instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .engine import Bools, Ints
from .tree import DraftTree, TreeStructure

MAX_ROW_BATCH = 64  # nodes of a pass over several rows of a grid


class PassLayout(NamedTuple):
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

    def lay_out(self, tree: DraftTree, first: int) -> PassLayout:
        """The nodes of a tree in a pass, its root in cell `first`."""
        depths, ancestors = tree.structure.depths, tree.structure.ancestors
        if self.row_end is None:
            return PassLayout(tree.tokens, depths, ancestors)
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
        return PassLayout(tokens, places, seen, owners, last)


@dataclass(frozen=True)
class RowBatch:
    """The nodes of one pass over the active rows of a grid, see `rows.py`; what a tree is to other methods.

    tokens: int64 `[nodes]`. cells: the cell each token stands in, or stands in for, int64 `[nodes]`; after it comes the
    next cell. rows, counts: the row each node belongs to, and how many tokens of it are known to it, both int64
    `[nodes]`; 0 of one that only stands in, which no other sees. drawn: nodes after which a code is drawn. order: cells
    in the order in which the cache has them, int64 `[entries]`. columns: of the grid. window: how far rows are apart.
    Where rows end with a token, that is the last column of this grid. following: the code that comes after each node,
    counted without these, int64 `[nodes]`.
    """

    tokens: Ints
    cells: Ints
    rows: Ints
    counts: Ints
    drawn: list[int]
    order: Ints
    columns: int
    window: int
    following: Ints

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


class Placed(NamedTuple):
    """Codes that a pass drew, and the cells they stand in, both int64 `[count]`; ends of rows are not counted."""

    cells: Ints
    codes: Ints


@dataclass
class Grid:
    """One picture. cells: its codes as far as they are drawn, -1 elsewhere. order: cells in the cache, in its order.

    ahead: tokens drafted in every row. most: nodes of a pass; what finds no room in one waits. ends: whether the last
    column, of all rows but the last, is known from the start and not drawn. drawn, cached: how many tokens of every row
    there are, and are in the cache: all of them, or all but the newest, and the end. guesses: what a pass gave for
    cells whose turn it was not yet.
    """

    cells: list[int]
    columns: int
    window: int
    ahead: int = 0
    most: int = MAX_ROW_BATCH
    ends: bool = False
    order: list[int] = field(default_factory=list)
    drawn: list[int] = field(init=False)
    cached: list[int] = field(init=False)
    guesses: dict[int, int] = field(init=False, default_factory=dict)

    @classmethod
    def begun(cls, raster: Raster, first: int, window: int, ahead: int = 0, most: int = MAX_ROW_BATCH) -> Grid:
        """A picture of which the first code is known."""
        ends, columns = raster.row_end is not None, raster.columns
        cells = np.full((raster.codes // columns, columns + ends), -1 if raster.row_end is None else raster.row_end)
        cells[:, :columns] = -1
        cells[0, 0] = first
        wide = window + ends if window >= columns else window  # the end of the row above, too
        return cls(cells.ravel().tolist(), columns + ends, wide, ahead, most, ends)

    def __post_init__(self) -> None:
        self.drawn, self.cached = ([0] * (len(self.cells) // self.columns) for _ in range(2))
        self._draw(0)  # by the prefill

    @property
    def codes(self) -> int:
        """Codes of a row."""
        return self.columns - self.ends

    def front(self) -> RowBatch:
        """The next pass: of every row that sees what it has to, its newest tokens and drafts of the next ones."""
        nodes, present = list[tuple[int, int, int, int]](), list[int]()  # tokens of each row in the cache or the pass
        for row, count in enumerate(self.drawn):
            first, own = row * self.columns, self.cached[row]
            begins = count == 0 and row > 0 and self.window <= self.drawn[row - 1] and self.window < self.columns
            last = row + 1 == len(self.drawn) and count >= self.codes
            if (begins or own < count) and not last and self._sees(row, count, present):
                if begins:
                    stands_in = first - 1 if self.ends else first - self.columns + self.window - 1
                    nodes.append((self.cells[stands_in], first - 1, row, 0))
                nodes += [(self.cells[first + n - 1], first + n - 1, row, n) for n in range(own + 1, count + 1)]
                own = count
                while own < min(count + self.ahead, self.codes - 1) and self._sees(row, own + 1, present):
                    nodes.append((self.guesses.get(first + own, nodes[-1][0]), first + own, row, own + 1))
                    own += 1
            present.append(own)
        tokens, cells, rows, counts = np.array(nodes[: self.most], np.int64).T
        # after the end of a row only where no other node stands in for it
        follows = (counts < self.codes) | (counts == self.columns) & (self.window >= self.columns)
        order, following = np.array(self.order, np.int64), rows * self.codes + np.minimum(counts, self.codes)
        drawn = np.flatnonzero(follows).tolist()
        return RowBatch(tokens, cells, rows, counts, drawn, order, self.columns, self.window, following)

    def take(self, front: RowBatch, codes: Ints) -> tuple[Ints, Ints]:
        """Take in what was drawn after the front's nodes; returns the nodes that stay, and the cells that are drawn."""
        given, known = dict(zip(front.drawn, codes.tolist(), strict=True)), [*self.drawn]
        tokens, rows, counts = front.tokens.tolist(), front.rows.tolist(), front.counts.tolist()
        kept, found, expected = list[int](), list[int](), -1
        for node, (token, row, count) in enumerate(zip(tokens, rows, counts, strict=True)):
            drafted = count > known[row]
            right = (not drafted or token == expected) and self._sees(row, count, self.cached)
            code, cell = given.get(node, -1), row * self.columns + count
            expected = code if right else -1
            if right and count:
                kept.append(node)
                self.order.append(cell - 1)
                self.cached[row] = count
            if right and code >= 0:
                self.cells[cell] = code
                self._draw(cell // self.columns)
                found.append(cell)
                self.guesses.pop(cell, None)
            elif code >= 0:
                self.guesses[cell] = code
        return np.array(kept, np.int64), np.array(found, np.int64)

    def _draw(self, row: int) -> None:
        """Count one more code of a row, and its end with the last of them."""
        self.drawn[row] += 1
        if self.drawn[row] == self.codes:
            self.drawn[row] = self.columns

    def _sees(self, row: int, count: int, present: list[int]) -> bool:
        """Whether the rows above have what token `count` of a row sees, given how many tokens each one has."""
        for above in range(row - 1, -1, -1):
            count += self.window
            if present[above] < min(self.columns, count):
                return False
            if count >= self.columns and present[above] == self.columns:
                return True  # as do all rows above it
        return True


def row_batch_sizes(raster: Raster, window: int) -> list[int]:
    """Nodes of every pass over a picture, without drafts: which tokens are drawn does not matter."""
    grid, sizes = Grid.begun(raster, 0, window), list[int]()
    while min(grid.cells) < 0:
        front = grid.front()
        grid.take(front, np.zeros(len(front.drawn), np.int64))
        sizes.append(front.nodes)
    return sizes
