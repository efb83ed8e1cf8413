"""Drafting without a drafter: whole decodes by enumeration, what breaks them, and what a window holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from toy_engine import ToyTarget, joint_distribution, make_model, make_prompt
from toy_script import Script

from lantern_rt.methods import Ar, MethodConfig, Sampling, Sjd
from lantern_rt.runtime import acceptance, decode, jacobi
from lantern_rt.runtime.drafts import Model
from lantern_rt.runtime.jacobi import Window
from lantern_rt.runtime.sampling import Probabilities

VOCABULARY, CODES = 2, 5
BOTH = np.array([[1], [0]])  # the neighbour of either code


def enumerated(method: Sjd, sampling: Sampling, patch: pytest.MonkeyPatch) -> tuple[NDArray[np.float64], float, Model]:
    """Distribution of all codes of a whole decode, `[vocabulary] * codes`, by taking every branch in turn.

    Also the expected realised TVD, and the model.
    """
    model, prompt = make_model(VOCABULARY, CODES, seed=4, columns=2, neighbors=BOTH), make_prompt(3, padding=1)
    found, realised, total = np.zeros((VOCABULARY,) * CODES), 0.0, 0.0
    for script in Script(seed=0).runs():
        script.armed = True
        for module in (decode, acceptance, jacobi):
            patch.setattr(module, "draw", script.draw)
        codes: list[int] = []
        for step in decode.decode(model, [prompt], [script], sampling, method):  # type: ignore[list-item]
            codes += step.parts[0].codes[: step.parts[0].committed].tolist()
        assert step.statistics is not None
        realised += script.weight * step.statistics.realised_tvd
        found[tuple(codes)] += script.weight
        total += script.weight
    assert total == pytest.approx(1)
    return found, realised, model


def distance(found: NDArray[np.float64], model: Model, sampling: Sampling) -> float:
    """Total variation distance from what `ar` gives."""
    return float(np.abs(found - joint_distribution(model, make_prompt(3, padding=1), sampling)).sum() / 2)


@pytest.mark.parametrize(
    ("window", "sampling"),
    [
        (2, Sampling()),
        (2, Sampling(cfg_scale=2.0, temperature=0.7)),
        (3, Sampling()),
        (4, Sampling(cfg_scale=1.5)),
        (1, Sampling(temperature=1.5)),
        (2, Sampling(top_p=0.6)),
    ],
)
def test_a_whole_decode_is_exactly_distributed(
    window: int, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, realised, model = enumerated(Sjd(window=window), sampling, monkeypatch)
    assert distance(found, model, sampling) < 1e-6  # the toy's logits are float32
    assert realised == 0


def old_distributions_after_a_redraft(patch: pytest.MonkeyPatch) -> None:
    right = Window.advance

    def wrong(window: Window, accepted: int, target: Any) -> None:
        old = window.proposals[accepted + 1 :]
        right(window, accepted, target)
        window.proposals[: len(old)] = old

    patch.setattr(Window, "advance", wrong)


def new_distributions_for_old_codes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Window, "_couple", lambda window, code, q, p: code)


def copies_that_pass_for_random_codes(patch: pytest.MonkeyPatch) -> None:
    right = Window.draft

    def wrong(window: Window, committed: Any, missing: int) -> Any:
        right(window, committed, missing)
        window.proposals = [np.full(VOCABULARY, 1 / VOCABULARY) if q is None else q for q in window.proposals]
        return right(window, committed, missing)

    patch.setattr(Window, "draft", wrong)


def drafts_that_look_behind_them(patch: pytest.MonkeyPatch) -> None:
    """A window is only used if its last code is 0: a later code decides about earlier ones."""
    right = Window.draft

    def wrong(window: Window, committed: Any, missing: int) -> Any:
        tree = right(window, committed, missing)
        if window.codes and window.codes[-1] != 0:
            window.codes, window.proposals = [], []
            tree = right(window, committed, 1)
        return tree

    patch.setattr(Window, "draft", wrong)


@pytest.mark.parametrize(
    "slip",
    [
        old_distributions_after_a_redraft,
        new_distributions_for_old_codes,
        copies_that_pass_for_random_codes,
        drafts_that_look_behind_them,
    ],
)
def test_enumeration_catches_what_breaks_exactness(slip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slip(monkeypatch)
    found, _, model = enumerated(Sjd(window=2), Sampling(), monkeypatch)
    assert distance(found, model, Sampling()) > 1e-3


@pytest.mark.parametrize("window", [2, 3])
@pytest.mark.parametrize(
    "relaxation",
    [
        {"neighbors": 1, "lambda_": 2.0},
        {"neighbors": 1, "delta": 0.3},
        {"omega": 1.5, "anneal": 0.5},
        {"neighbors": 1, "lambda_": 1.5, "omega": 1.2},
    ],
)
def test_a_relaxed_decode_strays_no_further_than_it_says(
    window: int, relaxation: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, realised, model = enumerated(Sjd(window=window, **relaxation), Sampling(), monkeypatch)
    assert 1e-3 < distance(found, model, Sampling()) <= realised + 1e-6


# ---------------------------------------------------------------- greedy


@pytest.mark.parametrize("window", [1, 3, 16])
@pytest.mark.parametrize("cfg_scale", [1.0, 2.5])
def test_greedy_sjd_ends_on_the_codes_of_greedy_ar(window: int, cfg_scale: float) -> None:
    model = make_model(vocabulary=12, codes=20, round_span=4, columns=5)
    sampling, prompts = Sampling(cfg_scale=cfg_scale, temperature=0), [make_prompt(i, padding=i) for i in range(3)]

    def codes(method: MethodConfig) -> list[list[int]]:
        rngs = [np.random.default_rng(i) for i in range(3)]
        lists: list[list[int]] = [[], [], []]
        for step in decode.decode(model, prompts, rngs, sampling, method):
            for part in step.parts:
                lists[part.request] += part.codes[: part.committed].tolist()
        return lists

    assert codes(Sjd(window=window)) == codes(Ar())


class OneColour(ToyTarget):
    """Its next code is the last one, whatever came before."""

    def run(self, batch: Any, cache: Any) -> Any:
        output = super().run(batch, cache)
        if batch.tokens is not None:
            output.logits[:] = 9.0 * np.eye(self.vocabulary)[batch.tokens]
        return output


@pytest.mark.parametrize("temperature", [0, 0.1])
def test_copies_of_a_neighbour_are_accepted_whole_where_the_picture_is_of_one_colour(temperature: float) -> None:
    model = make_model(vocabulary=12, codes=29, columns=30)
    model = replace(model, target=OneColour(**vars(model.target)))
    method = Sjd(window=6)
    sampling = Sampling(temperature=temperature)
    steps = list(decode.decode(model, [make_prompt(1)], [np.random.default_rng(0)], sampling, method))
    assert [len(step.parts[0].codes) for step in steps] == [1, 7, 7, 7, 7]


# ---------------------------------------------------------------- the window


def weights(size: int) -> st.SearchStrategy[Probabilities]:
    values = st.lists(st.floats(0.0, 1.0), min_size=size, max_size=size).map(np.array)
    return values.filter(lambda w: w.sum() > 1e-3).map(lambda w: w / w.sum())


def enumerated_couple(q: Probabilities | None, code: int, p: Probabilities) -> Probabilities:
    """Distribution of the code that `code` is re-drafted to."""
    output = np.zeros_like(p)
    with pytest.MonkeyPatch.context() as patch:
        for script in Script(seed=0).runs():
            script.armed = True
            patch.setattr(jacobi, "draw", script.draw)
            window = Window(2, 2, False, script)  # type: ignore[arg-type]
            output[window._couple(code, q, p)] += script.weight
    return output


@given(weights(4), weights(4))
def test_a_coupled_redraft_is_drawn_from_p_and_stays_as_often_as_possible(q: Probabilities, p: Probabilities) -> None:
    outputs = {code: enumerated_couple(q, code, p) for code in np.flatnonzero(q).tolist()}
    marginal = sum(q[code] * output for code, output in outputs.items())
    np.testing.assert_allclose(marginal, p, atol=1e-9)
    stays = sum(q[code] * output[code] for code, output in outputs.items())
    assert stays == pytest.approx(np.minimum(p, q).sum(), abs=1e-9)


@given(weights(4), st.integers(0, 3))
def test_a_certain_code_is_redrafted_from_p_too(p: Probabilities, code: int) -> None:
    np.testing.assert_allclose(enumerated_couple(None, code, p), p, atol=1e-9)


def window_of() -> Window:
    return Window(4, 3, False, np.random.default_rng(2))


def test_new_positions_copy_the_left_neighbour_or_the_upper_one_in_the_first_column() -> None:
    """Three columns: after 0 1 2 3 4 the next position is the last of its row."""
    tree = window_of().draft([0, 1, 2, 3, 4], 20)
    assert tree.tokens.tolist() == [4, 4, 3, 3, 3], "the second starts a row and takes what is above it"
    assert window_of().draft([5], 20).tokens.tolist() == [5, 5, 5, 5, 5], "the first row has nothing above it"
    assert tree.proposals == {}
    assert tree.parents.tolist() == [-1, 0, 1, 2, 3]


def test_nothing_is_drafted_past_the_end_of_the_image() -> None:
    window = window_of()
    assert window.draft([1], 20).nodes == 5
    assert window.draft([1], 3).nodes == 3
    assert window.draft([1], 1).nodes == 1


def test_after_a_pass_the_rest_of_the_window_moves_up_and_is_redrafted() -> None:
    window, table = window_of(), np.eye(9)
    window.draft([1], 20)
    asked = []

    def target(node: int) -> Probabilities:
        asked.append(node)
        return table[node]

    window.advance(1, target)  # one draft accepted, the second refused and replaced
    assert asked == [2, 3, 4]
    assert window.codes == [2, 3, 4]
    tree = window.draft([1, 1, 7], 20)
    assert tree.tokens.tolist() == [7, 2, 3, 4, 2], "the new position starts a row and takes what is above it"
    assert [int(q.argmax()) for q in tree.proposals.values()] == [2, 3, 4]
    window.advance(4, target)
    assert window.codes == []
