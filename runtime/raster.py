"""Raster layouts: codes are generated row after row; some model families have end-of-row tokens between the rows.

An end-of-row token is not sampled, because this token always follows the last code of a row (except the last row). It
has a position and a cache entry, but needs no separate forward pass. The pass that contains the last code of the row
also contains the end-of-row token as one more node, and both are committed together. The next code is sampled after the
end-of-row token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .engine import DeviceArray, Floats, Ints
from .layout import CellValues, CodesWithCells, PassLayout
from .noise import Noise
from .tree import DraftTree

MAX_BATCH_NODES = 64  # maximum number of nodes in a pass over several grid rows


@dataclass(frozen=True)
class RasterLayout:
    """Layout of an image whose codes are generated in raster order, without end-of-row tokens."""

    num_codes: int  # number of codes of the image
    columns: int = 1  # number of codes in a grid row

    @property
    def grid_start(self) -> int:
        """Number of codes that are generated before the grid."""
        return 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the cache, end-of-row tokens included."""
        return self.find_token_position(self.num_codes - 1) + 1

    def noise(self, seed: int) -> Noise:
        return Noise(seed)

    def to_generation_order(self, values: CellValues) -> CellValues:
        return values

    def place_codes(self, codes: Sequence[int], num_before: int) -> tuple[Ints, CodesWithCells | None]:
        return np.array(codes[num_before:], np.int64), None

    def find_codes_sampled_together(self, code_index: int) -> range:
        return range(code_index, code_index + 1)

    def find_token_position(self, code_index: int) -> int:
        return code_index

    def find_code_index_above(self, code_index: int) -> int:
        """Return the code index of the cell above in the same grid, or a negative number in the first row of a grid."""
        return code_index - self.columns

    def find_left_or_upper_neighbor(self, code_index: int) -> int:
        """Return the code index of the cell to the left or, in the first column, of the cell above."""
        return code_index - (self.columns if code_index % self.columns == 0 and code_index >= self.columns else 1)

    def lay_out_prefix_end(self) -> PassLayout:
        return PassLayout(np.zeros(1, np.int64), np.zeros(1, np.int64), np.ones((1, 1), bool))

    def lay_out_tree(self, tree: DraftTree, root_index: int) -> PassLayout:
        """Return the layout of a pass over a draft tree whose root has the code index `root_index`."""
        return PassLayout(tree.tokens, root_index + tree.tree_structure.depths, tree.tree_structure.ancestor_mask)

    def lay_out_known_codes(self, codes: Ints, max_nodes: int) -> Iterator[PassLayout]:
        for start in range(0, len(codes), max_nodes):
            tokens = codes[start : start + max_nodes]
            yield PassLayout(tokens, start + np.arange(len(tokens)), np.tri(len(tokens), dtype=bool))

    def row_end_token_after(self, code_index: int) -> int | None:
        """Return the end-of-row token after the last code of a row; None after other codes."""
        return None

    def insert_row_ends(self, codes: Ints, first_index: int = 0) -> Ints:
        """Return codes with an end-of-row token before each code that begins a row.

        Args:
            codes: consecutive codes, int64 `[count]`.
            first_index: code index of the first of `codes`.
        """
        return codes

    def count_max_nodes_per_pass(self, num_draft_nodes: int) -> int:
        return num_draft_nodes


@dataclass(frozen=True, kw_only=True)
class TwoGridLayout(RasterLayout):
    """Raster layout of an image whose codes follow the codes of a smaller version of the image."""

    first_grid: tuple[int, int]  # rows and columns of the smaller grid

    @property
    def grid_start(self) -> int:
        rows, columns = self.first_grid
        return rows * columns

    def find_code_index_above(self, code_index: int) -> int:
        if code_index < self.grid_start:
            return code_index - self.first_grid[1]
        above = code_index - self.columns
        return above if above >= self.grid_start else -1


