"""Statistics of evaluations: Frechet distances and confidence intervals."""

from __future__ import annotations

import numpy as np
import pytest
from evaluation_graphs import ignore_progress

from lantern_rt.compare.evaluate import estimate_frechet_distances
from lantern_rt.compare.statistics import Floats, compute_frechet_distance, estimate_interval, fit_gaussian


def compute_distance(first: Floats, second: Floats) -> float:
    return compute_frechet_distance(fit_gaussian(first), fit_gaussian(second))


def test_the_distance_of_shifted_features_is_the_squared_shift() -> None:
    features = np.random.default_rng(0).normal(size=(50, 3))
    assert compute_distance(features, features + np.array([3.0, 0.0, 4.0])) == pytest.approx(25)


def test_the_distance_of_gaussians_agrees_with_the_formula() -> None:
    """Compare with a formula for Gaussians whose covariances have the same eigenvectors."""
    rng = np.random.default_rng(1)
    rotation = np.linalg.qr(rng.normal(size=(4, 4)))[0]
    first_scale = np.array([1.0, 2.0, 0.5, 3.0])
    second_scale = np.array([2.0, 2.0, 1.0, 0.0])
    first_features = (rng.normal(size=(200_000, 4)) * first_scale) @ rotation
    second_features = (rng.normal(size=(200_000, 4)) * second_scale + 1) @ rotation
    assert compute_distance(first_features, second_features) == pytest.approx(
        4 + np.square(first_scale - second_scale).sum(), rel=0.01
    )


@pytest.mark.parametrize("width", [5, 40])
def test_the_frechet_distance_agrees_with_the_matrix_square_root(width: int) -> None:
    rng = np.random.default_rng(2)
    first_features = rng.normal(size=(60, width))
    second_features = rng.normal(1, 2, size=(70, width)) @ rng.normal(size=(width, width))
    first_covariance = np.cov(first_features.T)
    second_covariance = np.cov(second_features.T)
    shift = first_features.mean(0) - second_features.mean(0)
    eigenvalues = np.linalg.eigvals(first_covariance @ second_covariance).real
    overlap = np.sqrt(np.maximum(eigenvalues, 0)).sum()  # trace of the square root
    expected = shift @ shift + np.trace(first_covariance + second_covariance) - 2 * overlap
    assert compute_distance(first_features, second_features) == pytest.approx(expected, rel=1e-6)


def test_the_distance_is_defined_for_few_images() -> None:
    rng = np.random.default_rng(3)
    features = rng.normal(size=(6, 30))
    assert compute_distance(features, features) == pytest.approx(0, abs=1e-12)
    assert compute_distance(features, rng.normal(size=(8, 30))) > 1


def test_intervals_of_a_mean_have_about_the_nominal_coverage() -> None:
    rng = np.random.default_rng(5)
    covered = 0
    for _ in range(80):
        values = rng.normal(1, 1, size=(1, 60))
        (interval,) = estimate_interval(lambda chosen, values=values: values[:, chosen].mean(1), 60, 200)
        covered += interval["low"] <= 1 <= interval["high"]
    assert 0.86 * 80 <= covered < 80


def test_intervals_of_differences_compare_equal_prompts() -> None:
    rng = np.random.default_rng(6)
    prompts = 10 * rng.normal(size=80)
    table = np.stack([prompts, prompts + 1 + 0.1 * rng.normal(size=80)])
    figure = estimate_interval(lambda chosen: table[:, chosen].mean(1), 80)
    first_difference, second_difference = (method["difference_to_ar"] for method in figure)
    assert first_difference["value"] == first_difference["high"] == 0
    assert 0.9 < second_difference["low"] < 1 < second_difference["high"] < 1.1
    assert figure[1]["high"] - figure[1]["low"] > 2


def test_a_constant_figure_has_an_interval_of_zero_width() -> None:
    (interval,) = estimate_interval(lambda chosen: [1.0], 5)
    assert (interval["value"], interval["low"], interval["high"]) == (1, 1, 1)


def test_intervals_separate_equal_from_different_distributions() -> None:
    rng = np.random.default_rng(7)
    sets = [rng.normal(size=(120, 4)), rng.normal(size=(120, 4)), rng.normal(0.8, 1, size=(120, 4))]
    frechet = estimate_frechet_distances(sets, rng.normal(size=(120, 4)), 2, ignore_progress)
    differences = [method["difference_to_ar"] for method in frechet]
    assert differences[1]["low"] < 0 < differences[1]["high"]
    assert differences[2]["low"] > 1
    assert all(method["low"] <= method["value"] <= method["high"] for method in frechet)
