"""Comparing sets of features: distances against closed forms, and intervals that cover."""

from __future__ import annotations

import numpy as np
import pytest
from evaluation_graphs import quiet

from lantern_rt.compare.evaluate import frechet_figure
from lantern_rt.compare.statistics import Floats, estimate, fit_gaussian, frechet_distance


def distance(own: Floats, other: Floats) -> float:
    return frechet_distance(fit_gaussian(own), fit_gaussian(other))


def test_a_shift_alone_is_a_frechet_distance_of_its_square() -> None:
    features = np.random.default_rng(0).normal(size=(50, 3))
    assert distance(features, features + np.array([3.0, 0.0, 4.0])) == pytest.approx(25)


def test_the_frechet_distance_of_two_gaussians_is_the_closed_form() -> None:
    """For commuting covariances: |m1 - m2|^2 + sum of (s1 - s2)^2 over the axes."""
    rng = np.random.default_rng(1)
    turn = np.linalg.qr(rng.normal(size=(4, 4)))[0]
    first = np.array([1.0, 2.0, 0.5, 3.0])
    second = np.array([2.0, 2.0, 1.0, 0.0])
    own = (rng.normal(size=(200_000, 4)) * first) @ turn
    other = (rng.normal(size=(200_000, 4)) * second + 1) @ turn
    assert distance(own, other) == pytest.approx(4 + np.square(first - second).sum(), rel=0.01)


@pytest.mark.parametrize("width", [5, 40])
def test_the_frechet_distance_agrees_with_the_matrix_square_root(width: int) -> None:
    rng = np.random.default_rng(2)
    own = rng.normal(size=(60, width))
    other = rng.normal(1, 2, size=(70, width)) @ rng.normal(size=(width, width))
    first = np.cov(own.T)
    second = np.cov(other.T)
    shift = own.mean(0) - other.mean(0)
    overlap = np.sqrt(np.maximum(np.linalg.eigvals(first @ second).real, 0)).sum()  # trace of the square root
    expected = shift @ shift + np.trace(first + second) - 2 * overlap
    assert distance(own, other) == pytest.approx(expected, rel=1e-6)


def test_fewer_pictures_than_features_have_a_frechet_distance_too() -> None:
    rng = np.random.default_rng(3)
    own = rng.normal(size=(6, 30))
    assert distance(own, own) == pytest.approx(0, abs=1e-12)
    assert distance(own, rng.normal(size=(8, 30))) > 1


def test_intervals_of_a_mean_cover_it_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(5)
    covered = 0
    for _ in range(80):
        values = rng.normal(1, 1, size=(1, 60))
        (found,) = estimate(lambda chosen, values=values: values[:, chosen].mean(1), 60, 200)
        covered += found["low"] <= 1 <= found["high"]
    assert 0.86 * 80 <= covered < 80


def test_differences_are_paired() -> None:
    rng = np.random.default_rng(6)
    prompts = 10 * rng.normal(size=80)
    table = np.stack([prompts, prompts + 1 + 0.1 * rng.normal(size=80)])
    figure = estimate(lambda chosen: table[:, chosen].mean(1), 80)
    own, other = (one["difference_to_ar"] for one in figure)
    assert own["value"] == own["high"] == 0
    assert 0.9 < other["low"] < 1 < other["high"] < 1.1
    assert figure[1]["high"] - figure[1]["low"] > 2


def test_a_figure_that_never_varies_has_an_interval_of_no_width() -> None:
    (found,) = estimate(lambda chosen: [1.0], 5)
    assert (found["value"], found["low"], found["high"]) == (1, 1, 1)


def test_the_same_distribution_is_within_the_floor_and_another_is_not() -> None:
    rng = np.random.default_rng(7)
    sets = [rng.normal(size=(120, 4)), rng.normal(size=(120, 4)), rng.normal(0.8, 1, size=(120, 4))]
    frechet = frechet_figure(sets, rng.normal(size=(120, 4)), 2, quiet)
    differences = [one["difference_to_ar"] for one in frechet]
    assert differences[1]["low"] < 0 < differences[1]["high"]
    assert differences[2]["low"] > 1
    assert all(one["low"] <= one["value"] <= one["high"] for one in frechet)
