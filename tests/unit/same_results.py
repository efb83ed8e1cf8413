"""Comparison of results: the same tokens and pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lantern_rt import Result


def have_same_codes(first: Sequence[Any], second: Sequence[Any]) -> bool:
    return all(np.array_equal(*pair) for pair in zip(first, second, strict=True))


def are_same_results(first: Result, second: Result) -> bool:
    pixels = [[image.tobytes() for image in result.images] for result in (first, second)]
    return have_same_codes(first.codes, second.codes) and pixels[0] == pixels[1]
