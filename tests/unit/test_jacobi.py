"""Drafting without a drafter: whole decodes by enumeration, what breaks them, and what a window holds."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from toy_engine import ToyModel, ToyTarget, decode, joint_distribution, make_model, make_prompt, output_of, plan_of
from toy_script import Script

from lantern_rt.methods import Eagle, Lantern, LanternPlusPlus, MethodConfig, Sampling, Sjd
from lantern_rt.runtime import acceptance, tree_drafts
from lantern_rt.runtime.drafting import Commit
from lantern_rt.runtime.head_drafter import DraftHeadState
from lantern_rt.runtime.heads import DraftHeads, head_shapes
from lantern_rt.runtime.jacobi import Window
from lantern_rt.runtime.raster import RasterLayout
from lantern_rt.runtime.sampling import shape_distribution
from lantern_rt.runtime.state import ImageSequence
from lantern_rt.runtime.target import TargetOutput
from lantern_rt.runtime.tree import DraftTree, StaticTree
from lantern_rt.runtime.tree_names import parse_tree

VOCABULARY = 2
CODES = 5
HIDDEN = 6
BOTH = np.array([[1], [0]])  # the neighbour of either code
NOTHING_LENT: dict[str, Any] = {"neighbors": 1, "lambda_": 1 + 1e-12}  # relaxed by name, and so decided by rejection


def choices_by(script: Script, patch: pytest.MonkeyPatch) -> None:
    """Have the script make all random choices.

    Of two codes, Gumbel noise chooses the second where one uniform number of the position lies below its probability.
    """

    def choice(answers: TargetOutput, node: int) -> int:
        position = int(answers.cells[node])
        return int(script.below(position, float(answers.distribution(node)[1])))

    def perturb_logits(
        state: DraftHeadState, position: int, logits: NDArray[np.float32], add_noise: bool = True
    ) -> NDArray[np.float64]:
        q = shape_distribution(logits, state.sequence.sampling)
        seconds = [script.below(position, float(row[1])) if add_noise else row[1] > row[0] for row in q]
        return np.where(q > 0, np.array([[not second, second] for second in seconds], float), -np.inf)

    for name in ("choice", "choice_without_recompute"):
        patch.setattr(TargetOutput, name, choice)
    patch.setattr(DraftHeadState, "perturb_logits", perturb_logits)
    patch.setattr(TargetOutput, "decisions", lambda answers, node: script)
    patch.setattr(acceptance, "sample", script.draw)


def some_heads(codes: int, hidden_size: int) -> DraftHeads:
    """DraftHeads that learned nothing: their drafts are any. The toy's states are of the order of a million."""
    rng = np.random.default_rng(6)
    states = {"gate": 1e-6, "states": 1e-6}
    shapes = head_shapes(codes, hidden_size, 3, 2)
    return DraftHeads(**{name: rng.normal(0, states.get(name, 1), shape) for name, shape in shapes.items()})


def enumerated(
    method: MethodConfig, sampling: Sampling, patch: pytest.MonkeyPatch, heads: DraftHeads | None = None
) -> tuple[NDArray[np.float64], float, ToyModel]:
    """Distribution of all codes of a whole decode, `[vocabulary] * codes`, by taking every branch in turn.

    Also the expected realised TVD, and the model.
    """
    model = make_model(VOCABULARY, CODES, seed=4, columns=2, neighbors=BOTH)
    prompt = make_prompt(3, padding=1)
    model = replace(model, heads=heads, drafter=None)
    found = np.zeros((VOCABULARY,) * CODES)
    realised = 0.0
    total = 0.0
    for script in Script(seed=0).runs():
        script.armed = True
        choices_by(script, patch)
        codes: list[int] = []
        for step in decode(model, [prompt], [0], sampling, method):
            codes += step.parts[0].codes.tolist()
        assert step.stats is not None
        realised += script.weight * step.stats.realised_tvd
        found[tuple(codes)] += script.weight
        total += script.weight
    assert total == pytest.approx(1)
    return found, realised, model


def distance(found: NDArray[np.float64], model: ToyModel, sampling: Sampling) -> float:
    """Total variation distance from what `ar` gives."""
    return float(np.abs(found - joint_distribution(model, make_prompt(3, padding=1), sampling)).sum() / 2)


