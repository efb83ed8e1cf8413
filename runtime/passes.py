"""Shared pieces of passes: the prefill, a chain, and which committed columns are attended to."""

from __future__ import annotations

from functools import cache

import numpy as np

from .engine import Bools, Cache, Engine, Floats, Ints, Pass

MIN_NODES = 2  # one-node passes use another matrix kernel and would not reproduce tree passes


def unmask_committed(attention_mask: Bools, lengths: Ints, prefix_padding: Bools) -> None:
    """Let nodes see the `lengths [rows]` entries that rows have committed, but for padding.

    attention_mask: `[rows, nodes, columns]`, False on columns of the past. prefix_padding: `[rows, up to prefix]`.
    """
    for seen, length in zip(attention_mask, lengths.tolist(), strict=True):
        seen[:, :length] = True
    if columns := prefix_padding.shape[1]:
        attention_mask[:, :, :columns] &= ~prefix_padding[:, None]


def stack_padding(padding: list[Bools]) -> Bools:
    """Padded columns of rows of different length, bool `[rows, longest]`: past a row's end comes no padding."""
    stacked = np.zeros((len(padding), max(map(len, padding), default=0)), bool)
    for row, own in zip(stacked, padding, strict=True):
        row[: len(own)] = own
    return stacked


@cache
def identity_mask(nodes: int) -> Bools:
    """What nodes see of each other at least, bool `[nodes, nodes]`; not to be written to."""
    return np.eye(nodes, dtype=bool)


def prefix_mask(real: Bools, nodes: int) -> Bools:
    """Attention mask of the prefill, bool `[rows, nodes, nodes]`, from `real [rows, prefix]`.

    Real nodes see the real ones up to themselves. Padding sees every real node and the padding up to itself: its own
    output matters to nobody but LANTERN's LlamaGen drafter, which was trained on it.
    """
    real = np.pad(real, ((0, 0), (0, nodes - real.shape[1])), constant_values=True)  # past the end: dropped nodes
    causal = np.tri(nodes, dtype=bool)
    mask: Bools = np.where(real[:, :, None], causal & real[:, None], causal | real[:, None])
    return mask


def prefill_pass(engine: Engine, cache: Cache, prefix: list[Floats], prefix_padding: Bools) -> Pass:
    """A pass over whole prefixes on an empty cache; rows are stretched to one length by nodes to be dropped.

    prefix: of each row, float32 `[length, hidden_size]`. prefix_padding: `[rows, longest]`.
    """
    rows, nodes = len(prefix), max(MIN_NODES, *map(len, prefix))
    embeds = np.stack([np.concatenate([row, np.repeat(row[-1:], nodes - len(row), 0)]) for row in prefix])
    past_length = engine.next_past_length(cache, nodes)
    attention_mask = np.zeros((rows, nodes, past_length + nodes), bool)
    attention_mask[:, :, past_length:] = prefix_mask(~prefix_padding, nodes)
    return Pass(np.broadcast_to(np.arange(nodes), (rows, nodes)), attention_mask, embeds=embeds)


def causal_pass(
    engine: Engine, cache: Cache, tokens: Ints, last_position: int, prefix_padding: Bools, hidden: Floats | None = None
) -> Pass:
    """A pass over a chain of `tokens [rows, nodes]` after all that the cache holds; `hidden` is for drafters."""
    rows, nodes = tokens.shape
    past_length = engine.next_past_length(cache, nodes)
    attention_mask = np.zeros((rows, nodes, past_length + nodes), bool)
    unmask_committed(attention_mask, cache.lengths, prefix_padding)
    attention_mask[:, :, past_length:] = np.tri(nodes, dtype=bool)
    positions = np.minimum(cache.lengths[:, None] + np.arange(nodes), last_position)
    return Pass(positions, attention_mask, tokens, hidden=hidden)
