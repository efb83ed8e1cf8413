"""Inputs of forward passes: prefills, passes over drafts, and attention masks over committed cache columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from .engine import Bools, Cache, Engine, Ints, PassInput
from .layout import PassLayout
from .state import PrefixRow

# Minimum number of nodes of a pass. A pass over one node would use another matrix kernel, whose rounding differs from
# passes over trees.
MIN_NODES = 2


def stack_masks(masks: list[Bools]) -> Bools:
    """Stack masks of different lengths, bool `[rows, longest]`; entries after the end of a mask are False."""
    stacked = np.zeros((len(masks), max(map(len, masks), default=0)), bool)
    for stacked_row, row in zip(stacked, masks, strict=True):
        stacked_row[: len(row)] = row
    return stacked


def build_prefill_mask(is_real_token: Bools, num_nodes: int) -> Bools:
    """Return the attention mask of the prefill, bool `[rows, num_nodes, num_nodes]`.

    A real node attends to itself and to the real nodes before it. A padding node attends to every real node, to itself
    and to the padding before it. LANTERN's LlamaGen drafter reads the output of padding, as in its training. GEAR-T2I
    samples the first code after one.
    """
    # Nodes after the prefix of a row only fill the mask. Their output is not read, and they are not appended to the
    # cache.
    is_real_token = np.pad(is_real_token, ((0, 0), (0, num_nodes - is_real_token.shape[1])))
    causal = np.tri(num_nodes, dtype=bool)
    mask: Bools = np.where(is_real_token[:, :, None], causal & is_real_token[:, None], causal | is_real_token[:, None])
    return mask


def build_committed_mask(
    engine: Engine, cache: Cache, lengths: Ints, num_nodes: int, prefix_padding: Bools
) -> tuple[Bools, int]:
    """Return an attention mask with which new nodes attend to committed cache entries, and the number of cache columns.

    The mask is bool `[rows, num_nodes, past_length + num_nodes]`, False in the columns of new nodes, which the caller
    fills. `lengths` are the numbers of committed entries of each row, and `prefix_padding` is True for padding, bool
    `[rows, columns]`, with at most as many columns as the longest prefix.
    """
    past_length = engine.past_columns(cache, num_nodes)
    attention_mask = np.zeros((len(lengths), num_nodes, past_length + num_nodes), bool)
    for row_mask, length in zip(attention_mask, lengths.tolist(), strict=True):
        row_mask[:, :length] = True  # committed entries fill the first columns of a row
    if columns := prefix_padding.shape[1]:
        attention_mask[:, :, :columns] &= ~prefix_padding[:, None]  # the prefix comes first in every row
    return attention_mask, past_length


class PrefixBatch:
    """Prefixes of all batch rows, from which the inputs of forward passes are built."""

    def __init__(self, rows: Sequence[PrefixRow]) -> None:
        self._rows = rows
        # Number of tokens of each prefix, padding included, int64 `[rows]`.
        self.lengths = np.array([len(row.embeds) for row in rows], np.int64)
        padding = stack_masks([~row.is_real_token for row in rows])
        # True for padding, bool `[rows, longest prefix]`; the mask has no columns if no prefix has padding.
        self.padding = padding if padding.any() else padding[:, :0]
        self._first_positions = np.array([row.first_code_position for row in rows], np.int64)[:, None]

    def build_prefill_input(self, engine: Engine, cache: Cache) -> PassInput:
        """Return the input of a pass over all prefixes with an empty cache; shorter rows repeat their last node."""
        nodes = max(MIN_NODES, *self.lengths.tolist())
        embeds = [row.embeds for row in self._rows]
        # [rows, nodes, hidden_size]
        padded = np.stack([np.concatenate([row, np.repeat(row[-1:], nodes - len(row), 0)]) for row in embeds])
        past_length = engine.past_columns(cache, nodes)
        attention_mask = np.zeros((len(embeds), nodes, past_length + nodes), bool)
        attention_mask[:, :, past_length:] = build_prefill_mask(
            stack_masks([row.is_real_token for row in self._rows]), nodes
        )
        positions = np.stack([row.node_positions(nodes) for row in self._rows])
        return PassInput(positions, attention_mask, embeds=padded)

    def build_pass_input(
        self,
        engine: Engine,
        cache: Cache,
        layouts: Iterable[tuple[slice, PassLayout]],
        num_nodes: int,
        max_position: int,
    ) -> PassInput:
        """Return the input of a pass over the nodes of several sequences, padded to the same number of nodes.

        Args:
            layouts: batch rows and layout of each sequence.
            num_nodes: number of nodes of a row, at least the number of nodes of the longest layout.
            max_position: last position of the rotary table; nodes after this position also get this position.
        """
        num_nodes = max(MIN_NODES, num_nodes)
        attention_mask, past_length = build_committed_mask(engine, cache, cache.lengths, num_nodes, self.padding)
        # Padding nodes attend to themselves, because a softmax over no columns would be NaN.
        attention_mask[:, :, past_length:] = np.eye(num_nodes, dtype=bool)
        tokens, positions = np.zeros((2, len(self.lengths), num_nodes), np.int64)  # both [rows, nodes]
        for rows, layout in layouts:
            count = len(layout.tokens)
            tokens[rows, :count] = layout.tokens
            attention_mask[rows, :count, past_length : past_length + count] = layout.ancestor_mask
            positions[rows, :count] = layout.positions + self._first_positions[rows]
            if layout.past_mask is not None:
                for row_mask, prefix in zip(attention_mask[rows], self.lengths[rows], strict=True):
                    # The cache columns after the prefix of the row contain the tokens of the image.
                    row_mask[:count, prefix : prefix + layout.past_mask.shape[1]] &= layout.past_mask
        # Drafts may extend past the last code, where the rotary table ends.
        return PassInput(np.minimum(positions, max_position), attention_mask, tokens)