@pytest.mark.parametrize("lent", [{}, NOTHING_LENT], ids=["coupled", "by rejection"])
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
    window: int, sampling: Sampling, lent: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, realised, model = enumerated(Sjd(window=window, **lent), sampling, monkeypatch)
    assert distance(found, model, sampling) < 1e-6  # the toy's logits are float32
    assert realised < 1e-9


def old_distributions_after_a_redraft(patch: pytest.MonkeyPatch) -> None:
    right = Window.advance

    def wrong(window: Window, accepted: int, target: Any) -> None:
        old = window.proposals[accepted + 1 :]
        right(window, accepted, target)
        window.proposals[: len(old)] = old

    patch.setattr(Window, "advance", wrong)


def drafts_that_look_behind_them(patch: pytest.MonkeyPatch) -> None:
    """A window is only used if its last code is 0: a later code decides about earlier ones."""
    right = Window.draft

    def wrong(window: Window, committed: Any, missing: int, known: Any) -> Any:
        tree = right(window, committed, missing, known)
        if window.codes and window.codes[-1] != 0:
            window.codes = []
            window.proposals = []
            tree = right(window, committed, 1, known)
        return tree

    patch.setattr(Window, "draft", wrong)


def decisions_with_the_noise_of_the_draft(patch: pytest.MonkeyPatch) -> None:
    right = acceptance.walk_relaxed

    def wrong(tree: Any, target: Any, choice: Any, rule: Any, decisions: Any, missing: int) -> Any:
        answers = choice.__self__
        return right(tree, target, choice, rule, lambda node: decisions(node).at(int(answers.cells[node])), missing)

    patch.setattr(tree_drafts, "walk_relaxed", wrong)


