"""Sampling of codes from logits: guidance, temperature, top-k, top-p.

A draft that is rejected may have logits of NaN or infinity, from which `NO_CODE` is sampled. An accepted `NO_CODE`
raises EngineError, because a model with damaged weights must not generate an image.
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
NO_CODE = -1  # sampled from NaN or infinite logits
BLOCK_SIZE = 64  # number of values in a block; the search for the largest values compares block maxima first


def apply_temperature(logits: Floats, sampling: Sampling) -> Floats:
    """Divide logits by the temperature; return the logits unchanged for greedy decoding (temperature 0)."""
    return logits if sampling.temperature in (0.0, 1.0) else logits / np.float32(sampling.temperature)


def apply_guidance(logits: Floats, scales: Floats) -> Floats:
    """Mix conditional and unconditional logits: uncond + scale * (cond - uncond), float32 `[..., vocab_size]`.

    NaN and infinity are not checked here, because sampling from the mixed logits checks for them.

    Args:
        logits: float32 `[2, ..., vocab_size]`, the conditional logits first.
        scales: guidance scales, float32 `[...]`.
    """
    # in-place operations, as these arrays are large
    mixed: Floats = logits[0] - logits[1]
    mixed *= scales[..., None]
    mixed += logits[1]
    return mixed


def apply_repetition_penalty(logits: Floats, preceding_codes: Sequence[Ints], sampling: Sampling) -> Floats:
    """Apply the repetition penalty to the conditional logits.

    Args:
        logits: float32 `[1 or 2, nodes, vocab_size]`, the conditional logits first; this array is not changed.
        preceding_codes: for each node, the codes of the image that precede the code sampled after the node.
        sampling: sampling settings with the penalty.
    """
    if not sampling.has_repetition_penalty:
        return logits
    penalised = logits.copy()
    penalty = np.float32(sampling.repetition_penalty)
    for row, codes in zip(penalised[0], preceding_codes, strict=True):
        known = codes[codes < len(row)]  # end-of-row tokens are not sampled
        # Either operation lowers the logit: a division would raise a negative logit.
        row[known] = np.where(row[known] < 0, row[known] * penalty, row[known] / penalty)
    return penalised


def softmax(logits: Floats) -> Probabilities:
    """Compute the softmax of float32 logits along the last axis, as float64 probabilities that sum to 1 in float64."""
    # The exponential of float32 is faster. Only the normalisation needs float64.
    top = logits.max(-1, keepdims=True)
    if not np.isfinite(top).all():  # NaN counts as the largest
        raise make_invalid_logits_error()
    weights = logits - top
    probabilities: Probabilities = np.exp(weights, out=weights).astype(np.float64)
    probabilities *= 1 / probabilities.sum(-1, keepdims=True)
    return probabilities


def choose_codes(logits: Floats, noise: Floats | None, sampling: Sampling) -> Ints:
    """Sample codes `[...]` as the arg-max of logits plus Gumbel noise; `NO_CODE` from NaN or infinite logits.

    The sums of logits and noise are float32. Rounding of a sum decides between two codes about once in a million
    samples. This changes a distribution less than the rounding of logits does.

    Args:
        logits: guided logits, float32 `[..., vocab_size]`.
        noise: Gumbel noise, float32, same shape as `logits`; None: the most probable codes are chosen.
        sampling: sampling settings with the temperature and the filters.
    """
    values = process_logits(logits, sampling)
    if noise is not None:
        values = values + noise
    codes: Ints = np.where(np.isfinite(values.max(-1)), values.argmax(-1), NO_CODE)  # NaN counts as the largest
    return codes


def choose_codes_with_margins(
    logits: Floats, noise: Floats | None, sampling: Sampling
) -> tuple[list[int], list[float]]:
    """Sample codes as `choose_codes` does from logits `[n, vocab_size]`, and return also their margins.

    A margin is the difference between the largest and the second largest sum of logit and noise. There are no margins
    with top-k or top-p, because rounding may then change a code whatever the difference is.
    """
    if sampling.filters_tokens:
        return choose_codes(logits, noise, sampling).tolist(), []
    # The loop over rows calls fewer different NumPy functions than an operation on all rows. This is faster after a
    # pass, when the processor's caches are cold: 20 us instead of 49 us for one row (measured here).
    values = apply_temperature(logits, sampling)
    codes: list[int] = []
    margins: list[float] = []
    for row in values.copy() if noise is None else values + noise:
        code = int(row.argmax())
        best = row.item(code)
        row[code] = -np.inf
        codes.append(code if isfinite(best) else NO_CODE)  # NaN counts as the largest
        margins.append(best - row.item(row.argmax()))
    return codes, margins


def stays_best_under_rounding(
    logits: Floats, noise: Floats | None, code: int, sampling: Sampling, rounding_margin: float
) -> bool:
    """Return whether `code` would be sampled under every rounding error up to `rounding_margin`.

    Args:
        logits: guided logits, `[vocab_size]`.
        noise: Gumbel noise `[vocab_size]`, None for greedy decoding.
        code: code that was sampled from `logits`.
        sampling: sampling settings.
        rounding_margin: maximum rounding error in the difference of two logits, after division by the temperature.
    """
    values = scaled = apply_temperature(logits, sampling)
    if sampling.filters_tokens:
        lowest, certain = _compute_filter_bounds(scaled, sampling, rounding_margin)
        if not scaled[code] > certain:
            return False
        values = np.where(scaled >= lowest, scaled, np.float32(-np.inf))
    values = values.copy() if noise is None else values + noise
    best = values[code]
    values[code] = -np.inf
    return bool(best - values.max() > rounding_margin)


def find_top_codes(log_weights: Floats, count: int) -> tuple[Ints, Floats]:
    """Return the `count` most probable codes of each row of log-weights `[rows, vocab_size]`, best first.

    Returns:
        The codes and their log-probabilities, both `[rows, min(count, vocab_size)]`. A code with log-weight -inf has
        log-probability -inf, as have all codes of a row with NaN or infinity.
    """
    top = log_weights.max(-1, keepdims=True)
    valid = np.isfinite(top)
    if not valid.all():
        log_weights = np.where(valid, log_weights, np.float32(0))
        top = np.where(valid, top, np.float32(0))
    weights = log_weights - top
    codes = _find_largest_indices(log_weights, min(count, log_weights.shape[-1]))
    chosen = weights[np.arange(len(weights))[:, None], codes]
    scores: Floats = chosen - np.log(np.exp(weights, out=weights).sum(-1, keepdims=True))
    scores[~valid[:, 0]] = -np.inf
    return codes, scores


def _find_largest_indices(values: Floats, count: int) -> Ints:
    """Return the indices of the `count` largest values of each row `[rows, n]`, largest first.

    The largest values are in the `count` blocks with the largest maxima. So only these blocks are searched, not all n.
    """
    rows, length = values.shape
    row = np.arange(rows)[:, None]
    blocks = length // BLOCK_SIZE
    if blocks * BLOCK_SIZE == length and blocks >= 4 * count:
        # Block b has the indices b, b + blocks, b + 2 blocks, ...: maxima over axis 1 are computed without strides.
        highest = values.reshape(rows, BLOCK_SIZE, blocks).max(1)  # [rows, blocks]
        best = np.argpartition(highest, blocks - count, axis=-1)[:, blocks - count :]  # [rows, count]
        where = (best[:, None] + blocks * np.arange(BLOCK_SIZE)[:, None]).reshape(rows, count * BLOCK_SIZE)
    else:
        where = np.broadcast_to(np.arange(length), (rows, length))
    candidates = values[row, where]
    first = np.argpartition(candidates, candidates.shape[-1] - count, axis=-1)[:, -count:]  # [rows, count], unordered
    order = np.argsort(-candidates[row, first], axis=-1, kind="stable")
    codes: Ints = where[row, first[row, order]]
    return codes


def make_invalid_logits_error() -> EngineError:
    return EngineError("a graph gave NaN or infinite logits", remedy="its weights are damaged, export the bundle again")


def process_logits(logits: Floats, sampling: Sampling) -> Floats:
    """Divide guided logits `[..., vocab_size]` by the temperature, and set logits that a filter excludes to -inf.

    Greedy decoding leaves the logits unchanged. Top-k includes the k largest logits. Top-p includes the largest logits,
    one after another, until their cumulative probability exceeds p. Both filters also include every logit that equals
    the smallest included logit. Filters set all logits of a vector with NaN or infinity to -inf.
    """
    scaled = apply_temperature(logits, sampling)
    if not sampling.filters_tokens:
        return scaled
    threshold = np.apply_along_axis(_compute_filter_threshold, -1, scaled, sampling)[..., None]
    return np.where(scaled >= threshold, scaled, np.float32(-np.inf))


def _compute_filter_threshold(scaled_logits: Floats, sampling: Sampling) -> np.float32:
    """Return the smallest of `scaled_logits [vocab_size]` that the top-k and top-p filters include; NaN if none is."""
    if not isfinite(scaled_logits.max()):
        return np.float32(np.nan)
    included = scaled_logits
    for name in sampling.filter_order.split(", "):
        if name == "top-k" and 0 < sampling.top_k < len(included):
            included = included[included >= np.partition(included, -sampling.top_k)[-sampling.top_k]]
        elif name == "top-p" and sampling.top_p < 1.0:
            included = np.sort(included)[::-1]
            included = included[: 1 + int(np.count_nonzero(np.cumsum(softmax(included)) <= sampling.top_p))]
    lowest: np.float32 = included.min()
    return lowest


def _compute_filter_bounds(scaled_logits: Floats, sampling: Sampling, rounding_margin: float) -> tuple[float, float]:
    """Return two thresholds of the top-k and top-p filters that allow for rounding.

    Rounding may move the difference of two of `scaled_logits [vocab_size]` by up to `rounding_margin`. Whatever the
    rounding, the filters exclude every logit below the first threshold and include every logit above the second.
    """
    # The second filter reads all logits that the first filter may include. It compares their sums with the sum of the
    # logits that the first filter certainly includes.
    possible = scaled_logits
    certain = -np.inf
    for name in sampling.filter_order.split(", "):
        if name == "top-k" and 0 < (k := sampling.top_k) < len(possible):
            ordered = np.partition(possible, -k)
            last = ordered[-k]
            certain = max(certain, ordered[:-k].max() + rounding_margin)  # above the largest excluded logit
        elif name == "top-p" and sampling.top_p < 1.0:
            ordered = np.sort(possible)[::-1]
            weights = np.exp(ordered - ordered[0], dtype=np.float64)
            sums = weights.cumsum()
            # With rounding, the sum that the first filter includes lies between `sure` and `sums[-1]`.
            sure = weights[ordered > certain].sum()
            within = int(np.count_nonzero(sums <= (sampling.top_p - rounding_margin) * sure))
            beyond = int(np.count_nonzero(sums <= (sampling.top_p + rounding_margin) * sums[-1]))
            last = ordered[min(beyond, len(ordered) - 1)]
            if within + 1 < len(ordered) or not sure:
                certain = max(certain, ordered[min(within + 1, len(ordered) - 1)] + rounding_margin)
        else:
            continue
        possible = possible[possible >= last - rounding_margin]
    return float(possible.min()), float(certain)


def compute_distribution(logits: Floats, sampling: Sampling) -> Probabilities:
    """Compute distributions `[..., vocab_size]` from guided logits; greedy decoding applies only the softmax."""
    return softmax(process_logits(logits, sampling))


def sample_code(distribution: Probabilities, rng: np.random.Generator) -> int:
    """Sample a code of positive probability from a distribution `[vocab_size]`, with one random number."""
    ends = distribution.cumsum()
    code = int(ends.searchsorted(rng.random() * ends[-1], "right"))
    return code if code < len(ends) else int(np.flatnonzero(distribution)[-1])  # past the end by rounding
