"""Figures that compare two sets of feature vectors, and bootstrap intervals. Needs SciPy (extra `eval`).

torchmetrics is not used: it would be the only part of evaluating that needs PyTorch, its Frechet distance takes 200 to
400 times as long, which a bootstrap repeats a thousand times, and of fewer images than features it loses eight digits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Statistic = Callable[[Ints], Sequence[float] | Floats]  # indices of prompts -> a figure of every method
Figure = list[dict[str, Any]]  # one of every method, as `estimate` gives it

NEAREST = 3  # of precision and recall, as published
KERNEL_SCALE = 1000  # of kernel distances, as published for CMMD
CONFIDENCE = 0.95
RESAMPLES = 1000


# ---------------------------------------------------------------- sets of features


def distances(own: Floats, other: Floats, metric: str = "euclidean") -> Floats:
    """Distances `[n, m]` of the rows of `own [n, width]` and `other [m, width]`."""
    from scipy.spatial.distance import cdist  # type: ignore[import-untyped]

    return np.asarray(cdist(own, other, metric))


def frechet_distance(own: Floats, other: Floats) -> float:
    """Squared Frechet distance of the Gaussians fitted to `own [n, width]` and `other [m, width]` (n, m >= 2).

    |m1 - m2|^2 + tr S1 + tr S2 - 2 tr (S1 S2)^1/2, as in FID (Heusel et al. 2017). With S = X' X, the last trace is the
    sum of the singular values of X1 X2', so no matrix square root is needed and S may be singular.
    """
    roots = [_covariance_root(features) for features in (own, other)]
    shift = own.mean(0) - other.mean(0)
    overlap = np.linalg.svd(roots[0] @ roots[1].T, compute_uv=False).sum()
    spread = sum(float(np.square(root).sum()) for root in roots)
    return max(0.0, float(shift @ shift + spread - 2 * overlap))


def _covariance_root(features: Floats) -> Floats:
    """X with X' X the covariance of `features [n, width]`, in as few rows as needed."""
    centred = (features - features.mean(0)) / np.sqrt(len(features) - 1)
    return np.asarray(np.linalg.qr(centred, mode="r")) if len(centred) > centred.shape[1] else centred


def precision_recall(own: Floats, reference: Floats) -> tuple[Bools, Bools]:
    """Which of `own [n, width]` lie on the manifold of `reference [m, width]`, and which of those on that of `own`.

    That is: no farther from one of its points than that point's third neighbour. The shares of both are precision and
    recall (Kynkaanniemi et al. 2019).
    """
    between = distances(own, reference)
    own_radii, reference_radii = (  # column 0 is the point itself
        np.sort(distances(each, each), 1)[:, min(NEAREST, len(each) - 1)] for each in (own, reference)
    )
    near, near_own = between <= reference_radii, between <= own_radii[:, None]
    return np.asarray(near.any(axis=1)), np.asarray(near_own.any(axis=0))


def median_distance(features: Floats) -> float:
    """Median Euclidean distance of two rows of `features [n, width]` (n >= 2); 1 where most are the same."""
    return float(np.median(distances(features, features)[np.triu_indices(len(features), 1)])) or 1.0


def kernel_terms(own: Floats, reference: Floats, seeds: int, bandwidth: float) -> Floats:
    """Terms `[prompts, prompts]` of the kernel distance of `own` and `reference`, `[prompts x seeds, width]` each.

    Their mean over pairs of different prompts (`mean_over_pairs`) is an unbiased estimate of the squared maximum mean
    discrepancy with a Gaussian kernel, times 1000 (CMMD, Jayasumana et al. 2024): the one-sample U-statistic of Gretton
    et al. 2012. As no prompt is paired with itself, neither counting an image twice nor that both sets show the same
    prompts moves it; it may fall below 0.
    """
    prompts = len(own) // seeds

    def kernel(first: Floats, second: Floats) -> Floats:
        values = np.exp(distances(first, second, "sqeuclidean") / (-2 * bandwidth**2))
        return np.asarray(values.reshape(prompts, seeds, prompts, seeds).mean((1, 3)))

    between = kernel(own, reference)
    terms = kernel(own, own) + kernel(reference, reference) - between - between.T
    np.fill_diagonal(terms, 0)
    return KERNEL_SCALE * terms


def mean_over_pairs(values: Floats, chosen: Ints) -> float:
    """Mean of `values [n, n]`, with 0 on the diagonal, over pairs of `chosen`, which may name a row twice; a row is no
    pair with itself."""
    counts = np.bincount(chosen, minlength=len(values)).astype(np.float64)
    pairs = counts.sum() ** 2 - counts @ counts
    return float(counts @ values @ counts / pairs) if pairs else 0.0


# ---------------------------------------------------------------- intervals


def estimate(statistic: Statistic, prompts: int, resamples: int = RESAMPLES, moved: bool = False) -> Figure:
    """A figure of every method, the first being ar, with 95 % intervals by resampling `prompts` (>= 2) of them.

    `statistic` takes indices of prompts and gives the figure of every method on those, so all methods see the same
    resamples and differences are paired. moved: for Frechet distances, which a resample makes larger as it repeats
    images; the draws are moved back so that their mean is the estimate, and end at 0.
    Each has `value`, `low` and `high`, `difference_to_ar` with the same, and `above_ar_interval` of its value.
    """
    found = np.array(statistic(np.arange(prompts)), np.float64)  # [methods]
    resampled = np.random.default_rng(0).integers(0, prompts, (resamples, prompts))
    draws = np.array([statistic(chosen) for chosen in resampled], np.float64).T  # [methods, resamples]
    if moved:
        draws += (found - draws.mean(1))[:, None]
    values = _intervals(found, np.maximum(draws, 0) if moved else draws)
    differences = _intervals(found - found[0], draws - draws[0])
    return [
        {**value, "difference_to_ar": difference, "above_ar_interval": value["value"] > values[0]["high"]}
        for value, difference in zip(values, differences, strict=True)
    ]


def _intervals(found: Floats, draws: Floats) -> list[dict[str, float]]:
    tail = (1 - CONFIDENCE) / 2
    rows = np.stack([found, *np.quantile(draws, [tail, 1 - tail], axis=1)], 1)
    return [dict(zip(("value", "low", "high"), row, strict=True)) for row in rows.tolist()]


def by_prompt(values: Sequence[Sequence[float] | Bools | Floats], seeds: int) -> Floats:
    """Means `[methods, prompts]` over a prompt's images, of `values [methods, prompts x seeds]`."""
    return np.asarray(np.array(values, np.float64).reshape(len(values), -1, seeds).mean(2))


def estimate_mean(values: Sequence[Sequence[float] | Bools | Floats], seeds: int) -> Figure:
    """The mean of `values [methods, prompts x seeds]`, estimated."""
    table = by_prompt(values, seeds)
    return estimate(lambda chosen: table[:, chosen].mean(1), table.shape[1])
