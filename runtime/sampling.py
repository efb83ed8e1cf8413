"""From logits to codes: guidance, temperature, top-k, top-p, and draws.

Logits that hold NaN or infinity raise EngineError: damaged weights must not pass for a picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

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


def guide(logits: Floats, sampling: Sampling) -> Floats:
    """Mix conditional and unconditional logits `[2, ..., vocab_size]` into one `[..., vocab_size]`, if there are two.

    What is not finite is refused later; NumPy may warn of it here.
    """
    mixed: Floats = logits[0]
    if len(logits) == 1:
        return mixed
    uncond = logits[1]
    mixed = mixed - uncond
    mixed *= sampling.cfg_scale
    mixed += uncond
    return mixed


def penalise(logits: Floats, before: Sequence[Ints], sampling: Sampling) -> Floats:
    """Logits `[sides, nodes, vocab_size]` with the repetition penalty on conditional ones.

    before: for each node, the codes of its image before its choice.
    """
    if not sampling.penalised:
        return logits
    penalised, penalty = logits.copy(), np.float32(sampling.repetition_penalty)
    for row, codes in zip(penalised[0], before, strict=True):
        known = codes[codes < len(row)]  # ends of rows are no choice
        row[known] = np.where(row[known] < 0, row[known] * penalty, row[known] / penalty)
    return penalised


def softmax(logits: Floats) -> Probabilities:
    """Probabilities float64 of float32 logits, along the last axis; they sum to 1 in float64."""
    weights = logits - _highest(logits)
    probabilities: Probabilities = np.exp(weights, out=weights).astype(np.float64)
    probabilities *= 1 / probabilities.sum(-1, keepdims=True)
    return probabilities


def choose(logits: Floats, noise: Floats | None, sampling: Sampling) -> Ints:
    """The codes `[...]` drawn from the distributions of guided logits `[..., vocab_size]` with this Gumbel noise.

    noise: float32 as logits; None draws the most probable codes. Sums are float32: rounding decides between two codes
    about once in a million draws, which moves a distribution less than the rounding of logits does.
    """
    values = shape_logits(logits, sampling)
    if noise is not None:
        values = values + noise
    if not isfinite(values.max()):  # NaN counts as the largest
        raise damaged()
    codes: Ints = values.argmax(-1)
    return codes


def choose_with_margin(logits: Floats, noise: Floats | None, sampling: Sampling) -> tuple[list[int], list[float]]:
    """What `choose` gives of logits `[n, vocab_size]` without filters, and how far each code is ahead of the next.

    Row by row: after a pass nothing is in the processor's caches, and few functions cost less than few calls (20 us
    instead of 49 for one row; measured here).
    """
    values = scale(logits, sampling)
    codes: list[int] = []
    leads: list[float] = []
    for row in values.copy() if noise is None else values + noise:
        code = int(row.argmax())
        best = row.item(code)
        if not isfinite(best):  # NaN counts as the largest
            raise damaged()
        row[code] = -np.inf
        codes.append(code)
        leads.append(best - row.item(row.argmax()))
    return codes, leads


def is_decisive(logits: Floats, noise: Floats | None, code: int, sampling: Sampling, tie_margin: float) -> bool:
    """Whether the chosen code stays if differences of logits over the temperature move by up to `tie_margin`.

    logits: guided, `[vocab_size]`. noise: `[vocab_size]`, None when greedy.
    """
    values = scaled = scale(logits, sampling)
    if sampling.filtered:
        least, certain = _filter_bounds(scaled, sampling, tie_margin)
        if not scaled[code] > certain:
            return False
        values = np.where(scaled >= least, scaled, np.float32(-np.inf))
    values = values.copy() if noise is None else values + noise
    best = values[code]
    values[code] = -np.inf
    return bool(best - values.max() > tie_margin)


def best_codes(values: Floats, count: int) -> tuple[Ints, Floats]:
    """The `count` largest of each row of log-weights `[rows, vocab_size]`, largest first, and their log-probabilities.

    Both `[rows, count]`; fewer where the vocabulary is smaller. Codes that are left out have log-probability -inf.
    """
    weights = values - _highest(values)
    codes = _largest(values, min(count, values.shape[-1]))
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
        raise damaged()
    return top


def damaged() -> EngineError:
    """The error for logits that are no numbers."""
    return EngineError("a graph gave NaN or infinite logits", remedy="its weights are damaged, export the bundle again")


def shape_logits(logits: Floats, sampling: Sampling) -> Floats:
    """Guided logits `[..., vocab_size]` over the temperature, -inf where a filter leaves a code out.

    Greedy settings leave them as they are. Filters keep all codes that tie with the last one kept: top-k the k largest,
    top-p the largest ones up to where their cumulative sum has passed it, at least one.
    """
    scaled = scale(logits, sampling)
    if not sampling.filtered:
        return scaled
    _highest(scaled)
    threshold = np.apply_along_axis(_threshold, -1, scaled, sampling)[..., None]
    return np.where(scaled >= threshold, scaled, np.float32(-np.inf))


def _threshold(scaled: Floats, sampling: Sampling) -> np.float32:
    """The smallest logit that filters keep, of scaled ones `[vocab_size]`."""
    kept = scaled
    for name in sampling.filter_order.split(", "):
        if name == "top-k" and 0 < sampling.top_k < len(kept):
            kept = kept[kept >= np.partition(kept, -sampling.top_k)[-sampling.top_k]]
        elif name == "top-p" and sampling.top_p < 1.0:
            kept = np.sort(kept)[::-1]
            kept = kept[: 1 + int(np.count_nonzero(np.cumsum(softmax(kept)) <= sampling.top_p))]
    lowest: np.float32 = kept.min()
    return lowest


def _filter_bounds(scaled: Floats, sampling: Sampling, tie_margin: float) -> tuple[float, float]:
    """What filters may do to scaled logits `[vocab_size]` if differences of them move by up to `tie_margin`.

    They keep no logit below the first number, and every one above the second. A second filter is asked about all that
    the first may keep; what it sums, it compares with the sum of those that stay for certain.
    """
    possible, certain = scaled, -np.inf
    for name in sampling.filter_order.split(", "):
        if name == "top-k" and 0 < (k := sampling.top_k) < len(possible):
            ordered = np.partition(possible, -k)
            last, certain = ordered[-k], max(certain, ordered[:-k].max() + tie_margin)  # above the best one left out
        elif name == "top-p" and sampling.top_p < 1.0:
            ordered = np.sort(possible)[::-1]
            weights = np.exp(ordered - ordered[0], dtype=np.float64)
            sums, sure = weights.cumsum(), weights[ordered > certain].sum()
            within = int(np.count_nonzero(sums <= (sampling.top_p - tie_margin) * sure))
            beyond = int(np.count_nonzero(sums <= (sampling.top_p + tie_margin) * sums[-1]))
            last = ordered[min(beyond, len(ordered) - 1)]
            if within + 1 < len(ordered) or not sure:
                certain = max(certain, ordered[min(within + 1, len(ordered) - 1)] + tie_margin)
        else:
            continue
        possible = possible[possible >= last - tie_margin]
    return float(possible.min()), float(certain)


def shape_distribution(logits: Floats, sampling: Sampling) -> Probabilities:
    """Distributions of guided logits, both `[..., vocab_size]`; the plain softmax when greedy."""
    return softmax(shape_logits(logits, sampling))


def draw(distribution: Probabilities, rng: np.random.Generator) -> int:
    """One code from a distribution `[vocab_size]`, never one of probability 0; uses one number of the stream."""
    ends = distribution.cumsum()
    code = int(ends.searchsorted(rng.random() * ends[-1], "right"))
    return code if code < len(ends) else int(np.flatnonzero(distribution)[-1])  # rounding at the very end
