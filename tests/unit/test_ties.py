"""Ties: a target that rounds differently in every pass gives the same tokens; what is not clear is computed anew."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from toy_engine import ToyModel, ToyTarget, codes_of, decode, make_model, make_prompt, output_of, scramble

from lantern_rt.methods import Ar, Eagle, MethodConfig, Sampling, Sjd
from lantern_rt.runtime.engine import Pass, PassOutput
from lantern_rt.runtime.layout import PassLayout
from lantern_rt.runtime.noise import Noise
from lantern_rt.runtime.sampling import choose, is_decisive
from lantern_rt.runtime.statistics import Statistics
from lantern_rt.runtime.target import choose_for_sequences
from lantern_rt.runtime.tree import DraftTree

METHODS = [Eagle(tree="chain-2"), Eagle(tree="dynamic-8-3-3"), Sjd(window=2), Sjd(window=5)]
SAMPLINGS = [
    Sampling(cfg_scale=2.0, temperature=0.8),
    Sampling(top_k=3),
    Sampling(cfg_scale=1.5, top_k=4, top_p=0.7),
    Sampling(temperature=0),
]
WOBBLE = 0.05
Rows = NDArray[np.float32]


def judged(logits: Rows, noise: Rows | None, sampling: Sampling, tie_margin: float) -> tuple[Any, Any]:
    """Codes of every row, and whether they are clear."""
    codes = choose(logits, noise, sampling)
    noises = [None] * len(logits) if noise is None else noise
    rows = zip(logits, noises, codes.tolist(), strict=True)
    return codes, np.array([is_decisive(own, loud, code, sampling, tie_margin) for own, loud, code in rows])


class WobblyTarget(ToyTarget):
    """Logits move with the shape of a pass and the place in it: from one to another, two move apart by up to WOBBLE."""

    def run(self, batch: Pass, cache: Any) -> PassOutput:
        output = super().run(batch, cache)
        rows, nodes = batch.positions.shape
        places = np.arange(rows * nodes * self.vocabulary).reshape(rows, nodes, -1)
        moved = scramble(places, rows, nodes, cache.lengths[:, None, None]) >> np.uint64(40)
        moves = WOBBLE / 2 * (moved.astype(np.float64) / 2**24 - 0.5)
        return output._replace(logits=(output.logits + moves).astype(np.float32))


def wobbly(rounding: float) -> ToyModel:
    model = make_model(vocabulary=5, codes=12)
    assert isinstance(model.target, ToyTarget)
    return replace(model, target=WobblyTarget(**vars(model.target)), rounding=rounding)


def drawn(
    model: ToyModel, sampling: Sampling, method: MethodConfig, batch: int, images: int = 24
) -> tuple[list[list[int]], list[Statistics]]:
    codes: list[list[int]] = []
    found = []
    for start in range(0, images, batch):
        some = range(start, min(images, start + batch))
        prompts = [make_prompt(i, padding=i % 3) for i in some]
        steps = list(decode(model, prompts, list(some), sampling, method))
        codes += codes_of(steps, len(some))
        assert steps[-1].stats is not None
        found.append(steps[-1].stats)
    return codes, found


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_rounding_moves_no_token_under_any_method_in_any_batch(sampling: Sampling) -> None:
    expected, _ = drawn(wobbly(WOBBLE), sampling, Ar(), 1)
    assert drawn(wobbly(WOBBLE), sampling, Ar(), 5)[0] == expected
    for method in METHODS:
        for batch in (1, 4):
            assert drawn(wobbly(WOBBLE), sampling, method, batch)[0] == expected
    left = [drawn(wobbly(0.0), sampling, method, 4)[0] for method in [Ar(), *METHODS]]
    assert any(one != expected for one in left)  # or this test would show nothing


def test_passes_that_decide_ties_are_counted() -> None:
    model = wobbly(WOBBLE)
    assert isinstance(model.target, ToyTarget)
    _, found = drawn(model, SAMPLINGS[0], Ar(), 24)
    images = found[0].per_image
    deciding = sum(one.tie_passes for one in images)
    assert deciding > 0
    assert found[0].target_passes == len(model.target.passes) == 12 + deciding
    assert {one.target_passes - one.tie_passes for one in images} == {12}
    assert found[0].tokens_per_forward_pass == pytest.approx(np.mean([12 / one.target_passes for one in images]))
    assert not any(one.tie_passes for one in drawn(wobbly(0.0), SAMPLINGS[0], Ar(), 24)[1][0].per_image)


@pytest.mark.parametrize(("count", "together"), [(1, 0), (2, 2), (200, 128)])
def test_neighbours_choose_together_what_each_would_choose_as_far_as_memory_goes(count: int, together: int) -> None:
    logits = np.random.default_rng(0).normal(size=(count, 3, 5)).astype(np.float32)
    chain = DraftTree(np.arange(2), np.array([-1, 0])).structure
    alone: list[int] = []

    class Counted(PassLayout):
        def logits(self, logits: Any, rows: slice, nodes: Any) -> Rows:
            alone.append(rows.start)
            return super().logits(logits, rows, nodes)

    layout = Counted(np.arange(2), np.arange(4, 6), chain.ancestors)
    own = [output_of(logits, chain, range(4, 6), layout, slice(i, i + 1), seed=i) for i in range(count)]
    choose_for_sequences(logits, own)
    expected = [choose(logits[i, :2], Noise(i).gumbel(4, 2, 5), Sampling()).tolist() for i in range(count)]
    assert [[one.choice_without_recompute(node) for node in range(2)] for one in own] == expected
    assert alone == [*range(together, count)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Rows, Rows | None, Sampling, float, int]:
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
    logits *= np.float32(draw(st.sampled_from([0.01, 0.1, 1, 1])))  # many of them near a filter's edge
    logits = np.round(logits, draw(st.integers(0, 4)))  # with ties
    noise = None if sampling.greedy else rng.gumbel(size=(3, size)).astype(np.float32)
    return logits, noise, sampling, draw(st.sampled_from([1e-3, 0.02, 0.1, 0.5])), seed


@settings(max_examples=150, deadline=None)
@given(cases())
def test_a_clear_choice_stays_however_logits_move_within_the_margin(
    case: tuple[Rows, Rows | None, Sampling, float, int],
) -> None:
    logits, noise, sampling, tie_margin, seed = case
    codes, clear = judged(logits, noise, sampling, tie_margin)
    reach = 0.49 * tie_margin * (sampling.temperature or 1.0)  # two logits move apart by less than the tie_margin
    rng = np.random.default_rng(seed + 1)
    for _ in range(20):
        moves = reach * (rng.uniform(-1, 1, logits.shape) if rng.random() < 0.5 else rng.choice([-1, 1], logits.shape))
        moved = choose((logits + moves).astype(np.float32), noise, sampling)
        np.testing.assert_array_equal(moved[clear], codes[clear])


def test_most_choices_are_clear_and_ties_are_not() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(500, 64)).astype(np.float32)
    noise = rng.gumbel(size=(500, 64)).astype(np.float32)
    for sampling in (Sampling(), Sampling(top_k=20), Sampling(top_p=0.9), Sampling(top_k=30, top_p=0.9)):
        _, clear = judged(logits, noise, sampling, 1e-3)
        assert clear.mean() > 0.95
    equal = np.zeros((1, 8), np.float32)
    assert not judged(equal, None, Sampling(temperature=0), 1e-6)[1].any()
    near = np.array([400, 399.99], np.float32)
    loud = np.array([0, -5], np.float32)
    assert not is_decisive(near, loud, 0, Sampling(top_p=0.5), 0.02)
    boundary = np.array([[2.0, 1.0, 1.0 + 1e-5, 0.0]], np.float32)  # which of two is the second of top-k 2?
    loud = np.array([[0.0, 9.0, 0.0, 0.0]], np.float32)
    assert not judged(boundary, loud, Sampling(top_k=2), 1e-4)[1].any()
    assert judged(boundary, loud, Sampling(top_k=3), 1e-4)[1].all()
