"""Logits of a whole sequence, computed by passes whose shapes depend on nothing but its length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from .drafts import Model, PrefixRow
from .engine import Floats, Ints
from .passes import MINIMUM_NODES, causal_pass, prefill_pass, stack_padding
from .statistics import Clock

NODES = 64  # of a pass; more would not be faster, and engines are built for so many


def sequence_logits(model: Model, rows: Sequence[PrefixRow], tokens: Ints, clock: Clock) -> Iterator[Floats]:
    """Logits `[rows, nodes, vocab_size]` after the rows' prefixes, one node, then after `tokens [count]`, in parts."""
    target, sides, lengths = model.target, len(rows), np.array([len(row.embeds) for row in rows])
    padding = stack_padding([~row.real for row in rows])  # [rows, longest]
    cache = target.new_cache(sides, int(lengths.max()) + len(tokens) + MINIMUM_NODES)
    output = clock.run(target, prefill_pass(target, cache, [row.embeds for row in rows], padding), cache)
    clock.append(cache, output.new_kv, [np.arange(length) for length in lengths])
    yield output.logits[np.arange(sides), lengths - 1][:, None]
    for start in range(0, len(tokens), NODES):
        part = tokens[start : start + NODES]
        nodes = np.tile(np.pad(part, (0, max(0, MINIMUM_NODES - len(part)))), (sides, 1))
        output = clock.run(target, causal_pass(target, cache, nodes, model.positions - 1, padding), cache)
        clock.append(cache, output.new_kv, [np.arange(len(part))] * sides)
        yield output.logits[:, : len(part)]
