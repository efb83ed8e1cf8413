"""Comparing sets of features: distances against closed forms, and intervals that cover."""

from __future__ import annotations

import numpy as np
import pytest
from evaluation_graphs import quiet

from lantern_rt.compare.evaluate import feature_figures
from lantern_rt.compare.statistics import (
    Floats,
    estimate,
    frechet_distance,
    kernel_terms,
    mean_over_pairs,
    median_distance,
    precision_recall,
)

# ---------------------------------------------------------------- distances


def test_the_frechet_distance_of_a_set_to_itself_is_zero() -> None:
    features = np.random.default_rng(0).normal(size=(50, 7))
    assert frechet_distance(features, features) == pytest.approx(0, abs=1e-12)


def test_a_shift_alone_is_a_frechet_distance_of_its_square() -> None:
    features = np.random.default_rng(0).normal(size=(50, 3))
    assert frechet_distance(features, features + np.array([3.0, 0.0, 4.0])) == pytest.approx(25)


def test_the_frechet_distance_of_two_gaussians_is_the_closed_form() -> None:
    """For commuting covariances: |m1 - m2|^2 + sum of (s1 - s2)^2 over the axes."""
    rng = np.random.default_rng(1)
    turn = np.linalg.qr(rng.normal(size=(4, 4)))[0]
    first, second = np.array([1.0, 2.0, 0.5, 3.0]), np.array([2.0, 2.0, 1.0, 0.0])
    own = (rng.normal(size=(200_000, 4)) * first) @ turn
    other = (rng.normal(size=(200_000, 4)) * second + 1) @ turn
    assert frechet_distance(own, other) == pytest.approx(4 + np.square(first - second).sum(), rel=0.01)


@pytest.mark.parametrize("width", [5, 40])
def test_the_frechet_distance_agrees_with_the_matrix_square_root(width: int) -> None:
    from scipy.linalg import sqrtm

    rng = np.random.default_rng(2)
    own, other = rng.normal(size=(60, width)), rng.normal(1, 2, size=(70, width)) @ rng.normal(size=(width, width))
    first, second = np.cov(own.T), np.cov(other.T)
    shift = own.mean(0) - other.mean(0)
    expected = shift @ shift + np.trace(first + second - 2 * np.real(sqrtm(first @ second)))
    assert frechet_distance(own, other) == pytest.approx(expected, rel=1e-6)


def test_fewer_pictures_than_features_have_a_frechet_distance_too() -> None:
    rng = np.random.default_rng(3)
    own = rng.normal(size=(6, 30))
    assert frechet_distance(own, own) == pytest.approx(0, abs=1e-12)
    assert frechet_distance(own, rng.normal(size=(8, 30))) > 1


def test_points_are_on_the_manifold_within_the_reach_of_its_points() -> None:
    line = np.arange(10.0)[:, None]  # the third neighbour is at most 3 away
    assert precision_recall(np.array([[4.5], [-3.0], [12.1]]), line)[0].tolist() == [True, True, False]
    assert precision_recall(line, np.array([[4.5], [-3.0], [12.1]]))[1].tolist() == [True, True, False]
    assert all(on.all() for on in precision_recall(line, line))


def test_a_collapsed_set_has_precision_and_no_recall() -> None:
    rng = np.random.default_rng(4)
    reference, own = rng.normal(size=(200, 2)), rng.normal(scale=0.01, size=(200, 2))
    precision, recall = precision_recall(own, reference)
    assert precision.mean() > 0.95
    assert recall.mean() < 0.1


def test_a_row_chosen_twice_is_no_pair_with_itself() -> None:
    distances = np.abs(np.subtract.outer([0.0, 1.0, 3.0], [0.0, 1.0, 3.0]))
    assert mean_over_pairs(distances, np.array([0, 1, 2])) == pytest.approx(2)
    assert mean_over_pairs(distances, np.array([0, 0, 2])) == pytest.approx(3)
    assert mean_over_pairs(distances, np.array([1, 1])) == 0


