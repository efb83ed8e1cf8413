"""Row-parallel decoding: several grid rows are generated at the same time, each some tokens behind the row above.

A grid row starts when the row above has `window` tokens, and stays `window` tokens behind the row above (ZipAR,
arXiv 2412.04062). One pass samples the next token of every active row, so no computation is wasted. But tokens attend
to fewer tokens than in training. Token c of a row attends to the c tokens before it in this row. In the row that is i
rows above, token c attends to the first c + i * window tokens, even if more tokens are known. So the distribution
differs from autoregressive decoding. The noise of a position does not depend on the method, so an image is a function
of seed and window. A window as wide as the grid gives the image of autoregressive decoding.

The first token of a row follows the last token of the row above in raster order, which is not known yet. So the pass
reads a stand-in at the position of this last token. The stand-in is the newest token in the row above to which the
first token attends. The stand-in is never cached. The actual last token enters the cache when it is known, and attends
to all tokens before it.

End-of-row tokens, if the model has them, are the last column of the grid. They are known from the start, so the
end-of-row token of the row above is the stand-in. This token enters the cache with the last code of its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..methods import RowParallel
from .drafting import AcceptedDraft, Draft, Drafter, SequenceStep
from .engine import Bools, Ints
from .layout import CodesWithCells, PassLayout
from .raster import MAX_BATCH_NODES, RasterLayout
from .sampling import NO_CODE, make_invalid_logits_error
from .state import ImageSequence, LoadedModel
from .target import TargetOutput
from .tree import TreeStructure
from .tree_drafts import TreeDraft, make_preserved_chain


class GridNode(NamedTuple):
    """Node of a pass over several grid rows."""

    token: int
    cell: int  # cell of the token
    grid_row: int  # grid row to which the node belongs
    num_attended_tokens: int  # number of tokens of the grid row to which the node attends, see `GridPass`


@dataclass(frozen=True)
class GridPass:
    """Nodes of one pass over the active rows of a grid, whose last column holds the end-of-row tokens, if any.

    Cells count end-of-row tokens, and also the codes before the grid, to which all nodes attend.
    """

    tokens: Ints  # int64 `[nodes]`
    cells: Ints  # cell of each node, int64 `[nodes]`; the target predicts the token of the next cell
    grid_rows: Ints  # grid row to which each node belongs, int64 `[nodes]`
    # Number of tokens in the node's grid row to which the node attends, the node included, int64 `[nodes]`. The number
    # is 0 for a stand-in, to which no other node attends.
    num_attended_tokens: Ints
    sampled_nodes: list[int]  # nodes after which a code is sampled
    cached_cells: Ints  # cells of the cached tokens, in the order of the cache, int64 `[entries]`
    cached_tokens: Ints  # tokens of these cells, int64 `[entries]`
    start: int  # first cell of the grid
    columns: int  # number of columns of the grid, the column of end-of-row tokens included
    window: int  # number of tokens by which a grid row is ahead of the next grid row
    next_code_indices: Ints  # index of the code after each node, int64 `[nodes]`

    @property
    def tree_structure(self) -> TreeStructure:
        """Structure of the draft: the attention mask among the nodes, and the cells of the nodes as `depths`."""
        attended = self.build_attention_mask(self.cells) & (self.num_attended_tokens > 0)
        ancestor_mask = attended | np.eye(len(self.tokens), dtype=bool)
        return TreeStructure(self.cells, (), ancestor_mask, self.cells, False)

    def build_attention_mask(self, cells: Ints) -> Bools:
        """Return the attention mask of the nodes over `cells`, bool `[nodes, cells]`."""
        # A node attends to `num_attended_tokens` tokens of its row. In each row further up, it attends to `window` more
        # tokens than in the row below.
        row, column = np.divmod(cells - self.start, self.columns)
        rows_above = self.grid_rows[:, None] - row
        mask: Bools = (rows_above >= 0) & (column < self.num_attended_tokens[:, None] + rows_above * self.window)
        return mask | (cells < self.start)


class TokenGrid:
    """Token grid of one image during row-parallel decoding, after the first code of the grid was sampled.

    Args:
        codes: codes before the grid, and the first of the grid. All but the last are cached.
        window: number of tokens by which a grid row stays behind the row above.
        num_drafts: number of draft tokens in every row; may be changed between passes.
        max_nodes: maximum number of nodes of a pass; further nodes wait for the next pass.
        preserved_codes: preserved codes, -1 in cells to generate, int64 `[codes]`; None: all cells are generated.
    """

    def __init__(
        self,
        layout: RasterLayout,
        codes: Sequence[int],
        window: int,
        num_drafts: int = 0,
        max_nodes: int = MAX_BATCH_NODES,
        preserved_codes: Ints | None = None,
    ) -> None:
        self.codes_per_row = layout.columns  # number of columns without the column of end-of-row tokens
        self.start = layout.grid_start
        end_token = layout.row_end_token_after(self.start + self.codes_per_row - 1)
        self.has_row_ends = end_token is not None
        self.columns = self.codes_per_row + self.has_row_ends  # number of columns with the column of end-of-row tokens
        num_rows = (layout.num_codes - self.start) // self.codes_per_row
        cells = np.full((num_rows, self.columns), end_token or 0)
        cells[:, : self.codes_per_row] = -1  # only the end-of-row tokens are known
        num_known = len(codes) - self.start
        # Token of every cell, the codes before the grid included; -1 if the token is not known yet.
        self.cells: list[int] = [*codes, *cells.ravel()[num_known:].tolist()]
        self.window = min(window, self.codes_per_row)
        self.num_drafts = num_drafts
        self.max_nodes = max_nodes
        # Number of known tokens of every row; the end-of-row token counts once the last code is known.
        self.lengths = [0] * num_rows
        for cell in range(num_known - 1):
            self._extend_row(cell // self.codes_per_row)
        # Number of cached tokens of every row. The newest code and the end-of-row token enter the cache in the next
        # pass, so a row can have fewer cached tokens than known tokens.
        self.cached_lengths = [*self.lengths]
        self._cached_cells = [*range(len(codes) - 1)]  # cells of cached tokens, in cache order
        preserved = enumerate([] if preserved_codes is None else preserved_codes.tolist())
        self._preserved = {
            i + self.has_row_ends * (i // self.codes_per_row): code for i, code in preserved if code >= 0
        }
        # {cell: draft token} for cells that are not known yet. The draft tokens are preserved codes, and tokens that
        # earlier passes sampled after draft tokens.
        self._drafts = dict(self._preserved)
        self._extend_row((num_known - 1) // self.codes_per_row)

    def plan_next_pass(self) -> GridPass:
        """Return the next pass, over the newest tokens and the draft tokens of every row whose context is complete."""
        nodes: list[GridNode] = []
        lengths: list[int] = []  # number of tokens of each row in the cache or in the pass
        for row, count in enumerate(self.lengths):
            first = self.start + row * self.columns  # first cell of the row
            length = self.cached_lengths[row]
            begins_row = count == 0 and row > 0 and self.window <= self.lengths[row - 1] and self.window < self.columns
            # Nothing is sampled after the last code of the image, so it needs no pass.
            is_complete = row + 1 == len(self.lengths) and count >= self.codes_per_row
            if (begins_row or length < count) and not is_complete and self._has_full_context(row, count, lengths):
                # The stand-in is the end-of-row token of the row above, or the newest token there that is attended to.
                if begins_row:
                    stand_in = first - 1 if self.has_row_ends else first - self.columns + self.window - 1
                    nodes.append(GridNode(self.cells[stand_in], first - 1, row, num_attended_tokens=0))
                for num_attended_tokens in range(length + 1, count + 1):  # known tokens, not cached
                    cell = first + num_attended_tokens - 1  # the token attends to itself, so its column is one less
                    nodes.append(GridNode(self.cells[cell], cell, row, num_attended_tokens))
                length = count
                num_drafts = self.num_drafts
                # No draft token follows the last code of a row. A draft token needs all tokens that it attends to.
                while length < self.codes_per_row - 1 and self._has_full_context(row, length + 1, lengths):
                    cell = first + length
                    if cell not in self._preserved:
                        if not num_drafts:
                            break
                        num_drafts -= 1
                    length += 1
                    # A cell without a draft token gets a copy of the token to its left.
                    nodes.append(GridNode(self._drafts.get(cell, nodes[-1].token), cell, row, length))
            lengths.append(length)
        # Nodes beyond the maximum are omitted. They are not committed, so the next pass contains them again.
        tokens, cells, grid_rows, num_attended_tokens = np.array(nodes[: self.max_nodes], np.int64).T  # each [nodes]
        # A code is sampled after every node before the end of a row. The code after the last node of a row begins the
        # next row; it is sampled here only without stand-ins, which begin the next row otherwise.
        begins_cell = (num_attended_tokens < self.codes_per_row) | (self.window == self.columns)
        next_columns = np.minimum(num_attended_tokens, self.codes_per_row)
        cached_cells = np.array(self._cached_cells, np.int64)
        return GridPass(
            tokens=tokens,
            cells=cells,
            grid_rows=grid_rows,
            num_attended_tokens=num_attended_tokens,
            sampled_nodes=np.flatnonzero(begins_cell).tolist(),
            cached_cells=cached_cells,
            cached_tokens=np.array(self.cells, np.int64)[cached_cells],
            start=self.start,
            columns=self.columns,
            window=self.window,
            next_code_indices=self.start + grid_rows * self.codes_per_row + next_columns,
        )

    def verify_drafts(self, grid_pass: GridPass, codes: Ints) -> tuple[Ints, Ints]:
        """Verify the drafts of a pass and store the sampled codes.

        Args:
            codes: codes sampled after the nodes `grid_pass.sampled_nodes`, int64 `[sampled nodes]`; `NO_CODE` from NaN.

        Returns:
            Nodes whose keys and values are appended to the cache, and cells whose tokens are known now, both int64
            `[count]`.
        """
        choices = dict(zip(grid_pass.sampled_nodes, codes.tolist(), strict=True))
        lengths = [*self.lengths]  # lengths before this pass; nodes beyond these lengths are draft tokens
        accepted_nodes: list[int] = []
        new_cells: list[int] = []
        expected = NO_CODE  # code sampled after the previous node, unless that node was rejected
        nodes = zip(
            grid_pass.tokens.tolist(), grid_pass.grid_rows.tolist(), grid_pass.num_attended_tokens.tolist(), strict=True
        )
        for node, (token, row, count) in enumerate(nodes):
            cell = self.start + row * self.columns + count  # the cell after the node, for which a code is sampled
            code = self._preserved.get(cell, choices[node]) if node in choices else NO_CODE
            matches = count <= lengths[row] or token == expected
            accepted = matches and self._has_full_context(row, count, self.cached_lengths)
            expected = code if accepted else NO_CODE
            if not accepted:
                if code >= 0:
                    self._drafts[cell] = code
                continue
            if count:  # a stand-in (count 0) is not cached
                accepted_nodes.append(node)
                self._cached_cells.append(cell - 1)
                self.cached_lengths[row] = count
            if code >= 0:
                self.cells[cell] = code
                self._extend_row((cell - self.start) // self.columns)
                new_cells.append(cell)
                self._drafts.pop(cell, None)
            elif node in choices:
                raise make_invalid_logits_error()
        return np.array(accepted_nodes, np.int64), np.array(new_cells, np.int64)

    def _extend_row(self, row: int) -> None:
        self.lengths[row] += 1
        if self.lengths[row] == self.codes_per_row:
            self.lengths[row] = self.columns

    def _has_full_context(self, row: int, num_tokens: int, row_lengths: list[int]) -> bool:
        """Return whether the rows above have all tokens to which token `num_tokens` of `row`, counted from 1, attends.

        `row_lengths` are the numbers of available tokens of each row above.
        """
        for above in range(row - 1, -1, -1):
            num_tokens += self.window
            if row_lengths[above] < min(self.columns, num_tokens):
                return False
            if num_tokens >= self.columns and row_lengths[above] == self.columns:
                return True  # the rows further up are complete, because they started earlier
        return True


class RowParallelDraft:
    """Draft of one sequence that consists of the nodes of the active grid rows."""

    def __init__(self, sequence: ImageSequence, grid: TokenGrid) -> None:
        self.sequence = sequence
        self.grid = grid
        self.grid_pass = grid.plan_next_pass()
        self.tokens = self.grid_pass.tokens
        self.tree_structure = self.grid_pass.tree_structure
        self.next_code_indices: Sequence[int] = self.grid_pass.next_code_indices.tolist()
        self.sampled_nodes: Sequence[int] = self.grid_pass.sampled_nodes
        self.past_mask = self.grid_pass.build_attention_mask(self.grid_pass.cached_cells)
        ancestor_mask = self.tree_structure.ancestor_mask
        self.layout = PassLayout(self.tokens, self.grid_pass.cells, ancestor_mask, past_mask=self.past_mask)

    def preceding_codes(self, node: int) -> Ints:
        """Return the tokens to which a node attends, the token of the node included."""
        attended = self.tree_structure.ancestor_mask[node]
        return np.concatenate([self.grid_pass.cached_tokens[self.past_mask[node]], self.tokens[attended]])

    def accept(self, output: TargetOutput, model: LoadedModel) -> AcceptedDraft:
        sequence = self.sequence
        grid = self.grid
        accepted_nodes, new_cells = grid.verify_drafts(self.grid_pass, output.choose_tokens(self.sampled_nodes))
        image = np.array(grid.cells, np.int64)  # codes in raster order, -1 for unknown codes
        if grid.has_row_ends:  # cells count end-of-row tokens, of which r come before row r, but codes do not
            image = image.reshape(-1, grid.columns)[:, :-1].ravel()
            new_cells = new_cells - new_cells // grid.columns
        unknown = np.flatnonzero(image < 0)
        end = unknown[0] if len(unknown) else len(image)
        codes = image[len(sequence.codes) : end]
        sequence.codes += codes.tolist()
        sequence.record_draft(len(self.tokens) - 1, len(new_cells) - 1)
        step = SequenceStep(sequence.index, codes, CodesWithCells(new_cells, image[new_cells]))
        return AcceptedDraft(step, codes, accepted_nodes)


class RowParallelDrafter(Drafter):
    """Drafter of row-parallel decoding, with one token grid for each sequence."""

    def __init__(self, max_nodes: int) -> None:
        self._max_nodes = min(max_nodes, MAX_BATCH_NODES)
        self._grids: dict[ImageSequence, TokenGrid] = {}

    def draft(self, sequences: Sequence[ImageSequence]) -> list[Draft]:
        # Codes of a smaller first grid are generated one after another, before the grid is generated in parallel.
        drafts: list[Draft] = []
        for sequence in sequences:
            num_missing = sequence.plan.raster_layout.grid_start + 1 - len(sequence.codes)
            if num_missing > 0:
                # A root and its preserved tokens end in the first cell, and a token may be sampled after them.
                chain = make_preserved_chain(sequence, min(1 + num_missing, self._max_nodes))
                drafts.append(TreeDraft(sequence, chain))
            else:
                drafts.append(RowParallelDraft(sequence, self._get_grid(sequence)))
        return drafts

    def remove(self, sequences: Sequence[ImageSequence]) -> None:
        for sequence in sequences:
            self._grids.pop(sequence, None)

    def _get_grid(self, sequence: ImageSequence) -> TokenGrid:
        method = sequence.plan.method
        assert isinstance(method, RowParallel)
        if sequence not in self._grids:
            self._grids[sequence] = TokenGrid(
                sequence.plan.raster_layout,
                sequence.codes,
                method.window,
                method.drafts,
                self._max_nodes,
                sequence.preserved_codes,
            )
        return self._grids[sequence]
