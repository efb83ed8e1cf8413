"""Row-parallel decoding: rows of the grid are drawn at the same time, each some tokens behind the one above.

A row starts when the row above is `window` tokens ahead, and stays behind it (ZipAR, arXiv 2412.04062). One pass gives
every active row its next token, so nothing that is computed is thrown away; but a token sees less than the target was
trained to see: the tokens before it in raster order that are committed, and those of the same pass. That is another
distribution than plain decoding's. With the noise of a position shared by all methods, a picture is a function of seed
and window, and a window as wide as the grid gives plain decoding's picture.

The first token of a row has no left neighbour yet: its pass reads the newest token of the row above in place of that
row's last one, and forgets it again. A row's real last token enters the cache when it is known.
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
    """One picture: `cells` as far as they are drawn, -1 elsewhere; `order`: those in the cache, in its order."""

    cells: Ints
    columns: int
    window: int
    order: list[int] = field(default_factory=list)

    def front(self) -> Front:
        """The next pass."""
        rows = self.cells.reshape(-1, self.columns)
        drawn = [int((row >= 0).sum()) for row in rows]
        found: list[tuple[int, int, bool, bool]] = []  # cell, token, whether the next is drawn, whether it is kept
        for row, count in enumerate(drawn):
            first, above = row * self.columns, drawn[row - 1] if row else self.columns
            if 0 < count < self.columns and above >= min(self.columns, count + self.window):
                found.append((first + count - 1, rows[row, count - 1], True, True))
            elif count == 0 and self.window <= above < self.columns:
                found.append((first - 1, rows[row - 1, above - 1], True, False))
            elif count == self.columns and row + 1 < len(rows) and (last := first + count - 1) not in self.order:
                found.append((last, rows[row, -1], drawn[row + 1] == 0, True))
        cells, tokens, following, kept = (np.array(column) for column in zip(*found[:MOST_ACTIVE_ROWS], strict=True))
        order = np.array(self.order, np.int64)
        return Front(tokens, cells, np.flatnonzero(following).tolist(), np.flatnonzero(kept), order)

    def take(self, front: Front, codes: Ints) -> None:
        """Take in what was drawn after the front's nodes."""
        self.cells[front.cells[front.drawn] + 1] = codes
        self.order += front.cells[front.kept].tolist()


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
        missing = np.flatnonzero(grid.cells < 0)
        return grid.cells[known : missing[0] if len(missing) else None].copy()

    def leave(self, requests: Sequence[Request]) -> None:
        """Forget these requests."""
        for request in requests:
            self.grids.pop(request, None)

    def _grid(self, request: Request) -> Grid:
        if request not in self.grids:
            assert isinstance(request.method, RowParallel)
            cells = np.full(request.length, -1, np.int64)
            cells[0] = request.codes[0]
            self.grids[request] = Grid(cells, self.columns, request.method.window)
        return self.grids[request]
