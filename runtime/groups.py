"""Layouts of images that are generated in groups of cells: each forward pass generates all codes of one group.

PAR (arXiv 2412.15119) divides the image into regions. A group contains one cell of every region, always at the same
offset in its region. The forward pass for a group reads the codes of the previous group. The nodes of the pass attend
to each other and to all earlier nodes. If a group has more cells than the previous group, learned vectors fill the
remaining inputs. The token ids of the learned vectors come after the ids of the codebook.

In NAR (arXiv 2503.10696) a group is a diagonal of the grid. The target has two output heads. After each code, the first
head computes logits for the cell to the right, and the second head for the cell below. A cell has a left and an upper
neighbour, and its code is sampled from the mean of their logits for the cell.

The model was trained to sample the codes of a group independently of each other, given all earlier groups. Each code is
sampled with the noise of its cell, so an image does not depend on the other images in the same passes.
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
    """Layout of an image that is generated in groups of cells; the manifest's `GroupOrderSpec` lists the groups."""

    groups: tuple[tuple[int, ...], ...]  # cells of each group, in generation order
    first_learned_token: int  # token id of the first learned vector; the ids of further vectors follow this id

    @cached_property
    def generation_order(self) -> Ints:
        """Cells in generation order, int64 `[codes]`."""
        return np.array([cell for group in self.groups for cell in group], np.int64)

    @cached_property
    def group_starts(self) -> list[int]:
        """Number of codes generated before each group; the last entry is the number of all codes, `[groups + 1]`."""
        return [0, *np.cumsum([len(group) for group in self.groups]).tolist()]

    @cached_property
    def _completing_code_indices(self) -> Ints:
        """Index of the code after which each cell and all cells before it are known, int64 `[codes]`."""
        # `argsort` inverts the permutation, which gives the code index of each cell. A cell and all cells
        # before it are known once the latest of their codes is known, so the maximum runs over these cells.
        return np.maximum.accumulate(np.argsort(self.generation_order))

    @property
    def num_codes(self) -> int:
        return self.group_starts[-1]

    @property
    def num_tokens(self) -> int:
        return self.num_codes

    def noise(self, seed: int) -> Noise:
        return GroupNoise(seed, self)

    def to_generation_order(self, values: CellValues) -> CellValues:
        return values[self.generation_order]  # type: ignore[return-value]

    def place_codes(self, codes: Sequence[int], num_before: int) -> tuple[Ints, CodesWithCells]:
        image = np.zeros(self.num_codes, np.int64)
        image[self.generation_order[: len(codes)]] = codes
        complete = slice(self.count_leading_known_cells(num_before), self.count_leading_known_cells(len(codes)))
        return image[complete], CodesWithCells(
            self.generation_order[num_before : len(codes)], np.array(codes[num_before:], np.int64)
        )

    def count_leading_known_cells(self, num_known_codes: int) -> int:
        """Return the number of cells before the first unknown cell, if the first `num_known_codes` codes are known."""
        return int(np.searchsorted(self._completing_code_indices, num_known_codes))

    def find_codes_sampled_together(self, code_index: int) -> range:
        group = self.find_group_index(code_index)
        return range(self.group_starts[group], self.group_starts[group + 1])

    def find_group_index(self, code_index: int) -> int:
        return bisect_right(self.group_starts, code_index) - 1

    def find_token_position(self, code_index: int) -> int:
        """Return `code_index`, because the guidance schedule counts codes and not cells."""
        return code_index

    def lay_out_prefix_end(self) -> PassLayout:
        return PassLayout(np.zeros(1, np.int64), np.zeros(1, np.int64), np.ones((1, 1), bool))

    def lay_out_groups(self, groups: range, codes: Sequence[int] | Ints) -> PassLayout:
        """Return the layout of a pass that generates groups, with one node for each of their cells.

        Args:
            groups: indices of consecutive groups from 1, since the prefix generates group 0; later groups attend to
                earlier groups.
            codes: codes in generation order, at least all codes before the last of `groups`.
        """
        tokens: list[int] = []
        positions: list[int] = []
        counts = [self.count_group_nodes(group) for group in groups]
        for group, count in zip(groups, counts, strict=True):
            # The inputs are the codes of the previous group, then learned vectors if this group has more cells.
            start, end = self.group_starts[group - 1 : group + 1]
            vectors = count - (end - start)
            tokens += [*codes[start:end], *range(self.first_learned_token, self.first_learned_token + vectors)]
            # Learned vectors get the first position after the image, where the rotary table is zero.
            positions += [*self.groups[group - 1], *[self.num_codes] * vectors]
        # A node attends to all nodes of its group and of earlier groups, so the mask is causal between groups.
        group_of_node = np.repeat(np.arange(len(counts)), counts)  # [nodes]
        ancestor_mask = group_of_node[:, None] >= group_of_node  # [nodes, nodes]
        return PassLayout(np.array(tokens, np.int64), np.array(positions, np.int64), ancestor_mask)

    def count_group_nodes(self, group: int) -> int:
        return len(self.groups[group])

    def lay_out_known_codes(self, codes: Ints, max_nodes: int) -> Iterator[PassLayout]:
        """Yield the layouts of passes over known codes, each over as many groups as fit into `max_nodes` nodes."""
        # The pass for a group reads the codes of all earlier groups. So the passes end before the first group that has
        # an unknown code before it.
        last = next(
            (group for group, start in enumerate(self.group_starts[:-1]) if start > len(codes)), len(self.groups)
        )
        first = 1  # group 0 needs no pass, because the prefix gives its logits
        while first < last:
            end = first + 1
            while end < last and sum(map(self.count_group_nodes, range(first, end + 1))) <= max_nodes:
                end += 1
            yield self.lay_out_groups(range(first, end), codes)
            first = end

    def count_max_nodes_per_pass(self, num_draft_nodes: int) -> int:
        return num_draft_nodes


