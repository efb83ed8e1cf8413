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
from .grid import MAX_BATCH_NODES, Grid, Placed, RowBatch
from .state import Request


class RowDrafter(Drafter):
    """The grids of all requests that are drawn row-parallel. max_nodes: of one request in a pass."""

    def __init__(self, max_nodes: int) -> None:
        self._max_nodes = min(max_nodes, MAX_BATCH_NODES)
        self._grids: dict[Request, Grid] = {}

    def draft(self, requests: Sequence[Request]) -> list[RowBatch]:
        """The next pass of every request; the prefill gave the first token."""
        return [self._grid(request).next_batch() for request in requests]

    def take(self, request: Request, batch: RowBatch, codes: Ints) -> tuple[Ints, Ints, Placed]:
        """Take in what was drawn after the nodes `batch.sampled`.

        Returns:
            What that adds to the codes known without a gap, in raster order; the nodes whose keys and values stay; and
            all codes that were drawn.
        """
        grid = self._grids[request]
        kept, drawn = grid.take(batch, codes)
        cells = np.array(grid.cells, np.int64).reshape(-1, grid.columns)[:, : grid.codes].ravel()
        places = drawn - drawn // grid.columns if grid.has_ends else drawn
        gaps = np.flatnonzero(cells < 0)
        end = gaps[0] if len(gaps) else len(cells)
        return cells[len(request.codes) : end], kept, Placed(places, cells[places])

    def leave(self, requests: Sequence[Request]) -> None:
        """Forget these requests."""
        for request in requests:
            self._grids.pop(request, None)

    def _grid(self, request: Request) -> Grid:
        method = request.method
        assert isinstance(method, RowParallel)
        if request not in self._grids:
            first, kept = request.codes[0], request.kept
            self._grids[request] = Grid(request.raster, first, method.window, method.drafts, self._max_nodes, kept)
        return self._grids[request]