def pairs_of(own: Floats, reference: Floats, bandwidth: float, seeds: int = 1) -> float:
    return mean_over_pairs(kernel_terms(own, reference, seeds, bandwidth), np.arange(len(own) // seeds))


def test_the_kernel_distance_is_the_unbiased_estimate_over_pairs_of_different_prompts() -> None:
    rng = np.random.default_rng(8)
    own, reference = rng.normal(size=(6, 3)), rng.normal(1, 1, size=(6, 3))  # three prompts, two seeds each

    def kernel(a: Floats, b: Floats) -> float:
        return float(np.exp(-np.square(a - b).sum() / (2 * 1.5**2)))

    terms = [
        kernel(own[i], own[j]) + kernel(reference[i], reference[j]) - kernel(own[i], reference[j]) * 2
        for i in range(6)
        for j in range(6)
        if i // 2 != j // 2
    ]
    assert pairs_of(own, reference, 1.5, seeds=2) == pytest.approx(1000 * np.mean(terms))


def test_the_kernel_distance_of_two_gaussians_is_the_closed_form() -> None:
    """E k(x, y) of unit Gaussians in two dimensions, `shift` apart: s^2 / (s^2 + 2) exp(-shift^2 / (2 s^2 + 4))."""
    rng = np.random.default_rng(9)
    own, reference = rng.normal(size=(1500, 2)), rng.normal(size=(1500, 2)) + np.array([2.0, 0.0])
    square = 1.5**2
    expected = 2 * square / (square + 2) * (1 - np.exp(-4 / (2 * square + 4)))
    assert pairs_of(own, reference, 1.5) == pytest.approx(1000 * expected, rel=0.05)


def test_at_a_wide_kernel_unit_vectors_are_as_far_apart_as_their_means() -> None:
    """What a bandwidth of 10 does to CLIP's embeddings: 1000 |m1 - m2|^2 / 100."""
    rng = np.random.default_rng(10)
    own, reference = rng.normal(size=(400, 5)), rng.normal(1, 1, size=(400, 5))
    own, reference = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (own, reference))
    shift = own.mean(0) - reference.mean(0)
    assert pairs_of(own, reference, 10) == pytest.approx(10 * shift @ shift, rel=0.02)


def test_the_kernel_distance_of_the_same_model_is_zero_on_average_however_few_pictures() -> None:
    rng = np.random.default_rng(11)
    found = []
    for _ in range(300):
        prompts = 2 * rng.normal(size=(8, 3))  # both sets show the same prompts
        found.append(pairs_of(prompts + rng.normal(size=(8, 3)), prompts + rng.normal(size=(8, 3)), 2))
    assert abs(np.mean(found)) < 3 * np.std(found) / len(found) ** 0.5
    assert min(found) < 0


def test_the_median_distance_is_one_where_there_is_none() -> None:
    assert median_distance(np.array([[0.0], [1.0], [3.0]])) == 2
    assert median_distance(np.zeros((5, 2))) == 1


# ---------------------------------------------------------------- intervals


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
    figures = feature_figures(sets, rng.normal(size=(120, 4)), 2, 2.0, quiet)
    frechet = figures["frechet"]
    assert [one["above_ar_interval"] for one in frechet] == [False, False, True]
    differences = [one["difference_to_ar"] for one in frechet]
    assert differences[1]["low"] < 0 < differences[1]["high"]
    assert differences[2]["low"] > 1
    kernel = figures["kernel"]
    assert not kernel[1]["above_ar_interval"]
    assert kernel[0]["low"] < 0 < kernel[0]["high"] < kernel[2]["low"]
    assert all(one["low"] <= one["value"] <= one["high"] for figure in figures.values() for one in figure)


def test_distances_to_exact_images_are_in_distances_of_two_seeds() -> None:
    rng = np.random.default_rng(12)
    prompts = np.repeat(10 * rng.normal(size=(60, 4)), 2, 0)  # two seeds each
    exact, others, reference = (prompts + rng.normal(size=(120, 4)) for _ in range(3))
    nudged = exact + np.array([0.5, 0, 0, 0])
    same, near, far = feature_figures([exact, nudged, others], reference, 2, 2.0, quiet)["distance_to_exact"]
    assert (same["value"], same["low"], same["high"]) == (0, 0, 0)
    between = [np.linalg.norm(exact[i] - reference[i // 2 * 2 + k]) for i in range(120) for k in range(2)]
    assert near["value"] == pytest.approx(0.5 / np.mean(between))
    assert near["low"] < near["value"] < near["high"] < far["low"] < 1 < far["high"]


def test_prompts_whose_images_are_all_alike_have_a_distance_to_exact_images_as_long_as_others_differ() -> None:
    exact, reference, nudged = np.zeros((2, 1)), np.array([[0.0], [2.0]]), np.array([[0.0], [1.0]])
    (_, near) = feature_figures([exact, nudged], reference, 1, 1.0, quiet)["distance_to_exact"]
    assert (near["value"], near["low"], near["high"]) == (0.5, 0, 0.5)  # a resample may be the first prompt alone
    assert "distance_to_exact" not in feature_figures([exact, nudged], exact, 1, 1.0, quiet)
