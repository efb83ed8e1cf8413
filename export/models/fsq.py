"""Finite scalar quantisation (FSQ), which needs no codebook: the digits of a code give the entries of its vector.

Digit i of a code has `fsq_levels[i]` values; the first digit is the least significant. Digit d of n values means the
entry (d - n // 2) / (n // 2). To quantise the output of an encoder, `tanh` maps each number to the range of its digit,
and the result is rounded (half to even).
"""

from __future__ import annotations

from math import atanh, prod

import torch
from torch import Tensor

_RANGE_FACTOR = 1.001  # widens the range of tanh, so that rounding can reach the lowest and the highest level


def decode_fsq_codes(codes: Tensor, fsq_levels: tuple[int, ...]) -> Tensor:
    """Return the vectors, float32 `[images, width, ...]`, of codes `[images, ...]`; width is the number of digits."""
    digits = (
        torch.div(codes, prod(fsq_levels[:i]), rounding_mode="trunc") % n - n // 2 for i, n in enumerate(fsq_levels)
    )
    return torch.stack([digit.float() / (n // 2) for digit, n in zip(digits, fsq_levels, strict=True)], 1)


def quantize_fsq_latents(latents: Tensor, fsq_levels: tuple[int, ...]) -> Tensor:
    """Convert the output of an encoder, `[images, width, rows, columns]`, to codes, int64 `[images, cells]`."""
    digits = []
    for i, (level, column) in enumerate(zip(fsq_levels, latents.flatten(2).unbind(1), strict=True)):
        half = (level - 1) * _RANGE_FACTOR / 2
        offset = 0.0 if level % 2 else 0.5  # an even number of levels has no level in the middle of the range
        steps = torch.round(torch.tanh(column + atanh(offset / half)) * half - offset)
        digits.append((steps.long() + level // 2) * prod(fsq_levels[:i]))
    return torch.stack(digits).sum(0)
