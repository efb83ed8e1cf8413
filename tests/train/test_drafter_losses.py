"""The losses of drafters and the figures beside them, against enumerated acceptance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from acceptance_steps import distributions, enumerated, orders
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lantern_rt.runtime.acceptance import Relaxation
from lantern_rt.runtime.tree import DraftTree
from lantern_rt.runtime.tree_names import named_tree

torch = pytest.importorskip("torch")

from lantern_rt.train.drafter.figures import Tally, relaxed_ranks, steps_through  # noqa: E402
from lantern_rt.train.drafter.losses import draft_loss, guided, overlap, pooled  # noqa: E402

SIZE = 4
NEAR = np.array([[1, 2, 3], [0, 2, 3], [3, 1, 0], [2, 0, 1]])
Floats = NDArray[Any]


def acceptance_rate(p: Floats, q: Floats, rule: Relaxation | None) -> float:
    """How often a token drawn from q is accepted: every draft and every decision of `walk`, enumerated."""
    total = 0.0
    for weight, codes in orders(q, 1):
        tree = DraftTree(np.array([0, *codes]), np.array([-1, 0]), {0: q})
        total += weight * sum(chance for chance, found in enumerated(tree, lambda node: p, rule) if len(found.path) > 1)
    return total


def tensor(values: Floats) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, np.float64))


def logits(q: Floats) -> torch.Tensor:
    return tensor(q).clamp_min(1e-300).log()


@given(distributions(SIZE), distributions(SIZE))
@settings(max_examples=40)
def test_tv_is_one_minus_the_acceptance_rate(p: Floats, q: Floats) -> None:
    assert draft_loss("tv", tensor(p), logits(q)).item() == pytest.approx(1 - acceptance_rate(p, q, None), abs=1e-6)


@given(distributions(SIZE), distributions(SIZE), st.sampled_from([1.01, 1.5, 2.0, 4.0]), st.integers(1, 3))
@settings(max_examples=60)
def test_tv_neighbors_is_one_minus_the_relaxed_acceptance_rate(p: Floats, q: Floats, bound: float, k: int) -> None:
    rule = Relaxation(NEAR, k, lambda_=bound)
    brute = [p[token] + p[rule.aggregation_set(p, token)].sum() for token in range(SIZE)]
    found = pooled(tensor(p)[None], torch.from_numpy(NEAR[:, :k].copy()), bound)
    np.testing.assert_allclose(found[0], brute, atol=1e-9)
    loss = draft_loss("tv-neighbors", found, logits(q)[None]).item()
    assert loss == pytest.approx(1 - np.minimum(brute, q).sum(), abs=1e-6)
    assert loss == pytest.approx(1 - acceptance_rate(p, q, rule), abs=1e-6)


def test_kl_vanishes_where_the_drafter_agrees_and_nowhere_else() -> None:
    p = torch.softmax(torch.randn(3, SIZE, generator=torch.Generator().manual_seed(0)), -1)
    assert draft_loss("kl", p, p.log()).item() == pytest.approx(0, abs=1e-6)
    assert draft_loss("kl", p, p.log().roll(1, -1)).item() > 0.01


@pytest.mark.parametrize("loss", ["kl", "tv", "tv-neighbors"])
def test_every_loss_leads_to_the_target(loss: Any) -> None:
    p = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    wanted = pooled(p, torch.from_numpy(NEAR), 1.2) if loss == "tv-neighbors" else p
    scores = torch.zeros(1, SIZE, requires_grad=True)
    optimiser = torch.optim.SGD([scores], 0.5)
    before = overlap(wanted, scores.softmax(-1)).item()
    for _ in range(200):
        optimiser.zero_grad()
        draft_loss(loss, wanted, scores).backward()
        optimiser.step()
    assert overlap(wanted, scores.softmax(-1)).item() > max(before, 0.97)


def test_guidance_mixes_the_two_rows_of_a_picture_and_leaves_a_single_one() -> None:
    hidden, head = torch.randn(2, 2, 5, 3), torch.randn(7, 3)
    cond, uncond = (hidden @ head.T).unbind(1)
    torch.testing.assert_close(guided(hidden, head, 3.0), uncond + 3 * (cond - uncond))
    torch.testing.assert_close(guided(hidden[:, :1], head, 3.0), cond)


def test_relaxed_ranks_are_taken_as_often_as_the_runtime_takes_them() -> None:
    generator = torch.Generator().manual_seed(1)
    p, q = np.array([0.5, 0.1, 0.25, 0.15]), np.array([0.1, 0.4, 0.3, 0.2])
    rule, codes, draws = Relaxation(NEAR, 2, lambda_=1.8), [1, 2, 0], 40_000
    tree = DraftTree(np.array([0, *codes]), np.array([-1, 0, 0, 0]), {0: q})
    wanted = np.zeros(4)
    for weight, found in enumerated(tree, lambda node: p, rule):
        wanted[found.path[1] - 1 if len(found.path) > 1 else 3] += weight
    rows = [tensor(one).expand(draws, SIZE) for one in (p, q)]
    taken = relaxed_ranks(*rows, torch.tensor(codes).expand(draws, 3), torch.from_numpy(NEAR[:, :2]), 1.8, generator)
    np.testing.assert_allclose(np.bincount(taken.numpy(), minlength=4) / draws, wanted, atol=0.01)


def test_a_drafter_that_agrees_with_the_target_fills_a_chain_and_a_blind_one_gives_one_token() -> None:
    generator = torch.Generator().manual_seed(2)
    trees = {"chain-3": named_tree("chain-3")}
    scores = 3 * torch.randn(200, 64, generator=generator)
    for drafted, tokens in ((scores, 4.0), (scores.flip(0).roll(1, 1), 1.2)):
        tally = Tally(trees)  # type: ignore[arg-type]
        tally.add(((scores[depth:], drafted[depth:]) for depth in range(3)), None, generator)
        found = tally.figures()
        assert found["tokens per pass, exact, chain-3"] == pytest.approx(tokens, abs=0.25)
        assert (found["top-1"] == 1) == (tokens == 4)
        assert not [name for name in found if "relaxed" in name]


def test_a_step_goes_down_its_tree_as_far_as_children_are_taken() -> None:
    tree = named_tree("tree-2-10")  # (0), (1), (0, 0)
    assert steps_through(tree, [[0, 0, 0, 0], [0, 0, 0]]) == 2  # codes 0 + 3 and 3 + 1
    assert steps_through(tree, [[1, 1, 1, 1], [0, 0, 0]]) == 2  # (1, 0) is not in the tree: 2 codes a step
    assert steps_through(tree, [[2, 2, 2, 2], [0, 0, 0]]) == 4
    assert steps_through(tree, [[0, 2, 0, 0], [0, 0, 1]]) == 2
