"""Sampling: guidance, temperature, top-k and top-p filters, and random choices of tokens."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from guided_logits import make_sampler, mix_guided_logits
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import chisquare
from toy_distributions import compute_naive_distribution

from lantern_rt.errors import EngineError
from lantern_rt.methods import FilterOrder, Sampling
from lantern_rt.runtime.sampling import NO_CODE, find_top_codes, sample_code, softmax

DATA = Path(__file__).parent.parent / "data"
FILTER_ORDERS: list[FilterOrder] = ["top-k, top-p", "top-p, top-k"]
LOGITS = arrays(np.float32, st.integers(1, 12), elements=st.floats(-8, 8, width=16), unique=True)


class ConstantGenerator:
    def __init__(self, number: float) -> None:
        self.number = number
        self.calls = 0

    def random(self) -> float:
        self.calls += 1
        return self.number


@pytest.mark.parametrize("family", ["llamagen-c2i", "llamagen-t2i"])
@pytest.mark.parametrize("setting", range(6))
def test_filters_give_the_recorded_probabilities_of_llamagen(family: str, setting: int) -> None:
    golden = np.load(DATA / family / "golden.npz")
    temperature, top_k, top_p = golden["filter_params"][setting]
    sampling = Sampling(temperature=temperature, top_k=int(top_k), top_p=top_p, filter_order="top-k, top-p")
    for logits, expected in zip(golden["filter_logits"], golden["filter_probs"][setting], strict=True):
        np.testing.assert_allclose(make_sampler(sampling).compute_distribution(logits), expected, atol=1e-6)


@given(
    LOGITS,
    st.floats(0.3, 3),
    st.integers(0, 14),
    st.floats(0.05, 1),
    st.sampled_from([None, 0.0, 0.01, 0.3, 1.0]),
    st.sampled_from(FILTER_ORDERS),
)
def test_filters_agree_with_a_simple_implementation(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float | None, order: FilterOrder
) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, filter_order=order)
    expected = compute_naive_distribution(logits.astype(np.float64), sampling)
    distribution = make_sampler(sampling).compute_distribution(logits)
    unfiltered = compute_naive_distribution(logits.astype(np.float64), Sampling(temperature=temperature))
    distance_to_top_p = np.abs(np.cumsum(np.sort(unfiltered)[::-1]) - top_p).min()
    if distance_to_top_p > 1e-5 and order == "top-p, top-k":  # otherwise rounding decides which tokens remain
        np.testing.assert_allclose(distribution, expected, atol=1e-6)
    assert distribution.sum() == pytest.approx(1)
    # Rounding may make two probabilities equal.
    assert logits[distribution.argmax()] == pytest.approx(logits.max(), abs=1e-6)
    assert np.count_nonzero(distribution) <= (top_k or len(logits))


def test_the_order_of_top_k_and_top_p_matters() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    top_k_first = make_sampler(Sampling(top_k=2, top_p=0.5, filter_order="top-k, top-p")).compute_distribution(logits)
    top_p_first = make_sampler(Sampling(top_k=2, top_p=0.5, filter_order="top-p, top-k")).compute_distribution(logits)
    np.testing.assert_allclose(top_k_first, [1, 0, 0, 0], atol=1e-6)  # after top-k, the first token has 4/7 > top-p 0.5
    np.testing.assert_allclose(top_p_first, [4 / 7, 3 / 7, 0, 0], atol=1e-6)


def test_min_p_is_a_share_of_the_largest_probability_whatever_the_other_filters() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    for filters, expected in (
        ({"min_p": 0.49}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"min_p": 0.51}, [4 / 7, 3 / 7, 0, 0]),
        ({"min_p": 1.0}, [1, 0, 0, 0]),
        ({"min_p": 0.0}, [0.4, 0.3, 0.2, 0.1]),
        ({"min_p": 0.74, "top_k": 3}, [4 / 7, 3 / 7, 0, 0]),
        ({"min_p": 0.1, "top_p": 0.6}, [4 / 7, 3 / 7, 0, 0]),
        ({"min_p": 0.26, "temperature": 0.5}, [16 / 25, 9 / 25, 0, 0]),
        ({"min_p": 0.24, "temperature": 0.5}, [16 / 29, 9 / 29, 4 / 29, 0]),
    ):
        distribution = make_sampler(Sampling.model_validate(filters)).compute_distribution(logits)
        np.testing.assert_allclose(distribution, expected, atol=1e-6)


def test_top_k_keeps_all_tokens_whose_logits_equal_the_threshold() -> None:
    distribution = make_sampler(Sampling(top_k=2)).compute_distribution(np.array([1, 0, 0, -1], np.float32))
    assert np.count_nonzero(distribution) == 3


@pytest.mark.parametrize("invalid_logit", [np.nan, np.inf])
def test_a_distribution_of_nan_or_infinite_logits_is_an_error(invalid_logit: float) -> None:
    with pytest.raises(EngineError, match="NaN or infinite"):
        make_sampler(Sampling()).compute_distribution(np.array([0, invalid_logit], np.float32))


def test_guidance_mixes_two_rows_and_returns_a_single_one() -> None:
    rows = np.array([[[1, 2]], [[0, 4]]], np.float32)
    np.testing.assert_allclose(mix_guided_logits(rows, Sampling(cfg_scale=3)), [[3, -2]])
    np.testing.assert_array_equal(mix_guided_logits(rows[:1], Sampling(cfg_scale=3)), rows[0])
    assert not Sampling(cfg_scale=1).uses_guidance
    assert Sampling(cfg_scale=0).uses_guidance


@given(
    arrays(np.float64, st.integers(1, 8), elements=st.sampled_from([0.0, 1e-300, 1e-9, 0.1, 1.0])),
    st.sampled_from([0.0, 1e-17, 0.5, 1 - 2**-53]),
)
def test_a_sampled_token_is_possible_and_uses_one_number(weights: np.ndarray, number: float) -> None:
    if weights.sum() == 0:
        weights[0] = 1
    generator = ConstantGenerator(number)
    assert weights[sample_code(weights / weights.sum(), generator)] > 0  # type: ignore[arg-type]
    assert generator.calls == 1


def make_gumbel_noise(rng: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
    return rng.gumbel(size=size).astype(np.float32)


def test_the_best_token_with_noise_is_a_sample() -> None:
    logits = np.log(np.array([0.5, 1e-30, 0.3, 0.15, 0.05], np.float32))
    for sampling in (Sampling(), Sampling(temperature=1.7, top_k=3), Sampling(top_p=0.6), Sampling(min_p=0.2)):
        noise = make_gumbel_noise(np.random.default_rng(1), (10_000, 5))
        counts = np.bincount(make_sampler(sampling).choose(np.tile(logits, (10_000, 1)), noise)[0], minlength=5)
        expected = compute_naive_distribution(logits.astype(np.float64), sampling)
        possible = expected > 1e-6
        assert counts[~possible].sum() == 0
        assert chisquare(counts[possible], 10_000 * expected[possible] / expected[possible].sum()).pvalue > 0.001


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(top_k=1), Sampling(top_p=0.5), Sampling(min_p=0.9), Sampling(temperature=0)]
)
@pytest.mark.parametrize("invalid_logit", [np.nan, np.inf])
@pytest.mark.filterwarnings("ignore:invalid value")  # as in `Batch.step`
def test_nan_logits_give_no_token_to_their_node_alone(invalid_logit: float, sampling: Sampling) -> None:
    noise = None if sampling.greedy else np.zeros((2, 3), np.float32)
    logits = np.array([[0, invalid_logit, 1], [0, 1, 2]], np.float32)
    sampler = make_sampler(sampling)
    assert sampler.choose(logits, noise)[0] == [NO_CODE, 2]
    codes, scores = find_top_codes(sampler.process(logits), 2)
    assert codes[1, 0] == 2
    assert (scores > -np.inf).any(1).tolist() == [False, True]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_best_k_with_noise_are_samples_without_replacement(count: int) -> None:
    distribution = np.array([0.45, 0.0, 0.3, 0.15, 0.1])
    num_samples = 10_000
    with np.errstate(divide="ignore"):
        weights = np.log(distribution).astype(np.float32)
    codes, scores = find_top_codes(weights + make_gumbel_noise(np.random.default_rng(count), (num_samples, 5)), count)
    assert np.isfinite(scores).all()
    counts = dict.fromkeys(itertools.permutations([0, 2, 3, 4], count), 0)
    for sampled in codes.tolist():
        counts[tuple(sampled)] += 1
    expected = []
    for order in counts:
        probability = 1.0
        remaining = 1.0
        for code in order:
            probability *= distribution[code] / remaining
            remaining -= distribution[code]
        expected.append(num_samples * probability)
    assert chisquare(list(counts.values()), expected).pvalue > 0.001


@pytest.mark.parametrize("vocabulary", [64, 4096, 16384])  # one block and many blocks
def test_samples_of_a_large_codebook_invert_the_distribution(vocabulary: int) -> None:
    weights = np.random.default_rng(0).random(vocabulary) ** 8
    weights[::3] = 0
    distribution = weights / weights.sum()
    cumulative = np.cumsum(distribution)
    for seed in range(300):
        number = np.random.default_rng(seed).random()
        token = sample_code(distribution, np.random.default_rng(seed))
        # Rounding of the sums may move the boundary between two tokens.
        assert abs(int(np.searchsorted(cumulative, number, side="right")) - token) <= 1
        assert distribution[token] > 0


SHAPES = st.tuples(st.integers(1, 3), st.sampled_from([7, 256, 1024]))


@given(logits=arrays(np.float32, SHAPES, elements=st.floats(-9, 9, width=16)), count=st.integers(1, 9))
def test_the_best_k_tokens_agree_with_a_full_sort(logits: np.ndarray, count: int) -> None:
    codes, scores = find_top_codes(logits, count)
    num_best = min(count, logits.shape[1])
    assert codes.shape == scores.shape == (len(logits), num_best)
    for row, top_codes, score in zip(logits, codes, scores, strict=True):
        assert len(set(top_codes.tolist())) == num_best
        np.testing.assert_array_equal(row[top_codes], np.sort(row)[::-1][:num_best])
        np.testing.assert_allclose(score, np.log(softmax(row))[top_codes], rtol=1e-5, atol=1e-5)
