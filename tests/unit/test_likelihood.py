"""Likelihoods of tokens under the toy target, compared with the target's exact distributions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from guided_logits import make_sampler
from toy_distributions import compute_next_distribution
from toy_engine import compute_likelihood, make_model, make_prompt

from lantern_rt.methods import Sampling


@pytest.mark.parametrize(
    "sampling", [Sampling(cfg_scale=2.5, cfg_schedule="linear", temperature=0.8), Sampling(cfg_scale=2.5, cfg_tokens=2)]
)
def test_the_likelihood_agrees_with_the_exact_distributions(sampling: Sampling) -> None:
    model = make_model(vocabulary=5, codes=7)
    prompt = make_prompt(3, prefix=4, padding=1)
    codes = np.array([0, 3, 1, 1, 4, 2, 0])
    expected_nats = [
        -np.log(compute_next_distribution(model, prompt, codes[:i].tolist(), sampling)[code])
        for i, code in enumerate(codes)
    ]
    assert compute_likelihood(model, prompt, codes, sampling).nats == pytest.approx(np.mean(expected_nats), abs=1e-5)


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(cfg_scale=2.5, temperature=0.8), Sampling(cfg_scale=2.5, cfg_tokens=2)]
)
def test_entropy_is_the_expected_negative_log_likelihood(sampling: Sampling) -> None:
    model = make_model(vocabulary=5, codes=3)
    prompt = make_prompt(3)
    expected = entropy = 0.0  # nats per token, averaged over all images
    for codes in itertools.product(range(5), repeat=3):
        probability = 1.0
        for i, code in enumerate(codes):
            probability *= compute_next_distribution(model, prompt, list(codes[:i]), sampling)[code]
        result = compute_likelihood(model, prompt, np.array(codes), sampling)
        expected = expected + probability * result.nats
        entropy = entropy + probability * result.entropy
    assert entropy == pytest.approx(expected, abs=1e-5)
    assert entropy > 0.3


@pytest.mark.parametrize(("cfg_scale", "temperature", "factor"), [(1, 0.5, 2), (3, 0, 5), (0.5, 2, 0.5)])
def test_guidance_and_temperature_scale_the_rounding_margin(
    cfg_scale: float, temperature: float, factor: float
) -> None:
    sampling = Sampling(cfg_scale=cfg_scale, temperature=temperature)
    margin = make_sampler(sampling).compute_rounding_margin(0.1, 1 + sampling.uses_guidance)
    assert margin == pytest.approx(0.1 * factor)
