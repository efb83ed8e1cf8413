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

import numpy as np

from ..methods import RowParallel
from .drafting import Drafter
from .engine import Ints
from .grid import MAX_ROW_BATCH, Grid, Placed, RowBatch
from .state import Request


class RowDrafter(Drafter):
    """The grids of all requests that are drawn row-parallel. most: nodes of a pass."""

    def __init__(self, most: int) -> None:
        self.most = min(most, MAX_ROW_BATCH)
        self.grids: dict[Request, Grid] = {}

    def draft(self, requests: Sequence[Request]) -> list[RowBatch]:
        """The next pass of every request; the prefill gave the first token."""
        return [self._grid(request).front() for request in requests]

    def take(self, request: Request, front: RowBatch, codes: Ints) -> tuple[Ints, Ints, Placed]:
        """Take in what was drawn after the nodes of a front.

        Returns what that adds to the codes known without a gap, in raster order; the nodes whose keys and values stay;
        and the cells that were drawn, ends of rows not counted, with their codes.
        """
        grid, known = self.grids[request], len(request.codes)
        kept, drawn = grid.take(front, codes)
        cells = np.array(grid.cells, np.int64).reshape(-1, grid.columns)[:, : grid.codes].ravel()
        places = drawn - drawn // grid.columns if grid.ends else drawn
        gaps = np.flatnonzero(cells < 0)
        return cells[known : gaps[0] if len(gaps) else len(cells)], kept, Placed(places, cells[places])

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
