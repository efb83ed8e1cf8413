"""Frechet distances between sets of feature vectors, and bootstrap intervals of the metrics of methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Gaussian = tuple[Floats, Floats]  # Mean [width] and covariance root [rows, width].
Statistic = Callable[[Ints], Sequence[float] | Floats]  # Maps prompt indices to one number per method.
MethodEstimates = list[dict[str, Any]]  # One estimate per method.

CONFIDENCE = 0.95
RESAMPLES = 1000


def fit_gaussian(features: Floats) -> Gaussian:
    """Fit a Gaussian to feature vectors `[n, width]`, n >= 2.

    Returns the mean `[width]`, and a matrix X `[min(n, width), width]` whose X' X is the covariance.
    """
    centred = (features - features.mean(0)) / np.sqrt(len(features) - 1)
    root = np.linalg.qr(centred, mode="r") if len(centred) > centred.shape[1] else centred
    return features.mean(0), np.asarray(root)


def compute_frechet_distance(first: Gaussian, second: Gaussian) -> float:
    """Return the squared Frechet distance between two Gaussians, as in FID (Heusel et al. 2017).

    For means m and covariances S, the squared distance is |m1 - m2|^2 + tr S1 + tr S2 - 2 tr (S1 S2)^1/2. A Gaussian
    has its covariance in the form S = X' X, as `fit_gaussian` returns it. The last trace is then the sum of the
    singular values of X1 X2'. So no matrix square root is needed, and S may be singular.
    """
    mean, root = first
    other_mean, other_root = second
    shift = mean - other_mean
    overlap = np.linalg.svd(root @ other_root.T, compute_uv=False).sum()
    spread = np.square(root).sum() + np.square(other_root).sum()
    return max(0.0, float(shift @ shift + spread - 2 * overlap))


def estimate_interval(
    statistic: Statistic, num_prompts: int, num_resamples: int = RESAMPLES, correct_bias: bool = False
) -> MethodEstimates:
    """Estimate a metric of every method, `ar` first, with 95 % bootstrap intervals over two or more prompts.

    All methods use the same resampled prompts, so their differences are paired. With `correct_bias`, the resampled
    values are shifted so that their mean is the estimate, and clipped at 0: repeated images in a resample increase
    Frechet distances. An estimate has a `value` and bounds `low` and `high`, also of `difference_to_ar`.
    """
    values = np.array(statistic(np.arange(num_prompts)), np.float64)  # [methods]
    resampled = np.random.default_rng(0).integers(0, num_prompts, (num_resamples, num_prompts))
    resampled_values = np.array([statistic(sample) for sample in resampled], np.float64).T  # [methods, resamples]
    if correct_bias:
        resampled_values += (values - resampled_values.mean(1))[:, None]
    figures = _compute_intervals(values, np.maximum(resampled_values, 0) if correct_bias else resampled_values)
    differences = _compute_intervals(values - values[0], resampled_values - resampled_values[0])
    return [{**figure, "difference_to_ar": entry} for figure, entry in zip(figures, differences, strict=True)]


def _compute_intervals(values: Floats, resampled_values: Floats) -> list[dict[str, Any]]:
    tail = (1 - CONFIDENCE) / 2
    rows = np.stack([values, *np.quantile(resampled_values, [tail, 1 - tail], axis=1)], 1)
    return [dict(zip(("value", "low", "high"), row, strict=True)) for row in rows.tolist()]


def estimate_mean(values: Sequence[Sequence[float] | Floats], num_seeds: int) -> MethodEstimates:
    """Estimate the mean of `values [methods, prompts x num_seeds]` for every method."""
    table = np.array(values, np.float64).reshape(len(values), -1, num_seeds).mean(2)  # [methods, prompts]
    return estimate_interval(lambda sample: table[:, sample].mean(1), table.shape[1])
