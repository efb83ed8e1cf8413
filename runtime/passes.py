"""Shared pieces of passes: the prefill, a chain, which committed columns are attended to, and the timed calls."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from .engine import Bools, Cache, Engine, Floats, Ints, Pass, PassOutput
from .statistics import CallClock

MINIMUM_NODES = 2  # one-node passes use another matrix kernel and would not reproduce tree passes


def committed_mask(lengths: Ints, prefix_padding: Bools, past_length: int) -> Bools:
    """Which cache columns hold visible committed entries, bool `[rows, span]`.

    `lengths [rows]` entries are committed; `prefix_padding [rows, prefix]` marks padded prefix columns.
    """
    attention_mask: Bools = np.arange(past_length) < lengths[:, None]
    prefix = min(prefix_padding.shape[1], past_length)
    attention_mask[:, :prefix] &= ~prefix_padding[:, :prefix]
    return attention_mask


def run_pass(engine: Engine, batch: Pass, cache: Cache, clock: CallClock) -> PassOutput:
    """Run one pass and count it."""
    start = time.perf_counter()
    output = engine.run(batch, cache)
    clock.calls += 1
    clock.seconds += time.perf_counter() - start
    return output


def append_nodes(cache: Cache, new_kv: Any, accepted_indices: list[Ints], clock: CallClock) -> None:
    """Have the engine's cache take in accepted nodes; the seconds are the engine's."""
    start = time.perf_counter()
    cache.append(new_kv, accepted_indices)
    clock.seconds += time.perf_counter() - start


def stack_padding(padding: list[Bools]) -> Bools:
    """Padded columns of rows of different length, bool `[rows, longest]`: past a row's end comes no padding."""
    stacked = np.zeros((len(padding), max(map(len, padding))), bool)
    for row, own in enumerate(padding):
        stacked[row, : len(own)] = own
    return stacked


def prefix_mask(real: Bools, nodes: int) -> Bools:
    """Who sees whom in the prefill, bool `[rows, nodes, nodes]`, from `real [rows, prefix]`.

    Real rows see the real rows up to themselves. Padded rows see every real row and the padding up to
    themselves: their own output matters to nobody but LANTERN's LlamaGen drafter, which was trained on it.
    """
    rows, prefix = real.shape
    columns = np.zeros((rows, nodes), bool)
    columns[:, :prefix] = real
    causal = np.tri(nodes, dtype=bool)
    rows_real = np.ones((rows, nodes), bool)
    rows_real[:, :prefix] = real
    mask: Bools = np.where(rows_real[:, :, None], causal & columns[:, None], columns[:, None] | causal)
    mask[:, np.arange(nodes), np.arange(nodes)] = True
    return mask


def prefill_pass(engine: Engine, cache: Cache, prefix: list[Floats], prefix_padding: Bools) -> Pass:
    """A pass over whole prefixes `[length, width]`, each of its own length, on an empty cache.

    `prefix_padding [rows, longest]` marks padding. Rows are stretched to one length by nodes to be dropped.
    """
    rows, nodes = len(prefix), max(MINIMUM_NODES, *map(len, prefix))
    embeds = np.stack([np.concatenate([row, np.repeat(row[-1:], nodes - len(row), 0)]) for row in prefix])
    past_length = engine.next_past_length(cache, nodes)
    attention_mask = np.zeros((rows, nodes, past_length + nodes), bool)
    attention_mask[:, :, past_length:] = prefix_mask(~prefix_padding, nodes)
    return Pass(
        positions=np.broadcast_to(np.arange(nodes), (rows, nodes)), attention_mask=attention_mask, embeds=embeds
    )


def causal_pass(
    engine: Engine, cache: Cache, tokens: Ints, last_position: int, prefix_padding: Bools, hidden: Floats | None = None
) -> Pass:
    """A pass over a chain of `tokens [rows, nodes]` after all that the cache holds.

    prefix_padding: bool `[rows, prefix]`. hidden: for drafters, `[rows, nodes, hidden_size]`.
    """
    rows, nodes = tokens.shape
    past_length = engine.next_past_length(cache, nodes)
    attention_mask = np.zeros((rows, nodes, past_length + nodes), bool)
    attention_mask[:, :, :past_length] = committed_mask(cache.lengths, prefix_padding, past_length)[:, None]
    attention_mask[:, :, past_length:] = np.tri(nodes, dtype=bool)
    positions = np.minimum(cache.lengths[:, None] + np.arange(nodes), last_position)
    return Pass(positions=positions, attention_mask=attention_mask, tokens=tokens, hidden=hidden)
