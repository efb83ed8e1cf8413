"""Finite scalar quantisation: a code is the digits of its numbers, so pictures need no codebook.

Digit i of a code has `levels[i]` values, the first one counts the least. Digit d stands for (d - level // 2) /
(level // 2). What an encoder gives goes through tanh to just within the levels, and is rounded, half to even.
"""

from __future__ import annotations

import math
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

_WIDER = 1.001  # of the span that tanh gives than from the lowest level to the highest: they can be reached

Levels = tuple[int, ...]


def code_vectors(codes: Tensor, levels: Levels) -> Tensor:
    """The numbers of codes, int64 `[images, cells]` or `[images, rows, columns]`: `[images, width, ...]`."""
    digits = [torch.div(codes, base, rounding_mode="trunc") % level for base, level in _digits(levels)]
    return torch.stack([(d - n // 2).float() / (n // 2) for d, n in zip(digits, levels, strict=True)], 1)


def nearest_codes(latents: Tensor, levels: Levels) -> Tensor:
    """The codes, int64 `[images, cells]`, of an encoder's `latents [images, width, rows, columns]`."""
    codes = torch.zeros(())
    for (base, level), column in zip(_digits(levels), latents.flatten(2).unbind(1), strict=True):
        half, offset = (level - 1) * _WIDER / 2, 0.0 if level % 2 else 0.5
        steps = torch.round(torch.tanh(column + math.atanh(offset / half)) * half - offset)
        codes = codes + (steps.long() + level // 2) * base
    return codes.long()


def code_table(levels: Levels) -> Tensor:
    """The numbers of all codes, float32 `[codes, width]`: what distances between codes are measured in."""
    return code_vectors(torch.arange(math.prod(levels))[None], levels)[0].T.contiguous()


def _digits(levels: Levels) -> list[tuple[int, int]]:
    """What each digit counts, and its levels."""
    return [*zip(accumulate((1, *levels), mul), levels, strict=False)]
