"""Sampling functions without settings: distributions, the most probable codes, and a sample of a distribution."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import EngineError
from .engine import Floats, Ints

Probabilities = NDArray[np.float64]
NO_CODE = -1  # sampled from NaN or infinite logits
BLOCK_SIZE = 64  # number of values in a block; the search for the largest values compares block maxima first


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


def sample_code(distribution: Probabilities, rng: np.random.Generator) -> int:
    """Sample a code of positive probability from a distribution `[vocab_size]`, with one random number."""
    ends = distribution.cumsum()
    code = int(ends.searchsorted(rng.random() * ends[-1], "right"))
    return code if code < len(ends) else int(np.flatnonzero(distribution)[-1])  # past the end by rounding
