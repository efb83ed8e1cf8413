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
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..methods import RowParallel
from .drafts import MOST_ACTIVE_ROWS, Drafts, Request
from .engine import Ints
from .tree import Front


@dataclass
class Grid:
    """One picture. cells: its codes as far as they are drawn, -1 elsewhere. order: cells in the cache, in its order.

    drawn: how many of every row. ends: rows whose last token is in the cache.
    """

    cells: list[int]
    columns: int
    window: int
    order: list[int] = field(default_factory=list)
    drawn: list[int] = field(init=False)
    ends: set[int] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.drawn = [0] * (len(self.cells) // self.columns)
        self.drawn[0] = 1  # by the prefill

    def front(self) -> Front:
        """The next pass."""
        nodes, drawn, stay = list[tuple[int, int, int, int]](), list[int](), list[int]()
        above = self.columns
        for row, count in enumerate(self.drawn):
            first = row * self.columns
            cell = token = first + count - 1
            ended = count == self.columns and row + 1 < len(self.drawn) and row not in self.ends
            if count == 0 and self.window <= above < self.columns:
                token = first - self.columns + self.window - 1  # in place of the last one of the row above
            elif not ended and not (0 < count < self.columns and above >= min(self.columns, count + self.window)):
                above = count
                continue
            if count > 0:
                stay.append(len(nodes))
            if not ended or self.drawn[row + 1] == 0:
                drawn.append(len(nodes))
            nodes.append((self.cells[token], cell, row, count))
            above = count
            if len(nodes) == MOST_ACTIVE_ROWS:
                break
        tokens, cells, rows, counts = np.array(nodes, np.int64).T
        kept, order = np.array(stay, np.int64), np.array(self.order, np.int64)
        return Front(tokens, cells, rows, counts, drawn, kept, order, self.columns, self.window)

    def take(self, front: Front, codes: Ints) -> None:
        """Take in what was drawn after the front's nodes."""
        cells = front.cells.tolist()
        for node, code in zip(front.drawn, codes.tolist(), strict=True):
            self.cells[cells[node] + 1] = code
            self.drawn[(cells[node] + 1) // self.columns] += 1
        for node in front.kept.tolist():
            self.order.append(cells[node])
            if (cells[node] + 1) % self.columns == 0:
                self.ends.add(cells[node] // self.columns)


class RowFronts(Drafts):
    """The grids of all requests that are drawn row-parallel. columns: of the token grid."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.grids: dict[Request, Grid] = {}

    def draft(self, requests: Sequence[Request]) -> list[Front]:
        """The next pass of every request; the prefill gave the first token."""
        return [self._grid(request).front() for request in requests]

    def take(self, request: Request, front: Front, codes: Ints) -> Ints:
        """Take in what was drawn; returns what that adds to the codes known without a gap, in raster order."""
        grid, known = self.grids[request], len(request.codes)
        grid.take(front, codes)
        end = known
        while end < len(grid.cells) and grid.cells[end] >= 0:
            end += 1
        return np.array(grid.cells[known:end], np.int64)

    def leave(self, requests: Sequence[Request]) -> None:
        """Forget these requests."""
        for request in requests:
            self.grids.pop(request, None)

    def _grid(self, request: Request) -> Grid:
        if request not in self.grids:
            assert isinstance(request.method, RowParallel)
            cells = [request.codes[0], *[-1] * (request.length - 1)]
            self.grids[request] = Grid(cells, self.columns, request.method.window)
        return self.grids[request]
