"""Ties: a choice that rounding could turn is made from one computation, whichever pass met it.

Logits are sums of floats, and a pass forms them in an order of its own: a key that was drafted in the same pass is
added elsewhere than one from the cache. Where the best two codes are closer than that moves them, the sequence is
computed again, by passes whose shapes depend on nothing but its length, and that decides. So every pass gives the token
that this computation would give: mostly because it is clear, else because it asks.
"""

from __future__ import annotations

import numpy as np

from ..methods import Sampling
from .drafts import Model, PrefixRow
from .engine import Floats, Ints
from .passes import MINIMUM_NODES, causal_pass, prefill_pass, stack_padding
from .sampling import guide
from .statistics import Clock

NODES = 64  # of a pass; more would not be faster, and engines are built for so many


def slack(model: Model, sampling: Sampling) -> float:
    """How far passes may move the difference of two guided logits over the temperature."""
    guidance = abs(sampling.cfg_scale) + abs(sampling.cfg_scale - 1) if sampling.guided else 1.0
    return model.rounding * guidance / (sampling.temperature or 1.0)


def settled_logits(model: Model, rows: list[PrefixRow], tokens: Ints, sampling: Sampling, clock: Clock) -> Floats:
    """Guided logits `[1, vocab_size]` after the rows of one prompt and `tokens [count]`, computed anew."""
    target, sides, lengths = model.target, np.arange(len(rows)), np.array([len(row.embeds) for row in rows])
    padding = stack_padding([~row.real for row in rows])  # [sides, longest]
    cache = target.new_cache(len(rows), int(lengths.max()) + len(tokens) + NODES + 2)
    output = clock.run(target, prefill_pass(target, cache, [row.embeds for row in rows], padding), cache)
    clock.append(cache, output.new_kv, [np.arange(length) for length in lengths])
    last = lengths - 1
    for start in range(0, len(tokens), NODES):
        part = tokens[start : start + NODES]
        stretched = np.pad(part, (0, max(0, MINIMUM_NODES - len(part))))
        both = np.broadcast_to(stretched, (len(rows), len(stretched)))
        output = clock.run(target, causal_pass(target, cache, both, model.positions - 1, padding), cache)
        clock.append(cache, output.new_kv, [np.arange(len(part))] * len(rows))
        last = np.full(len(rows), len(part) - 1)
    return guide(output.logits[sides, last], sampling.cfg_scale)[None]
