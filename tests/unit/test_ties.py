"""Near-ties: a target whose logits have different rounding errors in each forward pass generates the same tokens.

Where rounding could change the chosen token, the runtime computes the logits again, with rounding errors that do not
depend on the batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from guided_logits import make_sampler
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from toy_engine import (
    ToyModel,
    ToyTarget,
    collect_codes,
    decode,
    hash_integers,
    make_model,
    make_prompt,
    make_target_output,
)

from lantern_rt.methods import Autoregressive, Eagle, MethodConfig, Sampling, SpeculativeJacobi
from lantern_rt.runtime.engine import PassInput, PassOutput
from lantern_rt.runtime.layout import PassLayout
from lantern_rt.runtime.noise import Noise
from lantern_rt.runtime.statistics import Statistics
from lantern_rt.runtime.target import choose_tokens_together
from lantern_rt.runtime.tree import DraftTree

METHODS = [Eagle(tree="chain-2"), Eagle(tree="dynamic-8-3-3"), SpeculativeJacobi(window=2), SpeculativeJacobi(window=5)]
SAMPLINGS = [
    Sampling(cfg_scale=2.0, temperature=0.8),
    Sampling(top_k=3),
    Sampling(cfg_scale=1.5, top_k=4, top_p=0.7),
    Sampling(cfg_scale=1.5, min_p=0.3),
    Sampling(temperature=0),
]
MAX_ROUNDING = 0.05  # maximum simulated change of the difference of two logits
Logits = NDArray[np.float32]  # [rows, vocabulary]


def choose_and_check_tokens(
    logits: Logits, noise: Logits | None, sampling: Sampling, rounding_margin: float
) -> tuple[Any, Any]:
    """Return the token of each row of logits, and whether rounding cannot change it; without noise, greedy."""
    sampler = make_sampler(sampling)
    codes, _ = sampler.choose(logits, noise)
    noises = [None] * len(logits) if noise is None else noise
    rows = zip(logits, noises, codes, strict=True)
    return np.array(codes), np.array([sampler.stays_best_under_rounding(*row, rounding_margin) for row in rows])


class RoundingTarget(ToyTarget):
    """Target with simulated rounding errors up to +-MAX_ROUNDING / 4, which depend on the shape of the pass."""

    def run(self, batch: PassInput, cache: Any) -> PassOutput:
        output = super().run(batch, cache)
        rows, nodes = batch.positions.shape
        indices = np.arange(rows * nodes * self.vocabulary).reshape(rows, nodes, -1)
        hashes = hash_integers(indices, rows, nodes, cache.lengths[:, None, None]) >> np.uint64(40)
        rounding = MAX_ROUNDING / 2 * (hashes.astype(np.float64) / 2**24 - 0.5)
        return output._replace(logits=(output.logits + rounding).astype(np.float32))


def make_rounding_model(rounding_bound: float) -> ToyModel:
    model = make_model(vocabulary=5, codes=12)
    assert isinstance(model.target, ToyTarget)
    return replace(model, target=RoundingTarget(**vars(model.target)), rounding_bound=rounding_bound)


def generate_tokens(
    model: ToyModel, sampling: Sampling, method: MethodConfig, batch: int, images: int = 24
) -> tuple[list[list[int]], list[Statistics]]:
    """Generate images with the seeds 0, 1 and so on; return their tokens, and the statistics of each batch."""
    codes: list[list[int]] = []
    stats = []
    for start in range(0, images, batch):
        batch_seeds = range(start, min(images, start + batch))
        prompts = [make_prompt(i, padding=i % 3) for i in batch_seeds]
        steps = list(decode(model, prompts, list(batch_seeds), sampling, method))
        codes += collect_codes(steps, len(batch_seeds))
        assert steps[-1].stats is not None
        stats.append(steps[-1].stats)
    return codes, stats


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_rounding_errors_change_no_token(sampling: Sampling) -> None:
    expected, _ = generate_tokens(make_rounding_model(MAX_ROUNDING), sampling, Autoregressive(), 1)
    assert generate_tokens(make_rounding_model(MAX_ROUNDING), sampling, Autoregressive(), 5)[0] == expected
    for method in METHODS:
        for batch in (1, 4):
            assert generate_tokens(make_rounding_model(MAX_ROUNDING), sampling, method, batch)[0] == expected
    exact = make_rounding_model(0.0)
    without_recomputation = [generate_tokens(exact, sampling, each, 4)[0] for each in [Autoregressive(), *METHODS]]
    assert any(codes != expected for codes in without_recomputation), "the rounding is too small for this test"


def test_statistics_count_the_passes_that_compute_ties_again() -> None:
    model = make_rounding_model(MAX_ROUNDING)
    assert isinstance(model.target, ToyTarget)
    _, stats = generate_tokens(model, SAMPLINGS[0], Autoregressive(), 24)
    images = stats[0].per_image
    tie_passes = sum(image.tie_passes for image in images)
    assert tie_passes > 0
    assert stats[0].target_passes == len(model.target.passes) == 12 + tie_passes
    assert {image.target_passes - image.tie_passes for image in images} == {12}
    assert stats[0].tokens_per_forward_pass == pytest.approx(np.mean([12 / image.target_passes for image in images]))
    _, stats = generate_tokens(make_rounding_model(0.0), SAMPLINGS[0], Autoregressive(), 24)
    assert not any(image.tie_passes for image in stats[0].per_image)


@pytest.mark.parametrize(("count", "num_in_one_call"), [(1, 0), (2, 2), (200, 128)])
def test_one_call_for_many_images_chooses_the_same_tokens(count: int, num_in_one_call: int) -> None:
    logits = np.random.default_rng(0).normal(size=(count, 3, 5)).astype(np.float32)
    chain = DraftTree(np.arange(2), np.array([-1, 0])).tree_structure
    separate_rows: list[int] = []

    class CountedLayout(PassLayout):
        def logits(self, logits: Any, rows: slice, nodes: Any) -> Logits:
            separate_rows.append(rows.start)
            return super().logits(logits, rows, nodes)

    layout = CountedLayout(np.arange(2), np.arange(4, 6), chain.ancestor_mask)
    outputs = [make_target_output(logits, chain, range(4, 6), layout, slice(i, i + 1), seed=i) for i in range(count)]
    choose_tokens_together(logits, outputs)
    expected = [make_sampler(Sampling()).choose(logits[i, :2], Noise(i).gumbel(4, 2, 5))[0] for i in range(count)]
    assert [[output.choose_token_without_recompute(node) for node in range(2)] for output in outputs] == expected
    assert separate_rows == [*range(num_in_one_call, count)]


@st.composite
def rounding_cases(draw: st.DrawFn) -> tuple[Logits, Logits | None, Sampling, float, int]:
    """Generate logits `[3, vocabulary]`, noise, sampling settings, a rounding margin and a seed."""
    size = draw(st.integers(2, 40))
    seed = draw(st.integers(0, 2**32 - 1))
    sampling = Sampling(
        temperature=draw(st.sampled_from([0.0, 0.7, 1.0, 1.3])),
        top_k=draw(st.integers(0, size + 1)),
        top_p=draw(st.sampled_from([0.2, 0.5, 0.8, 0.95, 1.0])),
        min_p=draw(st.sampled_from([None, None, 0.02, 0.5, 0.99, 1.0])),
        filter_order=draw(st.sampled_from(["top-k, top-p", "top-p, top-k"])),
    )
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(3, size)).astype(np.float32)
    # Small scales put many logits near the threshold of a filter.
    logits *= np.float32(draw(st.sampled_from([0.01, 0.1, 1, 1])))
    logits = np.round(logits, draw(st.integers(0, 4)))  # coarse rounding makes ties
    noise = None if sampling.greedy else rng.gumbel(size=(3, size)).astype(np.float32)
    return logits, noise, sampling, draw(st.sampled_from([1e-3, 0.02, 0.1, 0.5])), seed


@settings(max_examples=150, deadline=None)
@given(rounding_cases())
def test_a_robust_token_stays_the_same_within_the_margin(case: tuple[Any, ...]) -> None:
    logits, noise, sampling, rounding_margin, seed = case
    codes, is_robust = choose_and_check_tokens(logits, noise, sampling, rounding_margin)
    # The difference of two logits changes by less than the margin.
    max_change = 0.49 * rounding_margin * (sampling.temperature or 1.0)
    rng = np.random.default_rng(seed + 1)
    for _ in range(20):
        shares = rng.uniform(-1, 1, logits.shape) if rng.random() < 0.5 else rng.choice([-1, 1], logits.shape)
        changed_codes, _ = make_sampler(sampling).choose((logits + max_change * shares).astype(np.float32), noise)
        np.testing.assert_array_equal(np.array(changed_codes)[is_robust], codes[is_robust])


def test_most_choices_are_robust_to_rounding_and_ties_are_not() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(500, 64)).astype(np.float32)
    noise = rng.gumbel(size=(500, 64)).astype(np.float32)
    filters: list[dict[str, Any]] = [{}, {"top_k": 20}, {"top_p": 0.9}, {"top_k": 30, "top_p": 0.9}, {"min_p": 0.1}]
    for sampling in (Sampling(**each) for each in filters):
        _, is_robust = choose_and_check_tokens(logits, noise, sampling, 1e-3)
        assert is_robust.mean() > 0.95
    equal_logits = np.zeros((1, 8), np.float32)
    assert not choose_and_check_tokens(equal_logits, None, Sampling(temperature=0), 1e-6)[1].any()
    close_logits = np.array([400, 399.99], np.float32)
    gumbel = np.array([0, -5], np.float32)
    assert not make_sampler(Sampling(top_p=0.5)).stays_best_under_rounding(close_logits, gumbel, 0, 0.02)
    # Rounding decides whether token 1 or 2 is within top-k 2.
    boundary_logits = np.array([[2.0, 1.0, 1.0 + 1e-5, 0.0]], np.float32)
    gumbel = np.array([[0.0, 9.0, 0.0, 0.0]], np.float32)
    assert not choose_and_check_tokens(boundary_logits, gumbel, Sampling(top_k=2), 1e-4)[1].any()
    assert choose_and_check_tokens(boundary_logits, gumbel, Sampling(top_k=3), 1e-4)[1].all()
