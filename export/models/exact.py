"""Layers that are computed at export, into a table of the bundle, with the same bits on every processor.

Matrix products add integers, which is exact in any order; all other operations of float64 run one after another.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_BITS = 20  # Size of a part: the sum of 8,192 products of two parts is an integer below 2**53, as in float64
_TERMS = [(-0.5) ** n / (math.factorial(n) * (2 * n + 1) * math.sqrt(2 * math.pi)) for n in range(80)]
_LIMIT = 6.0  # beyond it GELU is its argument or 0, up to the rounding of float32


class SplitMatrix(NamedTuple):
    """A matrix `[rows, columns]` as `(high + low / 2**20) * scale`: two of integers, and powers of two `[rows, 1]`."""

    high: Array
    low: Array
    scale: Array


def split_matrix(matrix: NDArray[Any]) -> SplitMatrix:
    """Split a matrix into two matrices of integers, so that products of these parts are exact in float64.

    The matrix `[rows, columns]` has at most 8,192 columns. A value changes by `2**-40` of its row's largest value.
    """
    values = matrix.astype(np.float64)
    exponents = np.frexp(np.abs(values).max(1, keepdims=True))[1]
    scale = np.ldexp(1.0, exponents - _BITS)
    values /= scale
    high = np.rint(values)
    return SplitMatrix(high, np.rint((values - high) * 2**_BITS), scale)


def apply_exact_linear(inputs: NDArray[Any], weight: SplitMatrix, bias: NDArray[Any]) -> Array:
    """Compute a linear layer.

    Args:
        inputs: matrix `[rows, columns]`.
        weight: parts of the matrix `[outputs, columns]`.
        bias: vector `[outputs]`.
    """
    parts = split_matrix(inputs)
    small = parts.high @ weight.low.T + parts.low @ weight.high.T
    outputs: Array = (parts.high @ weight.high.T + small / 2**_BITS) * parts.scale * weight.scale.T + bias
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
