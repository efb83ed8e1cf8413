"""Measures of the difference between two arrays, images or token distributions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..output.images import convert_pixels_to_image
from .compare import CaseResult
from .models.decoder import EXCLUDED

TIE = 0.8  # minimum probability, relative to the most probable token, of a token that also counts as most probable


def measure_max_difference(actual: NDArray[Any], expected: NDArray[Any]) -> float:
    """Return the largest difference of two arrays, relative to the largest value of `expected` if that is above 1.

    The largest value does not count `EXCLUDED`. The difference of integers is absolute. The result is infinite if
    shapes, dtypes or infinite values differ, or if a value is NaN.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return np.inf
    if not expected.size:
        return 0.0
    wide = expected.astype(np.float64)
    with np.errstate(all="ignore"):
        differences = np.where(actual == expected, 0, np.abs(actual.astype(np.float64) - wide))
    largest = float(np.nan_to_num(differences, nan=np.inf, posinf=np.inf).max())
    sizes = np.abs(wide[wide != EXCLUDED])
    scale = 1.0 if np.issubdtype(expected.dtype, np.integer) else max(1.0, float(sizes.max(initial=0)))
    return largest / scale if np.isfinite(scale) else largest


def measure_relative_error(actual: NDArray[Any], expected: NDArray[Any]) -> float:
    """Return the norm of the difference of two arrays, divided by the norm of `expected` without `EXCLUDED`.

    The result is infinite if the shapes differ or `actual` has NaN or infinite values.
    """
    if actual.shape != expected.shape or not np.isfinite(actual).all():
        return np.inf
    signal = float(np.linalg.norm(expected[expected != EXCLUDED].astype(np.float64)))
    return float(np.linalg.norm(actual.astype(np.float64) - expected)) / max(signal, 1e-30)


def measure_image_difference(case_results: Iterable[CaseResult]) -> tuple[float, float]:
    """Return the mean difference of decoded images in levels (0 .. 255), and the peak signal-to-noise ratio in dB."""
    differences = [
        np.asarray(convert_pixels_to_image(image), np.float64).ravel()
        - np.asarray(convert_pixels_to_image(reference), np.float64).ravel()
        for _, outputs, expected in case_results
        for image, reference in zip(outputs["images"], expected["images"], strict=True)
    ]
    levels = np.concatenate(differences)
    error = max(float(np.square(levels).mean()), 1e-9)
    return float(np.abs(levels).mean()), float(10 * np.log10(255**2 / error))


def compare_top_tokens(expected_logits: NDArray[Any], logits: NDArray[Any]) -> NDArray[np.bool_]:
    """Check for each distribution `[..., tokens]` whether its most probable token is, nearly, the reference's.

    In a near tie, the reference gives the most probable token of `logits` at least `TIE` times the maximum probability.
    """
    chosen = np.take_along_axis(expected_logits, logits.argmax(-1)[..., None], -1)[..., 0]
    close: NDArray[np.bool_] = chosen >= expected_logits.max(-1) + np.log(TIE)
    return close


def measure_kl_divergence(expected_logits: NDArray[Any], logits: NDArray[Any]) -> NDArray[np.float64]:
    """Return KL(softmax(expected_logits) || softmax(logits)) over the last axis, in nats, as float64."""
    logs = []
    for values in (expected_logits, logits):
        shifted = values.astype(np.float64) - values.max(-1, keepdims=True)
        logs.append(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))
    total: NDArray[np.float64] = (np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1)
    return np.maximum(total, 0)
