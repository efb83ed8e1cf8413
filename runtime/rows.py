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
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..methods import RowParallel
from .drafting import Accepted, Drafter, Placed, SequenceStep
from .engine import Bools, Ints
from .raster import MAX_BATCH_NODES, PassLayout, Raster
from .state import ImageSequence, Model
from .target import TargetOutput
from .tree import TreeStructure


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

    def commit(self, batch: RowBatch, codes: Ints) -> tuple[Ints, Ints]:
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
        """Count one more code of a row, and its end with the last of them."""
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


@dataclass(eq=False)
class RowDraft:
    """The nodes of one forward pass over the active rows of a sequence's grid, as a `Draft`."""

    sequence: ImageSequence
    grid: Grid
    batch: RowBatch

    @property
    def tokens(self) -> Ints:
        """Tokens of the nodes, int64 `[nodes]`."""
        return self.batch.tokens

    @property
    def structure(self) -> TreeStructure:
        """Which nodes attend to each other."""
        return self.batch.structure

    @property
    def cells(self) -> Sequence[int]:
        """The cell after each node."""
        cells: list[int] = self.batch.next_codes.tolist()
        return cells

    @property
    def sampled(self) -> Sequence[int]:
        """Nodes after which a token is sampled."""
        return self.batch.sampled

    def layout(self) -> PassLayout:
        """Return the nodes as they stand in a forward pass."""
        batch = self.batch
        past = batch.sees(batch.cached)
        return PassLayout(batch.tokens, batch.structure.depths, batch.structure.ancestors, past=past)

    def preceding_codes(self, node: int) -> Ints:
        """Return the tokens that a node attends to, and its own."""
        batch = self.batch
        seen = batch.known[batch.sees(batch.cached)[node]]
        return np.concatenate([seen, batch.tokens[batch.structure.ancestors[node]]])

    def accept(self, output: TargetOutput, layout: PassLayout, model: Model) -> Accepted:
        """Sample tokens, and commit those whose drafts were right."""
        sequence, grid = self.sequence, self.grid
        kept, drawn = grid.commit(self.batch, output.sample(self.batch.sampled))
        cells = np.array(grid.cells, np.int64).reshape(-1, grid.columns)[:, : grid.codes].ravel()
        places = drawn - drawn // grid.columns if grid.has_ends else drawn
        gaps = np.flatnonzero(cells < 0)
        end = gaps[0] if len(gaps) else len(cells)
        codes = cells[len(sequence.codes) : end]
        sequence.codes += codes.tolist()
        sequence.record_draft(len(self.tokens) - 1, len(places) - 1)
        return Accepted(SequenceStep(sequence.index, codes, placed=Placed(places, cells[places])), codes, kept)


class RowDrafter(Drafter):
    """Drafts the grids of all sequences that are decoded row-parallel.

    Args:
        max_nodes: maximum number of nodes of one sequence in a forward pass.
    """

    def __init__(self, max_nodes: int) -> None:
        self._max_nodes = min(max_nodes, MAX_BATCH_NODES)
        self._grids: dict[ImageSequence, Grid] = {}

    def draft(self, sequences: Sequence[ImageSequence]) -> list[RowDraft]:
        """Return the next pass of every sequence; the prefill gave the first token."""
        grids = [self._grid(sequence) for sequence in sequences]
        return [RowDraft(sequence, grid, grid.next_batch()) for sequence, grid in zip(sequences, grids, strict=True)]

    def leave(self, sequences: Sequence[ImageSequence]) -> None:
        """Forget these sequences."""
        for sequence in sequences:
            self._grids.pop(sequence, None)

    def _grid(self, sequence: ImageSequence) -> Grid:
        method = sequence.method
        assert isinstance(method, RowParallel)
        if sequence not in self._grids:
            first, kept = sequence.codes[0], sequence.preserved
            self._grids[sequence] = Grid(sequence.raster, first, method.window, method.drafts, self._max_nodes, kept)
        return self._grids[sequence]
