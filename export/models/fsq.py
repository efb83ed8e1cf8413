"""Finite scalar quantisation: a code is a number whose digits are the entries of its vector, without a codebook.

Digit i of a code has `fsq_levels[i]` values, and the first digit is the least significant. Digit d of n values stands
for (d - n // 2) / (n // 2). To quantise an encoder's output, `tanh` squeezes each number into the range of its digit,
and the result is rounded, half to even.
"""

from __future__ import annotations

from math import atanh, prod

import torch
from torch import Tensor

_RANGE_FACTOR = 1.001  # makes the range of tanh wider than the lowest to the highest level, so that both can be reached


def decode_fsq_codes(codes: Tensor, fsq_levels: tuple[int, ...]) -> Tensor:
    """Return the vectors `[images, width, ...]` of `codes`, int64 `[images, ...]`."""
    digits = (
        torch.div(codes, prod(fsq_levels[:i]), rounding_mode="trunc") % n - n // 2 for i, n in enumerate(fsq_levels)
    )
    return torch.stack([digit.float() / (n // 2) for digit, n in zip(digits, fsq_levels, strict=True)], 1)


def quantize_fsq_latents(latents: Tensor, fsq_levels: tuple[int, ...]) -> Tensor:
    """Return the codes, int64 `[images, cells]`, of an encoder's `latents [images, width, rows, columns]`."""
    digits = []
    for i, (level, column) in enumerate(zip(fsq_levels, latents.flatten(2).unbind(1), strict=True)):
        half = (level - 1) * _RANGE_FACTOR / 2
        offset = 0.0 if level % 2 else 0.5
        steps = torch.round(torch.tanh(column + atanh(offset / half)) * half - offset)
        digits.append((steps.long() + level // 2) * prod(fsq_levels[:i]))
    return torch.stack(digits).sum(0)
