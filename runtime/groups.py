"""Layouts of images whose model generates groups of cells: each forward pass generates all codes of a group.

PAR (arXiv 2412.15119) divides the image into regions; a group has the cell at the same place of every region. A pass
reads the codes of the previous group. Its nodes attend to each other and to all earlier nodes. If a group has more
cells than the previous group, learned vectors are the further inputs; their token ids follow the codebook.

In NAR (arXiv 2503.10696) a group is a diagonal of the grid. The target has two heads: after each code, the first head
has logits for the cell to the right, the second for the cell below. A code is sampled from the mean of the logits that
the left and the upper neighbour give for its cell.

Given all earlier groups, the codes of a group are sampled independently, as the model was trained. Each is sampled
with the noise of its cell, so an image does not depend on the other images in its passes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from .engine import DeviceArray, Floats, Ints
from .layout import CellValues, CodesWithCells, PassLayout
from .noise import GROUP_SIZE, Noise


@dataclass(frozen=True)
class GroupLayout:
    """Layout of an image that is generated in groups; the manifest's `GroupOrderSpec` explains the groups."""

    groups: tuple[tuple[int, ...], ...]  # cells of each group
    first_learned_token: int  # token of the first learned vector; the others follow it

    @cached_property
    def cells(self) -> Ints:
        """Cells in generation order, int64 `[codes]`."""
        return np.array([cell for group in self.groups for cell in group], np.int64)

    @cached_property
    def group_starts(self) -> list[int]:
        """Number of codes generated before each group, and at last the number of all codes, `[groups + 1]`."""
        return [0, *np.cumsum([len(group) for group in self.groups]).tolist()]

    @cached_property
    def _completing_code_indices(self) -> Ints:
        """The code at which each cell and all cells before it are known, int64 `[codes]`."""
        # `argsort` inverts the permutation: the code of each cell.
        return np.maximum.accumulate(np.argsort(self.cells))

    @property
    def num_codes(self) -> int:
        """Number of codes."""
        return self.group_starts[-1]

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the cache: the codes."""
        return self.num_codes

    def noise(self, seed: int) -> Noise:
        """Return the noise of an image: each code has the noise of its cell."""
        return GroupNoise(seed, self)

    def to_generation_order(self, values: CellValues) -> CellValues:
        """Return values of cells `[cells]` in the order in which the cells are generated."""
        return values[self.cells]  # type: ignore[return-value]

    def place_codes(self, codes: Sequence[int], num_known_before: int) -> tuple[Ints, CodesWithCells]:
        """Return the codes up to the first gap that are new there, and all new codes, see `ImageLayout.place_codes`."""
        image = np.zeros(self.num_codes, np.int64)
        image[self.cells[: len(codes)]] = codes
        complete = slice(self.count_cells_before_gap(num_known_before), self.count_cells_before_gap(len(codes)))
        return image[complete], CodesWithCells(
            self.cells[num_known_before : len(codes)], np.array(codes[num_known_before:], np.int64)
        )

    def count_cells_before_gap(self, num_known_codes: int) -> int:
        """Return the number of cells before the first gap once `num_known_codes` codes are known."""
        return int(np.searchsorted(self._completing_code_indices, num_known_codes))

    def codes_sampled_together(self, code_index: int) -> range:
        """Return the codes of the group that a code belongs to."""
        group = self.find_group(code_index)
        return range(self.group_starts[group], self.group_starts[group + 1])

    def find_group(self, code_index: int) -> int:
        """Return the group that a code belongs to."""
        return bisect_right(self.group_starts, code_index) - 1

    def token_position(self, code_index: int) -> int:
        """Return the number of a code: guidance counts codes, wherever their cells are."""
        return code_index

    def lay_out_prefix_end(self) -> PassLayout:
        """Return the layout of the last node of a prefix, after which the first code is sampled."""
        return PassLayout(np.zeros(1, np.int64), np.zeros(1, np.int64), np.ones((1, 1), bool))

    def lay_out_groups(self, groups: range, codes: Sequence[int] | Ints) -> PassLayout:
        """Return the pass nodes that generate these groups: one for each of their cells.

        Args:
            groups: consecutive groups, not the first; later groups attend to earlier groups.
            codes: codes in generation order, at least all codes before the last of `groups`.
        """
        tokens: list[int] = []
        positions: list[int] = []
        counts = [self.count_group_nodes(group) for group in groups]
        for group, count in zip(groups, counts, strict=True):
            # The inputs are the codes of the group before, then learned vectors if this group has more cells.
            start, end = self.group_starts[group - 1 : group + 1]
            vectors = count - (end - start)
            tokens += [*codes[start:end], *range(self.first_learned_token, self.first_learned_token + vectors)]
            # a vector has the first position behind the image, whose row of the rotary table is zero
            positions += [*self.groups[group - 1], *[self.num_codes] * vectors]
        # Nodes of one group attend to each other, and to the groups before: the mask is causal by group.
        passes = np.repeat(np.arange(len(counts)), counts)  # index of each node's group, [nodes]
        ancestor_mask = passes[:, None] >= passes
        return PassLayout(np.array(tokens, np.int64), np.array(positions, np.int64), ancestor_mask)

    def count_group_nodes(self, group: int) -> int:
        """Return the number of pass nodes that generate a group."""
        return len(self.groups[group])

    def lay_out_known_codes(self, codes: Ints, max_nodes: int) -> Iterator[PassLayout]:
        """Yield passes over as many groups as `max_nodes` nodes hold, see `ImageLayout.lay_out_known_codes`."""
        # The pass for a group reads the codes of all groups before it, so the first group without them ends the passes.
        last = next(
            (group for group, start in enumerate(self.group_starts[:-1]) if start > len(codes)), len(self.groups)
        )
        first = 1  # group 0 is generated after the prefix
        while first < last:
            end = first + 1
            while end < last and sum(map(self.count_group_nodes, range(first, end + 1))) <= max_nodes:
                end += 1
            yield self.lay_out_groups(range(first, end), codes)
            first = end

    def max_pass_nodes(self, num_draft_nodes: int) -> int:
        """Return the number of draft nodes."""
        return num_draft_nodes


@dataclass(frozen=True)
class TwoHeadLayout(GroupLayout):
    """Groups of a target with two heads: a pass has a node for each cell of the group before."""

    columns: int  # number of columns of the grid

    def lay_out_prefix_end(self) -> PassLayout:
        """Return the layout of the last node of a prefix, whose two logits the first code has the mean of."""
        layout = super().lay_out_prefix_end()
        return TwoHeadPass(layout.tokens, layout.positions, layout.ancestor_mask, np.array([[0, 1]]))

    def lay_out_groups(self, groups: range, codes: Sequence[int] | Ints) -> PassLayout:
        """Return the pass nodes that generate these groups, see `GroupLayout.lay_out_groups`."""
        layout = super().lay_out_groups(groups, codes)
        pairs: list[tuple[int, int]] = []
        first = 0
        for group in groups:
            pairs += self._find_logit_pairs(group, first)
            first += self.count_group_nodes(group)
        logit_pairs = np.array(pairs, np.int64)
        return TwoHeadPass(layout.tokens, layout.positions, layout.ancestor_mask, logit_pairs)

    def count_group_nodes(self, group: int) -> int:
        """Return the number of pass nodes that generate a group."""
        return len(self.groups[group - 1])

    def _find_logit_pairs(self, group: int, first_node: int) -> Iterator[tuple[int, int]]:
        """Yield `TwoHeadPass.logit_pairs` of each cell of a group whose nodes begin at `first_node`."""
        nodes = {cell: node for node, cell in enumerate(self.groups[group - 1], first_node)}
        for cell in self.groups[group]:
            logits = []
            if cell >= self.columns:
                logits.append(2 * nodes[cell - self.columns] + 1)  # the upper neighbour has logits for the cell below
            if cell % self.columns:
                logits.append(2 * nodes[cell - 1])  # the left neighbour has logits for the cell to the right
            yield logits[0], logits[-1]  # the manifest allows no cell without neighbours but the first


@dataclass(eq=False)
class TwoHeadPass(PassLayout):
    """Nodes of a forward pass whose target has two logits after each node, one for each of two cells."""

    nodes_match_draft: ClassVar[bool] = False

    # the two logits whose mean each code is sampled from, int64 `[codes, 2]`: twice the pass node, plus 1 for the
    # head of the cell below
    logit_pairs: Ints

    def logits(self, logits: DeviceArray, rows: slice, nodes: slice | Sequence[int]) -> Floats:
        """Return the mean of two logits for each code, float32 `[rows, codes, vocab_size]`.

        Args:
            logits: logits of the pass, on the host or on a device.
            rows: batch rows of the sequence.
        """
        both: Floats = logits[rows, : len(self.tokens)]
        heads = both.reshape(len(both), 2 * both.shape[1], -1)  # [rows, nodes * heads, vocab_size]
        logit_pairs = self.logit_pairs[nodes]
        mean: Floats = (heads[:, logit_pairs[:, 0]] + heads[:, logit_pairs[:, 1]]) / np.float32(2)
        return mean


class GroupNoise(Noise):
    """Noise of an image whose positions count in generation order: each position has the noise of its cell."""

    def __init__(self, seed: int, layout: GroupLayout) -> None:
        super().__init__(seed)
        self._layout = layout

    def gumbel(self, first_position: int, num_positions: int, vocab_size: int) -> Floats:
        """Generate the noise of cells as `Noise.gumbel` does, float32 `[num_positions, vocab_size]`.

        Args:
            first_position: first position, in generation order; positions behind the image are cells, too.
            num_positions: number of positions.
            vocab_size: number of codes.
        """
        cells = self._layout.cells[first_position : first_position + num_positions].tolist()
        cells += range(
            first_position + len(cells), first_position + num_positions
        )  # behind the image, position and cell are equal
        return np.concatenate([super(GroupNoise, self).gumbel(cell, 1, vocab_size) for cell in cells])

    def prepare_noise_group(self, group: int, vocab_size: int) -> None:
        """Generate and store the noise of the cells at the positions of a group, see `Noise.prepare_noise_group`."""
        cells = self._layout.cells[group * GROUP_SIZE : (group + 1) * GROUP_SIZE].tolist()
        for cell in cells:
            super().prepare_noise_group(cell // GROUP_SIZE, vocab_size)

    def discard_noise_before(self, position: int) -> None:
        """Delete stored noise of cells that come before the first gap once `position` codes are known."""
        super().discard_noise_before(self._layout.count_cells_before_gap(position))
