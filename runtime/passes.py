"""Inputs of forward passes: prefills, passes over drafts, and attention masks over committed cache columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np

from .engine import Bools, Cache, Engine, Ints, PassInput
from .layout import PassLayout
from .state import PrefixRow

MIN_NODES = 2  # one-node passes use another matrix kernel and would not reproduce tree passes


def stack_padding_masks(padding_masks: list[Bools]) -> Bools:
    """Stack padding masks of rows of different length, bool `[rows, longest]`; False after the end of a row."""
    stacked = np.zeros((len(padding_masks), max(map(len, padding_masks), default=0)), bool)
    for stacked_row, row in zip(stacked, padding_masks, strict=True):
        stacked_row[: len(row)] = row
    return stacked


@cache
def identity_mask(num_nodes: int) -> Bools:
    """Return the read-only mask with which nodes attend only to themselves, bool `[num_nodes, num_nodes]`."""
    return np.eye(num_nodes, dtype=bool)


def build_prefill_mask(is_real_token: Bools, num_nodes: int) -> Bools:
    """Return the attention mask of the prefill, bool `[rows, num_nodes, num_nodes]`.

    Real nodes attend to the real nodes up to themselves. Padding attends to every real node and to the padding up to
    itself. Only LANTERN's LlamaGen drafter, which was trained on it, reads the output of padding.

    Args:
        is_real_token: False on padding, bool `[rows, prefix]`.
        num_nodes: number of nodes of the pass, at least the length of the prefix.
    """
    # Nodes after the prefix count as real here, which fills the mask. Nothing reads their output, and they are not
    # appended to the cache.
    is_real_token = np.pad(is_real_token, ((0, 0), (0, num_nodes - is_real_token.shape[1])), constant_values=True)
    causal = np.tri(num_nodes, dtype=bool)
    mask: Bools = np.where(is_real_token[:, :, None], causal & is_real_token[:, None], causal | is_real_token[:, None])
    return mask


def build_committed_mask(
    engine: Engine, cache: Cache, lengths: Ints, num_nodes: int, prefix_padding: Bools
) -> tuple[Bools, int]:
    """Return an attention mask with which new nodes attend to the committed cache entries, and `past_length`.

    Args:
        engine: engine that will run the pass.
        cache: cache that the pass reads.
        lengths: number of committed entries of each row, int64 `[rows]`.
        num_nodes: number of new nodes.
        prefix_padding: True at padding, bool `[rows, columns]`, at most as many columns as the longest prefix.

    Returns:
        Bool `[rows, num_nodes, past_length + num_nodes]`, False in the columns of new nodes; number of cache columns.
    """
    past_length = engine.padded_past_length(cache, num_nodes)
    attention_mask = np.zeros((len(lengths), num_nodes, past_length + num_nodes), bool)
    for row_mask, length in zip(attention_mask, lengths.tolist(), strict=True):
        row_mask[:, :length] = True  # entries fill the first columns of a row
    if columns := prefix_padding.shape[1]:
        attention_mask[:, :, :columns] &= ~prefix_padding[:, None]  # the prefix comes first in every row
    return attention_mask, past_length


class PrefixBatch:
    """Prefixes of the batch rows of several passes.

    Args:
        rows: prefix of each batch row.

    Attributes:
        lengths: number of columns of each prefix, int64 `[rows]`.
        padding: True at padding, bool `[rows, longest prefix]`; no columns if nothing is padded.
    """

    def __init__(self, rows: Sequence[PrefixRow]) -> None:
        self._rows = rows
        self.lengths = np.array([len(row.embeds) for row in rows], np.int64)
        padding = stack_padding_masks([~row.is_real_token for row in rows])
        self.padding = padding if padding.any() else padding[:, :0]
        self._first_positions = np.array([row.first_code_position for row in rows], np.int64)[:, None]

    def build_prefill(self, engine: Engine, cache: Cache) -> PassInput:
        """Return a pass over the whole prefixes on an empty cache; shorter rows repeat their last node."""
        nodes = max(MIN_NODES, *self.lengths.tolist())
        embeds = [row.embeds for row in self._rows]
        # [rows, nodes, hidden_size]
        padded = np.stack([np.concatenate([row, np.repeat(row[-1:], nodes - len(row), 0)]) for row in embeds])
        past_length = engine.padded_past_length(cache, nodes)
        attention_mask = np.zeros((len(embeds), nodes, past_length + nodes), bool)
        attention_mask[:, :, past_length:] = build_prefill_mask(
            ~stack_padding_masks([~row.is_real_token for row in self._rows]), nodes
        )
        positions = np.stack([row.node_positions(nodes) for row in self._rows])
        return PassInput(positions, attention_mask, embeds=padded)

    def build_pass(
        self,
        engine: Engine,
        cache: Cache,
        layouts: Iterable[tuple[slice, PassLayout]],
        num_nodes: int,
        max_position: int,
    ) -> PassInput:
        """Return a pass over the nodes of several sequences, padded to the same number of nodes.

        Args:
            engine: engine that will run the pass.
            cache: cache that the pass reads.
            layouts: batch rows and layout of each sequence.
            num_nodes: number of nodes of a row, at least the longest layout's.
            max_position: position that later nodes get, too.
        """
        num_nodes = max(MIN_NODES, num_nodes)
        attention_mask, past_length = build_committed_mask(engine, cache, cache.lengths, num_nodes, self.padding)
        # Padding nodes attend to themselves: a softmax over no columns would be NaN.
        attention_mask[:, :, past_length:] = identity_mask(num_nodes)
        tokens, positions = np.zeros((2, len(self.lengths), num_nodes), np.int64)  # both [rows, nodes]
        for rows, layout in layouts:
            count = len(layout.tokens)
            tokens[rows, :count] = layout.tokens
            attention_mask[rows, :count, past_length : past_length + count] = layout.ancestor_mask
            positions[rows, :count] = layout.positions + self._first_positions[rows]
            for row in range(*rows.indices(len(tokens))):
                # Cache columns from the row's prefix length on hold tokens of the image; the slice is a view.
                layout.mask_cached_tokens(attention_mask[row, :count, self.lengths[row] :])
        # Drafts may extend past the last code, but the rotary table ends there.
        return PassInput(np.minimum(positions, max_position), attention_mask, tokens)
