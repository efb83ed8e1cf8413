"""From logits to distributions: guidance, temperature, top-k, top-p, and draws.

One node's logits at a time, since only nodes on the walked path are ever looked at.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import EngineError
from ..methods import Sampling
from .engine import Floats, Ints

Probabilities = NDArray[np.float64]
BLOCK = 64  # codes looked at together when the most probable ones are sought


def scale(logits: Floats, sampling: Sampling) -> Floats:
    """Logits over the temperature; as they are when greedy."""
    return logits if sampling.temperature in (0.0, 1.0) else logits / np.float32(sampling.temperature)


def guide(logits: Floats, cfg_scale: float) -> Floats:
    """Mix conditional and unconditional logits `[2, ...]` into `[...]`; `[1, ...]` passes through."""
    mixed: Floats = logits[0]
    if len(logits) == 1:
        return mixed
    uncond = logits[1]
    mixed = mixed - uncond
    mixed *= np.float32(cfg_scale)
    mixed += uncond
    return mixed


def softmax(logits: Floats) -> Probabilities:
    """Probabilities float64 of float32 logits, along the last axis; they sum to 1 in float64.

    Raises: EngineError: the logits hold NaN or infinity; damaged weights must not pass for a picture.
    """
    weights = logits - _highest(logits)
    probabilities: Probabilities = np.exp(weights, out=weights).astype(np.float64)
    probabilities *= 1 / probabilities.sum(-1, keepdims=True)
    return probabilities


def best_codes(logits: Floats, count: int, temperature: float = 1.0) -> tuple[Ints, Floats]:
    """The `count` most probable codes of each row of `[rows, vocab_size]`, best first, and their log-probabilities.

    Both `[rows, count]`; fewer where the vocabulary is smaller. Temperature 0 counts as 1.
    Raises: EngineError: as `softmax`.
    """
    weights = logits - _highest(logits)
    divisor = np.float32(temperature or 1.0)
    codes = _largest(logits, min(count, logits.shape[-1]))
    if divisor != 1:
        weights /= divisor
    chosen = weights[np.arange(len(weights))[:, None], codes]
    scores: Floats = chosen - np.log(np.exp(weights, out=weights).sum(-1, keepdims=True))
    return codes, scores


def _largest(values: Floats, count: int) -> Ints:
    """Where the `count` largest of each row `[rows, n]` are, largest first.

    Only the `count` blocks with the highest maxima can hold them, which spares a selection among all n.
    """
    (rows, length), row = values.shape, np.arange(len(values))[:, None]
    blocks = length // BLOCK
    if blocks * BLOCK == length and blocks >= 4 * count:
        highest = values.reshape(rows, BLOCK, blocks).max(1)  # block b: b, b + blocks, b + 2 blocks, ...
        best = np.argpartition(highest, blocks - count, axis=-1)[:, blocks - count :]
        where = (best[:, None] + blocks * np.arange(BLOCK)[:, None]).reshape(rows, count * BLOCK)
    else:
        where = np.broadcast_to(np.arange(length), (rows, length))
    found = values[row, where]
    first = np.argpartition(found, found.shape[-1] - count, axis=-1)[:, -count:]
    order = np.argsort(-found[row, first], axis=-1, kind="stable")
    codes: Ints = where[row, first[row, order]]
    return codes


def _highest(logits: Floats) -> Floats:
    """Maxima along the last axis, kept as an axis of one; EngineError if one is NaN or infinite."""
    top: Floats = logits.max(-1, keepdims=True)
    if not np.isfinite(top).all():
        raise EngineError("a graph gave NaN or infinite logits; its weights are damaged, export the bundle again")
    return top


def shape_distribution(logits: Floats, sampling: Sampling) -> Probabilities:
    """Distribution `[vocab_size]` of guided logits `[vocab_size]`; sums to 1.

    Greedy settings give the plain softmax. Ties at the top-k threshold are all kept; top-p drops what comes after the
    cumulative sum has passed it and keeps at least one code.
    Raises: EngineError: as `softmax`.
    """
    scaled = scale(logits, sampling)
    if not sampling.filtered:
        return softmax(scaled)
    _highest(logits)
    keep = np.arange(len(scaled))
    for name in sampling.filter_order.split(", "):
        if name == "top-k" and 0 < sampling.top_k < len(keep):
            values = scaled[keep]
            keep = keep[values >= np.partition(values, -sampling.top_k)[-sampling.top_k]]
        elif name == "top-p" and sampling.top_p < 1.0:
            keep = keep[np.argsort(-scaled[keep], kind="stable")]
            before = np.cumsum(softmax(scaled[keep]))
            keep = keep[: 1 + int(np.count_nonzero(before <= sampling.top_p))]
    distribution = np.zeros(len(scaled))
    distribution[keep] = softmax(scaled[keep])
    return distribution


def draw(distribution: Probabilities, rng: np.random.Generator) -> int:
    """One code from a distribution `[vocab_size]`; uses exactly one number of the stream."""
    return _Cumulative(distribution).code_at(rng.random())[0]


def draw_without_replacement(distribution: Probabilities, count: int, rng: np.random.Generator) -> Ints:
    """Up to `count` different codes, in the order of successive draws, fewer if fewer have probability.

    Each inverts the cumulative distribution with the codes drawn before cut out of it; one number of the stream each.
    """
    if count == 1:
        return np.array([draw(distribution, rng)], np.int64)
    cumulative = _Cumulative(distribution)
    codes: list[int] = []
    cuts: list[tuple[float, float]] = []  # where each drawn code begins, and its width
    for _ in range(min(count, int(np.count_nonzero(distribution)))):
        share = rng.random()
        point = share * (cumulative.total - sum(width for _, width in cuts))
        for start, width in sorted(cuts):
            if point < start:
                break
            point += width
        code, start = cumulative.code_at(point / cumulative.total)
        if code in codes:  # rounding at the edge of a cut
            left = distribution.copy()
            left[codes] = 0
            code, start = _Cumulative(left).code_at(share)
        codes.append(code)
        cuts.append((start, float(distribution[code])))
    return np.array(codes, np.int64)


class _Cumulative:
    """The cumulative sum of a distribution, formed only where it is looked at."""

    def __init__(self, distribution: Probabilities) -> None:
        blocks = len(distribution) // BLOCK if len(distribution) % BLOCK == 0 else 1
        self.blocked = distribution.reshape(blocks, -1)
        self.ends = self.blocked.sum(1).cumsum()
        self.total = float(self.ends[-1])

    def code_at(self, share: float) -> tuple[int, float]:
        """The code at `share` in [0, 1) of the sum, and where it begins; never one of probability 0."""
        point = share * self.total
        block = int(self.ends.searchsorted(point, "right"))
        if block == len(self.ends):  # rounding at the very end
            block = int(np.flatnonzero(self.blocked.sum(1))[-1])
        before = float(self.ends[block - 1]) if block else 0.0
        inside = self.blocked[block].cumsum()
        place = int(inside.searchsorted(point - before, "right"))
        if place == len(inside) or self.blocked[block, place] == 0:  # rounding at the block's end
            place = int(np.flatnonzero(self.blocked[block])[-1])
        start = before + (float(inside[place - 1]) if place else 0.0)
        return block * self.blocked.shape[1] + place, start
