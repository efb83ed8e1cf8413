"""Exact methods leave the target's distribution alone: by chi-square over draws, and by enumerating a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chisquare
from toy_engine import joint_distribution, make_model, make_prompt, next_distribution
from toy_script import Script

from lantern_rt.methods import Ar, Eagle, MethodConfig, Sampling, Sjd
from lantern_rt.runtime import acceptance, decode
from lantern_rt.runtime import drafter as drafting
from lantern_rt.runtime.drafts import Model
from lantern_rt.runtime.jacobi import Window
from lantern_rt.runtime.sampling import Probabilities, shape_distribution
from lantern_rt.runtime.tree import DraftTree

BUSHY = "tree-3-210-100"
SLIM = "tree-2-10"


class OneGenerator:
    """A request's generator that shares one stream among all requests, so that opening 200,000 is cheap."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def spawn(self, count: int) -> list[np.random.Generator]:
        return [self.rng] * count


def counted_draws(
    model: Model, sampling: Sampling, method: MethodConfig, draws: int, seed: int, batch: int = 2000
) -> NDArray[np.int64]:
    """How often every sequence of codes came out of `decode`, `[vocabulary] * codes`."""
    vocabulary = model.target.vocabulary  # type: ignore[attr-defined]
    counts = np.zeros((vocabulary,) * model.codes, np.int64)
    prompt, rng = make_prompt(7, padding=1), OneGenerator(seed)
    for _ in range(draws // batch):
        codes = np.zeros((batch, model.codes), np.int64)
        filled = np.zeros(batch, np.int64)
        for step in decode.decode(model, [prompt] * batch, [rng] * batch, sampling, method):  # type: ignore[list-item]
            for part in step.parts:
                have = filled[part.request]
                codes[part.request, have : have + part.committed] = part.codes[: part.committed]
                filled[part.request] += part.committed
        assert (filled == model.codes).all()
        np.add.at(counts, tuple(codes.T), 1)
    return counts


def p_value(counts: NDArray[np.int64], joint: NDArray[np.float64]) -> float:
    """Chi-square of counts against a joint distribution; cells expecting fewer than 10 draws are merged."""
    expected = joint.ravel() * counts.sum()
    observed = counts.ravel().astype(float)
    assert (observed[expected == 0] == 0).all(), "an impossible sequence was drawn"
    small = expected < 10
    merged_observed = np.append(observed[~small], observed[small].sum())
    merged_expected = np.append(expected[~small], expected[small].sum())
    if merged_expected[-1] < 10:  # what is left over joins the smallest cell
        merged_observed[np.argmin(merged_expected[:-1])] += merged_observed[-1]
        merged_expected[np.argmin(merged_expected[:-1])] += merged_expected[-1]
        merged_observed, merged_expected = merged_observed[:-1], merged_expected[:-1]
    return float(chisquare(merged_observed, merged_expected).pvalue)


@pytest.fixture
def remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remember `shape_distribution`'s answers: it is a pure function, asked the same few questions all along."""
    answers: dict[tuple[bytes, Sampling], Probabilities] = {}

    def remember(logits: NDArray[np.float32], sampling: Sampling) -> Probabilities:
        key = (logits.tobytes(), sampling)
        if key not in answers:
            answers[key] = shape_distribution(logits, sampling)
        return answers[key]

    monkeypatch.setattr(decode, "shape_distribution", remember)
    monkeypatch.setattr(drafting, "shape_distribution", remember)


CASES = {
    "balanced-25": (Eagle(tree="balanced-25"), Sampling()),
    "chain-3, guided, temperature 0.7": (Eagle(tree="chain-3"), Sampling(cfg_scale=2.0, temperature=0.7)),
    "bushy, temperature 1.3, top-k 2": (Eagle(tree=BUSHY), Sampling(temperature=1.3, top_k=2)),
    "dynamic-10-3-3": (Eagle(tree="dynamic-10-3-3"), Sampling()),
    "dynamic-6-2-3, guided, temperature 1.4, top-p 0.9": (
        Eagle(tree="dynamic-6-2-3"),
        Sampling(cfg_scale=1.5, temperature=1.4, top_p=0.9),
    ),
    "dynamic-8-3-2, temperature 1.6, top-k 2": (Eagle(tree="dynamic-8-3-2"), Sampling(temperature=1.6, top_k=2)),
    "sjd, window 3": (Sjd(window=3), Sampling()),
    "sjd, guided, top-p 0.9": (Sjd(window=3), Sampling(cfg_scale=1.5, top_p=0.9)),
    "sjd, window 2, temperature 0.7": (Sjd(window=2), Sampling(temperature=0.7)),
}


def codes_needed(method: MethodConfig) -> int:
    """A window needs a few passes to show what it does."""
    return 5 if isinstance(method, Sjd) else 3


@pytest.mark.usefixtures("remembered")
@pytest.mark.parametrize("case", CASES)
def test_draws_have_the_exact_joint_distribution_quick(case: str) -> None:
    method, sampling = CASES[case]
    model = make_model(vocabulary=3, codes=codes_needed(method), round_span=4, columns=2)
    counts = counted_draws(model, sampling, method, draws=1_000, seed=11, batch=1_000)
    assert p_value(counts, joint_distribution(model, make_prompt(7, padding=1), sampling)) > 0.001


@pytest.mark.slow
@pytest.mark.usefixtures("remembered")
@pytest.mark.parametrize("case", CASES)
def test_draws_have_the_exact_joint_distribution_at_200_000_draws(
    case: str, record_property: Callable[[str, object], None]
) -> None:
    method, sampling = CASES[case]
    model = make_model(vocabulary=3, codes=codes_needed(method), round_span=4, columns=2)
    counts = counted_draws(model, sampling, method, draws=200_000, seed=12)
    p = p_value(counts, joint_distribution(model, make_prompt(7, padding=1), sampling))
    record_property("p_value", p)
    print(f"{case}: p = {p:.4f} at {counts.sum()} draws, {np.count_nonzero(counts)} sequences seen")
    assert p > 0.001


@pytest.mark.usefixtures("remembered")
def test_plain_draws_have_the_exact_joint_distribution() -> None:
    model, sampling = make_model(vocabulary=3, codes=3), Sampling(temperature=0.9)
    counts = counted_draws(model, sampling, Ar(), draws=4_000, seed=13)
    assert p_value(counts, joint_distribution(model, make_prompt(7, padding=1), sampling)) > 0.001


@pytest.mark.usefixtures("remembered")
@pytest.mark.parametrize("forgotten", ["to take q away", "to remove a refused code"])
def test_the_chi_square_test_catches_a_rejection_that_forgets(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(p: Probabilities, q: Probabilities | None, code: int, *rest: object) -> Probabilities:
        left = p.copy()
        if forgotten == "to take q away":
            left[code] = 0
        return left / max(left.sum(), 1e-300)

    monkeypatch.setattr(acceptance, "residual_distribution", wrong)
    model, sampling = make_model(vocabulary=3, codes=3), Sampling()
    counts = counted_draws(model, sampling, Eagle(tree=BUSHY), draws=2_000, seed=14)
    assert p_value(counts, joint_distribution(model, make_prompt(7, padding=1), sampling)) < 1e-6


@pytest.mark.usefixtures("remembered")
def test_the_chi_square_test_catches_drafts_dropped_for_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a child counts must not depend on what was drawn: here children of little probability are taken back."""
    right = drafting.TreeDrafts._draft_static

    def wrong(drafter: drafting.TreeDrafts, *rest: Any) -> list[DraftTree]:
        kept = []
        for tree in right(drafter, *rest):
            dropped = tree.nodes == 2 and tree.proposals[0][tree.tokens[1]] < 0.4
            kept.append(DraftTree(tree.tokens[:1], tree.parents[:1]) if dropped else tree)
        return kept

    monkeypatch.setattr(drafting.TreeDrafts, "_draft_static", wrong)
    model, sampling = make_model(vocabulary=3, codes=3), Sampling()
    counts = counted_draws(model, sampling, Eagle(tree="chain-1"), draws=2_000, seed=15)
    assert p_value(counts, joint_distribution(model, make_prompt(7, padding=1), sampling)) < 1e-6


@pytest.mark.usefixtures("remembered")
def test_the_chi_square_test_catches_a_window_that_forgets_what_it_drew_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Window, "_couple", lambda window, code, q, p: code)
    model, sampling = make_model(vocabulary=3, codes=5, columns=2), Sampling()
    counts = counted_draws(model, sampling, Sjd(window=3), draws=4_000, seed=16)
    assert p_value(counts, joint_distribution(model, make_prompt(7, padding=1), sampling)) < 1e-6


# ---------------------------------------------------------------- one step of `decode`, by enumeration


@pytest.mark.usefixtures("remembered")
@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize(
    ("tree", "sampling"),
    [
        ("dynamic-6-3-2", Sampling()),
        ("dynamic-10-3-3", Sampling(cfg_scale=2.0, temperature=0.8)),
        ("dynamic-9-4-2", Sampling(temperature=1.4, top_k=2)),
        (SLIM, Sampling()),
        (SLIM, Sampling(cfg_scale=3.0, temperature=1.5, top_p=0.7)),
        (SLIM, Sampling(cfg_scale=0.5, top_k=2)),
        ("chain-3", Sampling(cfg_scale=1.7, temperature=1.1)),
    ],
)
def test_the_next_codes_of_one_step_are_exactly_distributed(
    tree: str, sampling: Sampling, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = make_model(vocabulary=3, codes=12, round_span=4, seed=3), make_prompt(3, padding=1)
    method = Eagle(tree=tree)
    ahead = 4  # look at so many codes: what one step may commit at most
    following = cache(lambda before, codes: continuation(model, before, codes, ahead, sampling))
    found = np.zeros((3,) * ahead)
    total = 0.0
    for script in Script(seed=5).runs():
        monkeypatch.setattr(decode, "draw", script.draw)
        monkeypatch.setattr(acceptance, "draw", script.draw)
        monkeypatch.setattr(drafting, "draw_without_replacement", script.draw_without_replacement)
        steps = decode.decode(model, [prompt], [script], sampling, method)  # type: ignore[list-item]
        before = tuple(code for _ in range(step) for code in next(steps).parts[0].codes.tolist())
        script.armed = True
        codes = tuple(next(steps).parts[0].codes[:ahead].tolist())
        total += script.weight
        found[codes] += script.weight * following(before, codes)
    assert total == pytest.approx(1)
    np.testing.assert_allclose(found, following(before, ()), atol=1e-6)


def continuation(
    model: Model, before: tuple[int, ...], codes: tuple[int, ...], ahead: int, sampling: Sampling
) -> NDArray[np.float64]:
    """Exact joint distribution of the codes that follow `before` and `codes`, up to `ahead` codes in all."""
    prompt, missing = make_prompt(3, padding=1), ahead - len(codes)
    joint = np.ones((3,) * missing)
    for length in range(missing):
        for more in itertools.product(range(3), repeat=length):
            following = next_distribution(model, prompt, [*before, *codes, *more], sampling)
            joint[more] *= following.reshape((3,) + (1,) * (missing - length - 1))
    return joint
