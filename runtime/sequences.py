"""What a target makes of whole sequences, by passes whose shapes depend on nothing but their length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from .drafts import Model, PrefixRow
from .engine import Floats, Ints, PassOutput
from .passes import MINIMUM_NODES, causal_pass, prefill_pass, stack_padding
from .statistics import Clock

NODES = 64  # of a pass; more would not be faster, and engines are built for so many


def sequence_logits(model: Model, rows: Sequence[PrefixRow], tokens: Ints, clock: Clock) -> Iterator[Floats]:
    """Logits `[rows, nodes, vocab_size]` after the rows' prefixes, one node, then after `tokens [count]`, in parts."""
    passes = _passes(model, rows, np.tile(tokens, (len(rows), 1)), clock)
    output, lengths = next(passes)
    yield output.logits[np.arange(len(rows)), lengths - 1][:, None]
    for output, counts in passes:
        yield output.logits[:, : counts[0]]


def sequence_states(model: Model, rows: Sequence[PrefixRow], tokens: Ints) -> list[Floats]:
    """Hidden states of each row's prefix and of its `tokens [rows, count]`, float32 `[prefix + count, hidden_size]`."""
    parts: list[list[Floats]] = [[] for _ in rows]
    for output, counts in _passes(model, rows, tokens, Clock()):
        for row, count in enumerate(counts.tolist()):
            parts[row].append(output.hidden[np.full(count, row), np.arange(count)])
    return [np.concatenate(own) for own in parts]


def _passes(model: Model, rows: Sequence[PrefixRow], tokens: Ints, clock: Clock) -> Iterator[tuple[PassOutput, Ints]]:
    """Passes over the prefixes and then over parts of `tokens [rows, count]`; how many nodes of each row count."""
    target, sides, lengths = model.target, len(rows), np.array([len(row.embeds) for row in rows])
    padding = stack_padding([~row.real for row in rows])  # [rows, longest]
    cache = target.new_cache(sides, int(lengths.max()) + tokens.shape[1] + MINIMUM_NODES)
    output = clock.run(target, prefill_pass(target, cache, [row.embeds for row in rows], padding), cache)
    clock.append(cache, output.new_kv, [np.arange(length) for length in lengths])
    yield output, lengths
    for start in range(0, tokens.shape[1], NODES):
        part = tokens[:, start : start + NODES]
        count = part.shape[1]
        nodes = np.pad(part, ((0, 0), (0, max(0, MINIMUM_NODES - count))))
        output = clock.run(target, causal_pass(target, cache, nodes, model.positions - 1, padding), cache)
        clock.append(cache, output.new_kv, [np.arange(count)] * sides)
        yield output, np.full(sides, count)
