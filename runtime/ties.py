"""Ties: a choice that rounding could turn is made from one computation, whichever pass met it.

Logits are sums of floats, and a pass forms them in an order of its own: a key that was drafted in the same pass is
added elsewhere than one from the cache. Where the best two codes are closer than that moves them, the sequence is
computed again, by passes whose shapes depend on nothing but its length, and that decides. So every pass gives the token
that this computation would give: mostly because it is clear, else because it asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..methods import Sampling
from .drafts import Model, PrefixRow
from .engine import Floats, Ints
from .sampling import guide
from .sequences import sequence_logits
from .statistics import Clock


def slack(model: Model, sampling: Sampling) -> float:
    """How far passes may move the difference of two guided logits over the temperature."""
    guidance = abs(sampling.cfg_scale) + abs(sampling.cfg_scale - 1) if sampling.guided else 1.0
    return model.rounding * guidance / (sampling.temperature or 1.0)


def settled_logits(
    model: Model, rows: Sequence[PrefixRow], tokens: Ints, cell: int, sampling: Sampling, clock: Clock
) -> Floats:
    """Guided logits `[1, vocab_size]` of code `cell`, after the rows of one prompt and `tokens [count]`; anew."""
    if cell >= sampling.guided_tokens:
        rows = rows[:1]
    (last,) = deque(sequence_logits(model, rows, tokens, clock), maxlen=1)
    return guide(last[:, -1:], sampling, cell)
