"""Inputs of forward passes: prefills, chains, and attention masks over committed cache columns."""

from __future__ import annotations

from functools import cache

import numpy as np

from .engine import Bools, Cache, Engine, Floats, Ints, Pass

MIN_NODES = 2  # one-node passes use another matrix kernel and would not reproduce tree passes


def unmask_committed(attention_mask: Bools, lengths: Ints, prefix_padding: Bools) -> None:
    """Update a mask: let all nodes attend to the committed cache entries of their rows, except to padding.

    Args:
        attention_mask: mask to change, bool `[rows, nodes, columns]`, False in the columns of the cache.
        lengths: number of committed entries of each row, int64 `[rows]`.
        prefix_padding: True at padding, bool `[rows, columns]`, at most as many columns as the longest prefix.
    """
    for row_mask, length in zip(attention_mask, lengths.tolist(), strict=True):
        row_mask[:, :length] = True
    if columns := prefix_padding.shape[1]:
        attention_mask[:, :, :columns] &= ~prefix_padding[:, None]


def stack_padding(padding: list[Bools]) -> Bools:
    """Stack padding masks of rows of different length, bool `[rows, longest]`; False after the end of a row."""
    stacked = np.zeros((len(padding), max(map(len, padding), default=0)), bool)
    for stacked_row, row in zip(stacked, padding, strict=True):
        stacked_row[: len(row)] = row
    return stacked


@cache
def identity_mask(nodes: int) -> Bools:
    """Return the mask with which nodes attend only to themselves, bool `[nodes, nodes]`; it must not be changed."""
    return np.eye(nodes, dtype=bool)


def prefix_mask(real: Bools, nodes: int) -> Bools:
    """Return the attention mask of the prefill, bool `[rows, nodes, nodes]`.

    Real nodes attend to the real nodes up to themselves. Padding attends to every real node and to the padding up to
    itself. Only LANTERN's LlamaGen drafter, which was trained on it, reads the output of padding.

    Args:
        real: False on padding, bool `[rows, prefix]`.
        nodes: number of nodes of the pass, at least the length of the prefix.
    """
    # Nodes after the prefix are dropped from the output.
    real = np.pad(real, ((0, 0), (0, nodes - real.shape[1])), constant_values=True)
    causal = np.tri(nodes, dtype=bool)
    mask: Bools = np.where(real[:, :, None], causal & real[:, None], causal | real[:, None])
    return mask


def prefill_pass(
    engine: Engine, cache: Cache, prefix: list[Floats], prefix_padding: Bools, offsets: Ints | int = 0
) -> Pass:
    """Return a pass over whole prefixes on an empty cache; shorter rows repeat their last node.

    Args:
        engine: engine that will run the pass.
        cache: empty cache.
        prefix: embeddings of each row, float32 `[length, hidden_size]`.
        prefix_padding: True at padding, bool `[rows, longest prefix]`.
        offsets: position of the first column of each row, int64 `[rows]`, or of all rows.
    """
    rows = len(prefix)
    nodes = max(MIN_NODES, *map(len, prefix))
    embeds = np.stack([np.concatenate([row, np.repeat(row[-1:], nodes - len(row), 0)]) for row in prefix])
    past_length = engine.next_past_length(cache, nodes)
    attention_mask = np.zeros((rows, nodes, past_length + nodes), bool)
    attention_mask[:, :, past_length:] = prefix_mask(~prefix_padding, nodes)
    positions = np.broadcast_to(np.reshape(offsets, (-1, 1)) + np.arange(nodes), (rows, nodes))
    return Pass(positions, attention_mask, embeds=embeds)


def causal_pass(
    engine: Engine,
    cache: Cache,
    tokens: Ints,
    last_position: int,
    prefix_padding: Bools,
    hidden: Floats | None = None,
    offsets: Ints | int = 0,
) -> Pass:
    """Return a pass over a chain of tokens after all entries of the cache.

    Args:
        engine: engine that will run the pass.
        cache: cache that the pass reads.
        tokens: tokens of the chain, int64 `[rows, nodes]`.
        last_position: position that later nodes get, too.
        prefix_padding: True at padding, bool `[rows, columns]`.
        hidden: hidden states for a drafter, float32 `[rows, nodes, hidden_size]`, None for the target.
        offsets: position of the first column of each row, int64 `[rows]`, or of all rows.
    """
    rows, nodes = tokens.shape
    past_length = engine.next_past_length(cache, nodes)
    attention_mask = np.zeros((rows, nodes, past_length + nodes), bool)
    unmask_committed(attention_mask, cache.lengths, prefix_padding)
    attention_mask[:, :, past_length:] = np.tri(nodes, dtype=bool)
    starts = cache.lengths + offsets
    positions = np.minimum(starts[:, None] + np.arange(nodes), last_position)
    return Pass(positions, attention_mask, tokens, hidden=hidden)
