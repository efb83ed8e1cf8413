"""Near-equal logits: a target that rounds differently in every pass generates the same tokens.

Choices that rounding could change are computed again, in a pass whose rounding does not depend on the batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from toy_engine import ToyModel, ToyTarget, codes_of, decode, make_model, make_prompt, output_of, scramble

from lantern_rt.methods import Autoregressive, Eagle, MethodConfig, Sampling, SpeculativeJacobi
from lantern_rt.runtime.engine import PassInput, PassOutput
from lantern_rt.runtime.layout import PassLayout
from lantern_rt.runtime.noise import Noise
from lantern_rt.runtime.sampling import choose_codes, is_robust_to_rounding
from lantern_rt.runtime.statistics import Statistics
from lantern_rt.runtime.target import choose_tokens_together
from lantern_rt.runtime.tree import DraftTree

METHODS = [Eagle(tree="chain-2"), Eagle(tree="dynamic-8-3-3"), SpeculativeJacobi(window=2), SpeculativeJacobi(window=5)]
SAMPLINGS = [
    Sampling(cfg_scale=2.0, temperature=0.8),
    Sampling(top_k=3),
    Sampling(cfg_scale=1.5, top_k=4, top_p=0.7),
    Sampling(temperature=0),
]
WOBBLE = 0.05
Logits = NDArray[np.float32]  # [rows, vocabulary]


def choose_and_judge(
    logits: Logits, noise: Logits | None, sampling: Sampling, rounding_margin: float
) -> tuple[Any, Any]:
    """Return the chosen token of every row, and whether it is decisive: further ahead than the tie margin."""
    codes = choose_codes(logits, noise, sampling)
    noises = [None] * len(logits) if noise is None else noise
    rows = zip(logits, noises, codes.tolist(), strict=True)
    return codes, np.array(
        [is_robust_to_rounding(row, row_noise, code, sampling, rounding_margin) for row, row_noise, code in rows]
    )


class WobblyTarget(ToyTarget):
    """Target whose logits change with the shape of a pass and the node: two logits move apart by up to WOBBLE."""

    def run(self, batch: PassInput, cache: Any) -> PassOutput:
        output = super().run(batch, cache)
        rows, nodes = batch.positions.shape
        indices = np.arange(rows * nodes * self.vocabulary).reshape(rows, nodes, -1)
        hashes = scramble(indices, rows, nodes, cache.lengths[:, None, None]) >> np.uint64(40)
        rounding = WOBBLE / 2 * (hashes.astype(np.float64) / 2**24 - 0.5)
        return output._replace(logits=(output.logits + rounding).astype(np.float32))


def wobbly_model(rounding_bound: float) -> ToyModel:
    model = make_model(vocabulary=5, codes=12)
    assert isinstance(model.target, ToyTarget)
    return replace(model, target=WobblyTarget(**vars(model.target)), rounding_bound=rounding_bound)


def generate(
    model: ToyModel, sampling: Sampling, method: MethodConfig, batch: int, images: int = 24
) -> tuple[list[list[int]], list[Statistics]]:
    codes: list[list[int]] = []
    stats = []
    for start in range(0, images, batch):
        batch_seeds = range(start, min(images, start + batch))
        prompts = [make_prompt(i, padding=i % 3) for i in batch_seeds]
        steps = list(decode(model, prompts, list(batch_seeds), sampling, method))
        codes += codes_of(steps, len(batch_seeds))
        assert steps[-1].stats is not None
        stats.append(steps[-1].stats)
    return codes, stats


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_rounding_changes_no_token_with_any_method_and_batch_size(sampling: Sampling) -> None:
    expected, _ = generate(wobbly_model(WOBBLE), sampling, Autoregressive(), 1)
    assert generate(wobbly_model(WOBBLE), sampling, Autoregressive(), 5)[0] == expected
    for method in METHODS:
        for batch in (1, 4):
            assert generate(wobbly_model(WOBBLE), sampling, method, batch)[0] == expected
    without_recomputation = [
        generate(wobbly_model(0.0), sampling, method, 4)[0] for method in [Autoregressive(), *METHODS]
    ]
    assert any(codes != expected for codes in without_recomputation), "the rounding is too small for this test"


def test_passes_that_decide_ties_are_counted() -> None:
    model = wobbly_model(WOBBLE)
    assert isinstance(model.target, ToyTarget)
    _, stats = generate(model, SAMPLINGS[0], Autoregressive(), 24)
    images = stats[0].per_image
    tie_passes = sum(image.tie_passes for image in images)
    assert tie_passes > 0
    assert stats[0].target_passes == len(model.target.passes) == 12 + tie_passes
    assert {image.target_passes - image.tie_passes for image in images} == {12}
    assert stats[0].tokens_per_forward_pass == pytest.approx(np.mean([12 / image.target_passes for image in images]))
    assert not any(
        image.tie_passes for image in generate(wobbly_model(0.0), SAMPLINGS[0], Autoregressive(), 24)[1][0].per_image
    )


@pytest.mark.parametrize(("count", "num_together"), [(1, 0), (2, 2), (200, 128)])
def test_images_choose_in_one_call_as_each_would_alone_as_far_as_memory_allows(count: int, num_together: int) -> None:
    logits = np.random.default_rng(0).normal(size=(count, 3, 5)).astype(np.float32)
    chain = DraftTree(np.arange(2), np.array([-1, 0])).tree_structure
    rows_alone: list[int] = []

    class CountedLayout(PassLayout):
        def logits(self, logits: Any, rows: slice, nodes: Any) -> Logits:
            rows_alone.append(rows.start)
            return super().logits(logits, rows, nodes)

    layout = CountedLayout(np.arange(2), np.arange(4, 6), chain.ancestor_mask)
    outputs = [output_of(logits, chain, range(4, 6), layout, slice(i, i + 1), seed=i) for i in range(count)]
    choose_tokens_together(logits, outputs)
    expected = [choose_codes(logits[i, :2], Noise(i).gumbel(4, 2, 5), Sampling()).tolist() for i in range(count)]
    assert [[output.choose_token_without_recompute(node) for node in range(2)] for output in outputs] == expected
    assert rows_alone == [*range(num_together, count)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Logits, Logits | None, Sampling, float, int]:
    size = draw(st.integers(2, 40))
    seed = draw(st.integers(0, 2**32 - 1))
    sampling = Sampling(
        temperature=draw(st.sampled_from([0.0, 0.7, 1.0, 1.3])),
        top_k=draw(st.integers(0, size + 1)),
        top_p=draw(st.sampled_from([0.2, 0.5, 0.8, 0.95, 1.0])),
        filter_order=draw(st.sampled_from(["top-k, top-p", "top-p, top-k"])),
    )
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(3, size)).astype(np.float32)
    logits *= np.float32(
        draw(st.sampled_from([0.01, 0.1, 1, 1]))
    )  # small scales put many logits near the threshold of a filter
    logits = np.round(logits, draw(st.integers(0, 4)))  # coarse rounding makes ties
    noise = None if sampling.greedy else rng.gumbel(size=(3, size)).astype(np.float32)
    return logits, noise, sampling, draw(st.sampled_from([1e-3, 0.02, 0.1, 0.5])), seed


@settings(max_examples=150, deadline=None)
@given(cases())
def test_a_decisive_choice_stays_however_logits_move_within_the_margin(
    case: tuple[Logits, Logits | None, Sampling, float, int],
) -> None:
    logits, noise, sampling, rounding_margin, seed = case
    codes, decisive = choose_and_judge(logits, noise, sampling, rounding_margin)
    max_move = (
        0.49 * rounding_margin * (sampling.temperature or 1.0)
    )  # two logits move apart by less than the tie_margin
    rng = np.random.default_rng(seed + 1)
    for _ in range(20):
        moves = max_move * (
            rng.uniform(-1, 1, logits.shape) if rng.random() < 0.5 else rng.choice([-1, 1], logits.shape)
        )
        moved_codes = choose_codes((logits + moves).astype(np.float32), noise, sampling)
        np.testing.assert_array_equal(moved_codes[decisive], codes[decisive])


def test_most_choices_are_decisive_and_ties_are_not() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(500, 64)).astype(np.float32)
    noise = rng.gumbel(size=(500, 64)).astype(np.float32)
    for sampling in (Sampling(), Sampling(top_k=20), Sampling(top_p=0.9), Sampling(top_k=30, top_p=0.9)):
        _, decisive = choose_and_judge(logits, noise, sampling, 1e-3)
        assert decisive.mean() > 0.95
    equal = np.zeros((1, 8), np.float32)
    assert not choose_and_judge(equal, None, Sampling(temperature=0), 1e-6)[1].any()
    close_logits = np.array([400, 399.99], np.float32)
    gumbel = np.array([0, -5], np.float32)
    assert not is_robust_to_rounding(close_logits, gumbel, 0, Sampling(top_p=0.5), 0.02)
    boundary = np.array([[2.0, 1.0, 1.0 + 1e-5, 0.0]], np.float32)  # either of two could be the second token of top-k 2
    gumbel = np.array([[0.0, 9.0, 0.0, 0.0]], np.float32)
    assert not choose_and_judge(boundary, gumbel, Sampling(top_k=2), 1e-4)[1].any()
    assert choose_and_judge(boundary, gumbel, Sampling(top_k=3), 1e-4)[1].all()
