"""Layers that are computed at export, into a table of the bundle, with the same bits on every processor.

Products and sums of float64 are used where they are exact, in any order, and otherwise one at a time.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_BITS = 20  # of a part: the sum of 8,192 products of two parts is an integer below 2**53, as in float64
_TERMS = [(-0.5) ** n / (math.factorial(n) * (2 * n + 1) * math.sqrt(2 * math.pi)) for n in range(80)]
_LIMIT = 6.0  # beyond it GELU is its argument or 0, up to the rounding of float32


class Parts(NamedTuple):
    """A matrix `[rows, columns]` as `(high + low / 2**20) * scale`: two of integers, and powers of two `[rows, 1]`."""

    high: Array
    low: Array
    scale: Array


def split(matrix: NDArray[Any]) -> Parts:
    """Split a matrix `[rows, columns]`, of at most 8,192 columns. A value changes by `2**-40` of its row's largest."""
    values = matrix.astype(np.float64)
    exponents = np.frexp(np.abs(values).max(1, keepdims=True))[1]
    scale = np.ldexp(1.0, exponents - _BITS)
    values /= scale
    high = np.rint(values)
    return Parts(high, np.rint((values - high) * 2**_BITS), scale)


def linear(inputs: NDArray[Any], weight: Parts, bias: NDArray[Any]) -> Array:
    """Compute a linear layer. inputs: `[rows, columns]`; weight: of `[outputs, columns]`; bias: `[outputs]`."""
    own = split(inputs)
    small = own.high @ weight.low.T + own.low @ weight.high.T
    outputs: Array = (own.high @ weight.high.T + small / 2**_BITS) * own.scale * weight.scale.T + bias
    return outputs


def gelu(values: Array) -> Array:
    """Compute GELU by the series of the normal distribution's integral: libraries' functions differ in last bits."""
    clipped = values.clip(-_LIMIT, _LIMIT)
    squares = clipped * clipped
    series = np.zeros_like(values)
    for term in reversed(_TERMS):
        series *= squares
        series += term
    outputs: Array = values * (0.5 + clipped * series).clip(0, 1)
    return outputs
