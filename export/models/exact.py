"""Network layers in NumPy whose results have the same bits on every processor.

The export of Janus computes the embedding table of a bundle with these layers. Matrix products add integers, which is
exact in any sequence. All other operations in float64 compute each number separately, so the results do not depend on
the processor.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_BITS = 20  # bits of a part; a sum of 8,192 products of two parts is at most 2**53, up to which float64 is exact
_TERMS = [(-0.5) ** n / (math.factorial(n) * (2 * n + 1) * math.sqrt(2 * math.pi)) for n in range(80)]
_LIMIT = 6.0  # GELU of a larger number is the number itself, and of a number below -6 it is 0, as far as float32 shows


class SplitMatrix(NamedTuple):
    """Matrix `(high + low / 2**20) * scale`, of integers `[rows, columns]` and powers of two `[rows, 1]`."""

    high: Array
    low: Array
    scale: Array


def split_into_integer_matrices(matrix: NDArray[Any]) -> SplitMatrix:
    """Split a matrix into two matrices of integers, so that products of these parts are exact in float64.

    The matrix `[rows, columns]` must have at most 8,192 columns. A value changes by at most `2**-40` of the largest
    value in its row.
    """
    values = matrix.astype(np.float64)
    exponents = np.frexp(np.abs(values).max(1, keepdims=True))[1]
    scale = np.ldexp(1.0, exponents - _BITS)
    values /= scale
    high = np.rint(values)
    return SplitMatrix(high, np.rint((values - high) * 2**_BITS), scale)


def apply_exact_linear(inputs: NDArray[Any], weight: SplitMatrix, bias: NDArray[Any]) -> Array:
    """Compute a linear layer, with weight `[outputs, columns]`, from exact products of integers."""
    parts = split_into_integer_matrices(inputs)
    small = parts.high @ weight.low.T + parts.low @ weight.high.T  # low times low is too small to matter
    outputs: Array = (parts.high @ weight.high.T + small / 2**_BITS) * parts.scale * weight.scale.T + bias
    return outputs


def gelu(values: Array) -> Array:
    """Compute GELU with a power series, because the `erf` of different libraries differs in the last bits."""
    clipped = values.clip(-_LIMIT, _LIMIT)
    squares = clipped * clipped
    series = np.zeros_like(values)
    for term in reversed(_TERMS):
        series *= squares
        series += term
    outputs: Array = values * (0.5 + clipped * series).clip(0, 1)
    return outputs
