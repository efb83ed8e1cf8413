"""Figures that compare two sets of feature vectors, and intervals by resampling prompts.

Needs SciPy (extra `eval`), imported when first used. torchmetrics is not used: it brings torch, and would be the only
part of evaluating that needs it.

Does not know pictures, models, or where features come from.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import EngineError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Statistic = Callable[[Ints], Sequence[float] | Floats]  # indices of prompts -> a figure of every way

NEAREST = 3  # of precision and recall, as published
KERNEL_SCALE = 1000  # of kernel distances, as published for CMMD
CONFIDENCE = 0.95


def require_scipy() -> None:
    """Raise EngineError where SciPy is not installed."""
    if importlib.util.find_spec("scipy") is None:
        raise EngineError("eval needs scipy, found none installed; run `pip install 'lantern-rt[eval]'`")


# ---------------------------------------------------------------- sets of features


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


def on_manifold(points: Floats, manifold: Floats, nearest: int = NEAREST) -> Bools:
    """Which of `points [n, width]` lie on the manifold that `manifold [m, width]` spans (m >= 2), bool `[n]`.

    That is: nearer to one of its points than that point's `nearest`-th neighbour. Precision is the share of drawn
    pictures on the reference's manifold, recall the share of reference pictures on theirs (Kynkaanniemi et al. 2019).
    """
    from scipy.spatial.distance import cdist  # type: ignore[import-untyped]

    among = np.sort(cdist(manifold, manifold), 1)  # column 0 is the point itself
    radii = among[:, min(nearest, len(manifold) - 1)]
    return np.asarray((cdist(points, manifold) <= radii).any(1))


def pairwise_distances(features: Floats) -> Floats:
    """Euclidean distances `[n, n]` between the rows of `features [n, width]`."""
    from scipy.spatial.distance import cdist

    return np.asarray(cdist(features, features))


def median_distance(features: Floats) -> float:
    """Median Euclidean distance of two rows of `features [n, width]` (n >= 2); 1 where most are the same."""
    from scipy.spatial.distance import pdist

    return float(np.median(pdist(features))) or 1.0


def kernel_terms(own: Floats, reference: Floats, seeds: int, bandwidth: float) -> Floats:
    """Terms `[prompts, prompts]` of the kernel distance of `own` and `reference`, `[prompts x seeds, width]` each.

    Their mean over pairs of different prompts (`mean_over_pairs`) is an unbiased estimate of the squared maximum mean
    discrepancy with a Gaussian kernel, times 1000 (CMMD, Jayasumana et al. 2024): the one-sample U-statistic of Gretton
    et al. 2012. As no prompt is paired with itself, neither counting a picture twice nor that both sets show the same
    prompts moves it; it may fall below 0.
    """
    from scipy.spatial.distance import cdist

    prompts = len(own) // seeds

    def kernel(first: Floats, second: Floats) -> Floats:
        values = np.exp(cdist(first, second, "sqeuclidean") / (-2 * bandwidth**2))
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


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Figure:
    """One figure of every way of drawing: values, and differences to the first way (its own is 0)."""

    values: list[Estimate]
    differences: list[Estimate]

    def above_first(self, way: int) -> bool:
        """Whether a way's value lies above the first way's interval."""
        return self.values[way].value > self.values[0].high


def estimate(statistic: Statistic, prompts: int, resamples: int = 1000, moved: bool = False) -> Figure:
    """Intervals of a figure by resampling `prompts` (>= 2) of them.

    `statistic` takes indices of prompts and gives the figure of every way on those, so all ways see the same
    resamples and differences are paired. moved: for Frechet distances, which a resample makes larger as it repeats
    pictures; the draws are moved back so that their mean is the estimate, and end at 0.
    """
    from scipy.stats import bootstrap  # type: ignore[import-untyped]

    found = np.array(statistic(np.arange(prompts)), np.float64)  # [ways]

    def of_resamples(indices: Ints, axis: int) -> Floats:
        return np.array([statistic(one) for one in np.atleast_2d(indices)]).T  # [ways, resamples]

    result = bootstrap(
        (np.arange(prompts),),
        of_resamples,
        n_resamples=resamples,
        batch=100,
        vectorized=True,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    draws = np.asarray(result.bootstrap_distribution, np.float64)
    if moved:
        draws += (found - draws.mean(1))[:, None]
    values = _intervals(found, np.maximum(draws, 0) if moved else draws)
    return Figure(values, _intervals(found - found[0], draws - draws[0]))


def _intervals(found: Floats, draws: Floats) -> list[Estimate]:
    tail = (1 - CONFIDENCE) / 2
    lows, highs = np.quantile(draws, [tail, 1 - tail], axis=1)
    return [Estimate(*map(float, one)) for one in zip(found, lows, highs, strict=True)]
