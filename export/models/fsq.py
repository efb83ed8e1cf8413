"""Finite scalar quantisation: a code is the digits of its numbers, so pictures need no codebook.

Digit i of a code has `levels[i]` values, the first one counts the least. Digit d stands for (d - level // 2) /
(level // 2). What an encoder gives goes through tanh to just within the levels, and is rounded, half to even.
"""

from __future__ import annotations

from math import atanh, prod

import torch
from torch import Tensor

_WIDER = 1.001  # of the span that tanh gives than from the lowest level to the highest: they can be reached


def code_vectors(codes: Tensor, levels: tuple[int, ...]) -> Tensor:
    """The numbers `[images, width, ...]` of codes, int64 `[images, ...]`."""
    digits = (torch.div(codes, prod(levels[:i]), rounding_mode="trunc") % n - n // 2 for i, n in enumerate(levels))
    return torch.stack([digit.float() / (n // 2) for digit, n in zip(digits, levels, strict=True)], 1)


def nearest_codes(latents: Tensor, levels: tuple[int, ...]) -> Tensor:
    """The codes, int64 `[images, cells]`, of an encoder's `latents [images, width, rows, columns]`."""
    digits = []
    for i, (level, column) in enumerate(zip(levels, latents.flatten(2).unbind(1), strict=True)):
        half, offset = (level - 1) * _WIDER / 2, 0.0 if level % 2 else 0.5
        steps = torch.round(torch.tanh(column + atanh(offset / half)) * half - offset)
        digits.append((steps.long() + level // 2) * prod(levels[:i]))
    return torch.stack(digits).sum(0)