@pytest.mark.parametrize(
    "slip", [old_distributions_after_a_redraft, drafts_that_look_behind_them, decisions_with_the_noise_of_the_draft]
)
def test_enumeration_catches_what_breaks_exactness(slip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slip(monkeypatch)
    found, _, model = enumerated(Sjd(window=2, **NOTHING_LENT), Sampling(), monkeypatch)
    assert distance(found, model, Sampling()) > 1e-3


@pytest.mark.parametrize("window", [2, 3])
@pytest.mark.parametrize("relaxation", [{"neighbors": 1, "lambda_": 2.0}, {"neighbors": 1, "delta": 0.3}])
def test_a_relaxed_decode_strays_no_further_than_it_says(
    window: int, relaxation: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, realised, model = enumerated(Sjd(window=window, **relaxation), Sampling(), monkeypatch)
    assert 1e-3 < distance(found, model, Sampling()) <= realised + 1e-6


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
    steps = list(decode(model, [make_prompt(1)], [0], sampling, method))
    assert [len(step.parts[0].codes) for step in steps] == [1, 7, 7, 7, 7]


# ---------------------------------------------------------------- the window


def window_of() -> Window:
    return Window(4, RasterLayout(30, 3), proposing=True)


def test_new_positions_copy_the_left_neighbour_or_the_upper_one_in_the_first_column() -> None:
    """Three columns: after 0 1 2 3 4 the next position is the last of its row."""
    tree = window_of().draft([0, 1, 2, 3, 4], 20)
    assert tree.tokens.tolist() == [4, 4, 3, 3, 3], "the second starts a row and takes what is above it"
    assert window_of().draft([5], 20).tokens.tolist() == [5, 5, 5, 5, 5], "the first row has nothing above it"
    assert [tree.proposal(node) for node in range(4)] == [None] * 4
    assert tree.parents.tolist() == [-1, 0, 1, 2, 3]


def test_nothing_is_drafted_past_the_end_of_the_image() -> None:
    window = window_of()
    assert window.draft([1], 20).nodes == 5
    assert window.draft([1], 3).nodes == 3
    assert window.draft([1], 1).nodes == 1


def test_after_a_pass_the_rest_of_the_window_moves_up_and_is_redrafted() -> None:
    window = window_of()  # after node n comes n
    logits = 40 * np.eye(9, dtype=np.float32)[None]
    window.draft([1], 20)
    chain = parse_tree("chain-4")
    assert isinstance(chain, StaticTree)
    structure = DraftTree(np.zeros(5, np.int64), chain.parents).structure
    target = output_of(logits, structure, range(1, 6))
    window.advance(1, target)  # one draft accepted, the second refused and replaced
    assert window.codes == [2, 3, 4]
    tree = window.draft([1, 1, 7], 20)
    assert tree.tokens.tolist() == [7, 2, 3, 4, 2], "the new position starts a row and takes what is above it"
    proposals = [tree.proposal(node) for node in range(4)]
    assert [None if q is None else int(q.argmax()) for q in proposals] == [2, 3, 4, None]
    window.advance(4, target)
    assert window.codes == []


# ---------------------------------------------------------------- with heads

NOTHING: dict[str, Any] = {"neighbors": 1, "lambda_": 1 + 1e-12}


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(cfg_scale=2.0, temperature=0.7), Sampling(top_p=0.6)])
@pytest.mark.parametrize(
    "method",
    [
        Sjd(window=2),
        Sjd(window=3, **NOTHING),
        Eagle(tree="tree-2-10", drafter="heads"),
        LanternPlusPlus(tree="chain-2", drafter="heads", **NOTHING),
        LanternPlusPlus(tree="tree-2-10", drafter="heads", **NOTHING),
        Lantern(tree="dynamic-4-2-2", drafter="heads", neighbors=1, delta=1e-12),
    ],
    ids=str,
)
def test_drafts_by_heads_are_decided_exactly(
    method: MethodConfig, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, realised, model = enumerated(method, sampling, monkeypatch, some_heads(VOCABULARY, HIDDEN))
    assert distance(found, model, sampling) < 1e-6
    assert realised < 1e-9


@pytest.mark.parametrize("method", [partial(Sjd, window=2), partial(LanternPlusPlus, drafter="heads")], ids=str)
def test_a_relaxed_decode_with_heads_strays_no_further_than_it_says(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, realised, model = enumerated(
        method(neighbors=1, lambda_=2.0), Sampling(), monkeypatch, some_heads(VOCABULARY, HIDDEN)
    )
    assert 1e-3 < distance(found, model, Sampling()) <= realised + 1e-6


def test_heads_correct_drafts_behind_a_new_code_and_guess_new_ones_by_what_stands_around() -> None:
    """Heads that put after a new code its successor; guesses are two behind the code before and the state above."""
    codes = 12
    one = np.eye(12)
    states = np.zeros((2, codes, codes))
    states[0] = one  # of the code above, whose state is one-hot
    after, later = (50 * np.roll(one, shift, 1) for shift in (1, 2))
    heads = DraftHeads(one, 0 * one, np.full(codes, 9.0), after, one, states, later, 0 * one[0])
    request = ImageSequence(0, plan_of(RasterLayout(20, 3), Sampling(temperature=0), Sjd(window=4)), make_prompt(1), 0)
    request.codes += [1, 2, 3, 4, 5, 10]
    draft = DraftTree(np.array([4, 5, 9, 6, 0]), np.arange(5) - 1)  # the first draft was accepted, the second replaced
    logits = 30 * one[None, [5, 10, 3, 7, 8]]
    target = output_of(logits, draft.structure, range(3, 8))
    hidden = np.zeros((1, 5, codes))
    hidden[0, :2] = one[[3, 11]]
    state = DraftHeadState(request, heads)
    state.update(Commit(request, np.array([5, 10]), [np.array([0, 1])], slice(0, 1), hidden, target, draft))
    assert state.draft().tokens.tolist() == [10, 11, 0, 8, 10], "after 10, after 11, as the pass said after 0, a guess"
    assert np.flatnonzero(heads.predict(np.array([7]), 4, state.context)[0] > 9).tolist() == [5, 9]


def test_heads_look_up_within_a_grid_and_not_from_the_second_grid_into_the_first() -> None:
    """A grid of 2 x 2, then one of 2 x 3."""
    raster = RasterLayout(10, 3, first_grid=(2, 2))
    assert [raster.code_above(cell) for cell in range(10)] == [-2, -1, 0, 1, -1, -1, -1, 4, 5, 6]
    heads = some_heads(VOCABULARY, HIDDEN)
    plan = plan_of(raster, Sampling(), Sjd(window=4))
    rng = np.random.default_rng(0)
    state = DraftHeadState(ImageSequence(0, plan, make_prompt(1), 0), heads)
    state.context[:] = rng.standard_normal(state.context.shape)
    previous = np.array([1])
    alone = heads.predict(previous, -1, state.context)
    assert np.array_equal(state.logits(6, previous), alone)
    assert np.array_equal(state.logits(9, previous), heads.predict(previous, 6, state.context))
    assert not np.allclose(state.logits(9, previous), alone)