@dataclass(frozen=True, kw_only=True)
class RowEndLayout(RasterLayout):
    """Raster layout with an end-of-row token after every row but the last."""

    row_end: int  # token id of the end-of-row token

    def find_token_position(self, code_index: int) -> int:
        return code_index + min(code_index, self.num_codes - 1) // self.columns

    def lay_out_tree(self, tree: DraftTree, root_index: int) -> PassLayout:
        codes = root_index + tree.tree_structure.depths  # code index of each draft node, [nodes]
        ends_before = np.minimum(codes, self.num_codes - 1) // self.columns  # end-of-row tokens before each code
        ends = (codes % self.columns == self.columns - 1) & (codes + 1 < self.num_codes)  # last codes of rows, [nodes]
        # A draft node that ends a row becomes two pass nodes: the node itself and the end-of-row token.
        draft_nodes = np.repeat(np.arange(tree.num_nodes), 1 + ends)  # draft node of each pass node, [pass nodes]
        sampling_nodes = np.cumsum(1 + ends) - 1  # last pass node of each draft node, [nodes]
        end_nodes = sampling_nodes[ends]  # pass nodes of end-of-row tokens
        ancestor_mask = tree.tree_structure.ancestor_mask[draft_nodes][:, draft_nodes]
        ancestor_mask[end_nodes - 1, end_nodes] = False  # a node precedes its end-of-row token
        tokens = tree.tokens[draft_nodes]
        positions = (codes + ends_before)[draft_nodes]
        tokens[end_nodes] = self.row_end
        positions[end_nodes] += 1
        return RowEndPassLayout(tokens, positions, ancestor_mask, draft_nodes, sampling_nodes)

    def lay_out_known_codes(self, codes: Ints, max_nodes: int) -> Iterator[PassLayout]:
        # An end-of-row token after the last known code must be inserted, too. So 0 stands for the unknown next code,
        # and is removed again.
        tokens = self.insert_row_ends(np.append(codes, 0))[:-1]
        follows = np.append(tokens[1:] == self.row_end, False)  # whether an end-of-row token is next, [tokens]
        for start in range(0, len(tokens), max_nodes):
            part = slice(start, start + max_nodes)
            count = len(tokens[part])
            nodes = np.arange(count)
            # The code before an end-of-row token predicts no code; the end-of-row token does.
            sampling_nodes = np.flatnonzero(~follows[part])
            yield RowEndPassLayout(tokens[part], start + nodes, np.tri(count, dtype=bool), nodes, sampling_nodes)

    def row_end_token_after(self, code_index: int) -> int | None:
        ends_row = code_index % self.columns == self.columns - 1 and code_index + 1 < self.num_codes
        return self.row_end if ends_row else None

    def insert_row_ends(self, codes: Ints, first_index: int = 0) -> Ints:
        numbers = first_index + np.arange(len(codes))
        begins = (numbers % self.columns == 0) & (numbers > 0) & (numbers < self.num_codes)
        return np.insert(codes, np.flatnonzero(begins), self.row_end)

    def count_max_nodes_per_pass(self, num_draft_nodes: int) -> int:
        return 2 * num_draft_nodes


@dataclass(eq=False)
class RowEndPassLayout(PassLayout):
    """Nodes of a forward pass: the nodes of a draft, with end-of-row tokens after the nodes that end a row."""

    nodes_match_draft: ClassVar[bool] = False

    draft_nodes: Ints  # draft node of each pass node, int64 `[pass nodes]`
    sampling_pass_nodes: Ints  # pass node after which the token of each draft node is sampled, int64 `[nodes]`

    def logits(self, logits: DeviceArray, rows: slice, nodes: slice | Sequence[int]) -> Floats:
        """Return the logits after each draft node, or after the end-of-row token that follows the node."""
        read: Floats = logits[rows, self.sampling_pass_nodes[nodes].tolist()]
        return read

    def find_sampling_nodes(self, nodes: Ints) -> Ints:
        return self.sampling_pass_nodes[nodes]

    def find_path_nodes(self, path: Sequence[int]) -> Ints:
        return np.flatnonzero(np.isin(self.draft_nodes, path))

    def find_hidden_state_nodes(self, committed_nodes: Ints, count: int) -> Ints:
        """Return the committed nodes after which a code is sampled, and not an end-of-row token."""
        return np.intersect1d(committed_nodes, self.sampling_pass_nodes)
