"""Frechet distances of sets of feature vectors, and bootstrap intervals of the figures of methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Gaussian = tuple[Floats, Floats]  # as `fit_gaussian` gives it
Statistic = Callable[[Ints], Sequence[float] | Floats]  # indices of prompts -> a figure of every method
Figure = list[dict[str, Any]]  # one of every method, as `estimate` gives it

CONFIDENCE = 0.95
RESAMPLES = 1000


def fit_gaussian(features: Floats) -> Gaussian:
    """The mean of `features [n, width]` (n >= 2), and X with X' X their covariance, in as few rows as needed."""
    centred = (features - features.mean(0)) / np.sqrt(len(features) - 1)
    root = np.linalg.qr(centred, mode="r") if len(centred) > centred.shape[1] else centred
    return features.mean(0), np.asarray(root)


def frechet_distance(own: Gaussian, other: Gaussian) -> float:
    """Squared Frechet distance of two Gaussians.

    |m1 - m2|^2 + tr S1 + tr S2 - 2 tr (S1 S2)^1/2, as in FID (Heusel et al. 2017). With S = X' X, the last trace is the
    sum of the singular values of X1 X2', so no matrix square root is needed and S may be singular.
    """
    (mean, root), (other_mean, other_root) = own, other
    shift = mean - other_mean
    overlap = np.linalg.svd(root @ other_root.T, compute_uv=False).sum()
    spread = np.square(root).sum() + np.square(other_root).sum()
    return max(0.0, float(shift @ shift + spread - 2 * overlap))


def estimate(statistic: Statistic, prompts: int, resamples: int = RESAMPLES, moved: bool = False) -> Figure:
    """A figure of every method, the first being ar, with 95 % intervals by resampling `prompts` (>= 2) of them.

    `statistic` takes indices of prompts and gives the figure of every method on those, so all methods see the same
    resamples and differences are paired. moved: for Frechet distances, which a resample makes larger as it repeats
    images; the draws are moved back so that their mean is the estimate, and end at 0.
    Each has `value`, `low` and `high`, and `difference_to_ar` with the same.
    """
    values = np.array(statistic(np.arange(prompts)), np.float64)  # [methods]
    resampled = np.random.default_rng(0).integers(0, prompts, (resamples, prompts))
    draws = np.array([statistic(chosen) for chosen in resampled], np.float64).T  # [methods, resamples]
    if moved:
        draws += (values - draws.mean(1))[:, None]
    figures = _intervals(values, np.maximum(draws, 0) if moved else draws)
    differences = _intervals(values - values[0], draws - draws[0])
    return [{**own, "difference_to_ar": other} for own, other in zip(figures, differences, strict=True)]


def _intervals(values: Floats, draws: Floats) -> list[dict[str, Any]]:
    tail = (1 - CONFIDENCE) / 2
    rows = np.stack([values, *np.quantile(draws, [tail, 1 - tail], axis=1)], 1)
    return [dict(zip(("value", "low", "high"), row, strict=True)) for row in rows.tolist()]


def estimate_mean(values: Sequence[Sequence[float] | Floats], seeds: int) -> Figure:
    """The mean of `values [methods, prompts x seeds]`, estimated."""
    table = np.array(values, np.float64).reshape(len(values), -1, seeds).mean(2)  # [methods, prompts]
    return estimate(lambda chosen: table[:, chosen].mean(1), table.shape[1])