@dataclass(frozen=True)
class TwoHeadLayout(GroupLayout):
    """Layout for a target with two output heads; a pass has one node for each cell of the previous group."""

    columns: int  # number of columns of the grid

    def lay_out_prefix_end(self) -> PassLayout:
        """Return the layout of the last prefix node; both heads of this node give logits for the first code."""
        layout = super().lay_out_prefix_end()
        return TwoHeadPassLayout(layout.tokens, layout.positions, layout.ancestor_mask, np.array([[0, 1]]))

    def lay_out_groups(self, groups: range, codes: Sequence[int] | Ints) -> PassLayout:
        layout = super().lay_out_groups(groups, codes)
        pairs: list[tuple[int, int]] = []
        first = 0  # first pass node of the group
        for group in groups:
            pairs += self._find_logit_pairs(group, first)
            first += self.count_group_nodes(group)
        logit_pairs = np.array(pairs, np.int64)
        return TwoHeadPassLayout(layout.tokens, layout.positions, layout.ancestor_mask, logit_pairs)

    def count_group_nodes(self, group: int) -> int:
        return len(self.groups[group - 1])

    def _find_logit_pairs(self, group: int, first_node: int) -> Iterator[tuple[int, int]]:
        """Yield the two logits for each cell of a group, in the form of `TwoHeadPassLayout.logit_pairs`."""
        nodes = {cell: node for node, cell in enumerate(self.groups[group - 1], first_node)}
        for cell in self.groups[group]:
            logits = []
            if cell >= self.columns:
                logits.append(2 * nodes[cell - self.columns] + 1)  # second head: the cell below
            if cell % self.columns:
                logits.append(2 * nodes[cell - 1])  # first head: the cell to the right
            # A cell at the edge has one neighbour, whose logits then count twice in the mean. The manifest allows no
            # cell without a neighbour, except the first cell, which the prefix generates.
            yield logits[0], logits[-1]


@dataclass(eq=False)
class TwoHeadPassLayout(PassLayout):
    """Nodes of a forward pass of a target with two output heads: logits for two cells after each node."""

    nodes_match_draft: ClassVar[bool] = False

    # Each code is sampled from the mean of two logits, whose indices these are, int64 `[codes, 2]`. An index is
    # 2 * pass node for the head of the cell to the right, and 2 * pass node + 1 for the head of the cell below.
    logit_pairs: Ints

    def logits(self, logits: DeviceArray, rows: slice, nodes: slice | Sequence[int]) -> Floats:
        """Return the mean of two logits for each code; `logits` is `[rows, nodes, 2 * vocab_size]`."""
        pass_logits: Floats = logits[rows, : len(self.tokens)]
        # one entry for each head of each node: [rows, 2 * nodes, vocab_size]
        heads = pass_logits.reshape(len(pass_logits), 2 * pass_logits.shape[1], -1)
        logit_pairs = self.logit_pairs[nodes]
        mean: Floats = (heads[:, logit_pairs[:, 0]] + heads[:, logit_pairs[:, 1]]) / np.float32(2)
        return mean


class GroupNoise(Noise):
    """Noise of an image that is generated in groups: each position in generation order has the noise of its cell."""

    def __init__(self, seed: int, layout: GroupLayout) -> None:
        super().__init__(seed)
        self._layout = layout

    def gumbel(self, first_position: int, num_positions: int, vocab_size: int) -> Floats:
        cells = self._layout.generation_order[first_position : first_position + num_positions].tolist()
        # Positions past the end of the image have no cell, so the position number stands for the cell number.
        cells += range(first_position + len(cells), first_position + num_positions)
        return np.concatenate([super(GroupNoise, self).gumbel(cell, 1, vocab_size) for cell in cells])

    def prepare_noise_group(self, group: int, vocab_size: int) -> None:
        cells = self._layout.generation_order[group * GROUP_SIZE : (group + 1) * GROUP_SIZE].tolist()
        for cell in cells:
            super().prepare_noise_group(cell // GROUP_SIZE, vocab_size)

    def discard_noise_before(self, position: int) -> None:
        super().discard_noise_before(self._layout.count_leading_known_cells(position))
