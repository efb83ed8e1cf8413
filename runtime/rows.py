"""Row-parallel decoding: rows of the grid are drawn at the same time, each some tokens behind the one above.

A row starts when the row above is `window` tokens ahead, and stays behind it (ZipAR, arXiv 2412.04062). One pass gives
every active row its next token, so nothing that is computed is thrown away; but a token sees less than the target was
trained to see. Token c of row r sees the c tokens before it in its row and, of the row i above it, the first
c + i * window: no more, whatever else is known by then. That is another distribution than plain decoding's. With the
noise of a position shared by all methods, a picture is a function of seed and window, and a window as wide as the grid
gives plain decoding's picture.

The first token of a row has no left neighbour yet: its pass reads the newest token of the row above that it sees in
place of that row's last one, and forgets it again. A row's real last token enters the cache when it is known, and sees
all that is before it.

Where rows end with a token that is no choice, it is the last column of the grid: known from the start, it stands in for
itself before the row's codes are there, and enters the cache with the last of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..methods import RowParallel
from .drafts import MOST_FRONT, Drafts, Request
from .engine import Ints
from .raster import Raster
from .tree import Front


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
    most: int = MOST_FRONT
    ends: bool = False
    order: list[int] = field(default_factory=list)
    drawn: list[int] = field(init=False)
    cached: list[int] = field(init=False)
    guesses: dict[int, int] = field(init=False, default_factory=dict)

    @classmethod
    def begun(cls, raster: Raster, first: int, window: int, ahead: int = 0, most: int = MOST_FRONT) -> Grid:
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

    def front(self) -> Front:
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
        return Front(tokens, cells, rows, counts, drawn, order, self.columns, self.window, following)

    def take(self, front: Front, codes: Ints) -> tuple[Ints, Ints]:
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


def front_sizes(raster: Raster, window: int) -> list[int]:
    """Nodes of every pass over a picture, without drafts: which tokens are drawn does not matter."""
    grid, sizes = Grid.begun(raster, 0, window), list[int]()
    while min(grid.cells) < 0:
        front = grid.front()
        grid.take(front, np.zeros(len(front.drawn), np.int64))
        sizes.append(front.nodes)
    return sizes


class RowFronts(Drafts):
    """The grids of all requests that are drawn row-parallel. most: nodes of a pass."""

    def __init__(self, most: int) -> None:
        self.most = min(most, MOST_FRONT)
        self.grids: dict[Request, Grid] = {}

    def draft(self, requests: Sequence[Request]) -> list[Front]:
        """The next pass of every request; the prefill gave the first token."""
        return [self._grid(request).front() for request in requests]

    def take(self, request: Request, front: Front, codes: Ints) -> tuple[Ints, Ints, tuple[Ints, Ints]]:
        """Take in what was drawn after the nodes of a front.

        Returns what that adds to the codes known without a gap, in raster order; the nodes whose keys and values stay;
        and the cells that were drawn, ends of rows not counted, with their codes.
        """
        grid, known = self.grids[request], len(request.codes)
        kept, drawn = grid.take(front, codes)
        cells = np.array(grid.cells, np.int64).reshape(-1, grid.columns)[:, : grid.codes].ravel()
        places = drawn - drawn // grid.columns if grid.ends else drawn
        gaps = np.flatnonzero(cells < 0)
        return cells[known : gaps[0] if len(gaps) else len(cells)], kept, (places, cells[places])

    def leave(self, requests: Sequence[Request]) -> None:
        """Forget these requests."""
        for request in requests:
            self.grids.pop(request, None)

    def _grid(self, request: Request) -> Grid:
        if request not in self.grids:
            assert isinstance(request.method, RowParallel)
            method, first = request.method, request.codes[0]
            self.grids[request] = Grid.begun(request.raster, first, method.window, method.drafts, self.most)
        return self.grids[request]
