"""Drafting without a drafter model: speculative Jacobi decoding and draft heads, checked by enumerating all images."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from toy_distributions import compute_joint_distribution
from toy_engine import (
    ToyModel,
    ToyTarget,
    collect_codes,
    decode,
    make_model,
    make_plan,
    make_prompt,
    make_target_output,
)
from toy_script import Script

from lantern_rt.methods import (
    Autoregressive,
    Eagle,
    Lantern,
    LanternPlusPlus,
    MethodConfig,
    Sampling,
    SpeculativeJacobi,
)
from lantern_rt.runtime import acceptance, tree_drafts
from lantern_rt.runtime.drafting import CommittedTokens
from lantern_rt.runtime.head_drafter import DraftHeadState
from lantern_rt.runtime.heads import DraftHeads, draft_head_shapes
from lantern_rt.runtime.jacobi import JacobiWindow
from lantern_rt.runtime.noise import Noise
from lantern_rt.runtime.raster import RasterLayout, TwoGridLayout
from lantern_rt.runtime.sampler import Sampler
from lantern_rt.runtime.state import ImageSequence
from lantern_rt.runtime.target import TargetOutput
from lantern_rt.runtime.tree import DraftTree, StaticTreeShape
from lantern_rt.runtime.tree_names import parse_tree
from lantern_rt.runtime.windows import NODE_COST, AdaptiveWindow

VOCABULARY = 2
CODES = 5
HIDDEN_SIZE = 6
NEIGHBORS = np.array([[1], [0]])  # each of the two tokens is the neighbour of the other token
# Relaxed acceptance that borrows no probability: rejection sampling, which is exact.
BY_REJECTION: dict[str, Any] = {"neighbors": 1, "lambda_": 1 + 1e-12}


def patch_choices(script: Script, patch: pytest.MonkeyPatch) -> None:
    """Replace all random choices by choices of the script: the second of two tokens, if a number is below its p."""

    def choose_token(target: TargetOutput, node: int) -> int:
        position = int(target.next_code_indices[node])
        return int(script.choose_below(position, float(target.distribution(node)[1])))

    def score(sampler: Sampler, logits: NDArray[np.float32], code_index: int, noise: Noise | None) -> NDArray[Any]:
        q = sampler.compute_distribution(logits)
        chooses_second = [script.choose_below(code_index, float(row[1])) if noise else row[1] > row[0] for row in q]
        return np.where(q > 0, np.array([[not is_second, is_second] for is_second in chooses_second], float), -np.inf)

    for name in ("choose_token", "choose_token_without_recompute"):
        patch.setattr(TargetOutput, name, choose_token)
    patch.setattr(Sampler, "score", score)
    patch.setattr(TargetOutput, "acceptance_rng", lambda target, node: script)
    patch.setattr(acceptance, "sample_code", script.sample_code)


def make_random_heads(codes: int, hidden_size: int) -> DraftHeads:
    rng = np.random.default_rng(6)
    scales = {"gate": 1e-6, "states": 1e-6}  # hidden states of the toy model have values of about 10^6
    shapes = draft_head_shapes(codes, hidden_size, 3, 2)
    return DraftHeads(**{name: rng.normal(0, scales.get(name, 1), shape) for name, shape in shapes.items()})


def enumerate_images(
    method: MethodConfig, sampling: Sampling, patch: pytest.MonkeyPatch, heads: DraftHeads | None = None
) -> tuple[NDArray[np.float64], float, ToyModel]:
    """Return the probability of every image, the expected TVD that decoding reports, and the toy model."""
    model = make_model(VOCABULARY, CODES, seed=4, columns=2, neighbors=NEIGHBORS)
    prompt = make_prompt(3, padding=1)
    model = replace(model, heads=heads, drafter=None)
    distribution = np.zeros((VOCABULARY,) * CODES)
    realised_tvd = 0.0
    total_weight = 0.0
    for script in Script(seed=0).follow_all_plans():
        script.follows_plan = True
        patch_choices(script, patch)
        codes: list[int] = []
        for step in decode(model, [prompt], [0], sampling, method):
            codes += step.parts[0].codes.tolist()
        assert step.stats is not None
        realised_tvd += script.weight * step.stats.realised_tvd
        distribution[tuple(codes)] += script.weight
        total_weight += script.weight
    assert total_weight == pytest.approx(1)
    return distribution, realised_tvd, model


def compute_distance(distribution: NDArray[np.float64], model: ToyModel, sampling: Sampling) -> float:
    expected = compute_joint_distribution(model, make_prompt(3, padding=1), sampling)
    return float(np.abs(distribution - expected).sum() / 2)


@pytest.mark.parametrize("relaxation", [{}, BY_REJECTION], ids=["coupled", "by rejection"])
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
def test_jacobi_images_have_exactly_the_targets_distribution(
    window: int, sampling: Sampling, relaxation: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    method = SpeculativeJacobi(window=window, **relaxation)
    images, realised_tvd, model = enumerate_images(method, sampling, monkeypatch)
    assert compute_distance(images, model, sampling) < 1e-6  # the toy's logits are float32
    assert realised_tvd < 1e-9


def keep_distributions_after_a_redraft(patch: pytest.MonkeyPatch) -> None:
    """Replace `redraft`, to keep the distributions from which the replaced draft tokens were sampled."""
    redraft = JacobiWindow.redraft

    def redraft_with_old_proposals(window: JacobiWindow, accepted: int, target: Any) -> None:
        old_proposals = window.proposals[accepted + 1 :]
        redraft(window, accepted, target)
        window.proposals[: len(old_proposals)] = old_proposals

    patch.setattr(JacobiWindow, "redraft", redraft_with_old_proposals)


def discard_drafts_by_a_later_token(patch: pytest.MonkeyPatch) -> None:
    """Replace `draft`, to discard windows whose last token is not 0: a later token then affects earlier tokens."""
    draft = JacobiWindow.draft

    def draft_by_last_token(window: JacobiWindow, committed: Any, remaining: int, known_tokens: Any) -> Any:
        tree = draft(window, committed, remaining, known_tokens)
        if window.codes and window.codes[-1] != 0:
            window.codes = []
            window.proposals = []
            tree = draft(window, committed, 1, known_tokens)
        return tree

    patch.setattr(JacobiWindow, "draft", draft_by_last_token)


def decide_with_the_noise_of_the_draft(patch: pytest.MonkeyPatch) -> None:
    """Replace acceptance, to reuse the uniform numbers that sampled the draft tokens."""
    verify = acceptance.verify_tree_relaxed

    def verify_with_draft_noise(
        tree: Any, target: Any, choose_token: Any, rule: Any, decisions: Any, remaining: int
    ) -> Any:
        output = choose_token.__self__

        def reuse_noise(node: int) -> Any:
            return decisions(node).open_stream(int(output.next_code_indices[node]))

        return verify(tree, target, choose_token, rule, reuse_noise, remaining)

    patch.setattr(tree_drafts, "verify_tree_relaxed", verify_with_draft_noise)


@pytest.mark.parametrize(
    "fault", [keep_distributions_after_a_redraft, discard_drafts_by_a_later_token, decide_with_the_noise_of_the_draft]
)
def test_enumeration_detects_faults_that_break_exactness(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    images, _, model = enumerate_images(SpeculativeJacobi(window=2, **BY_REJECTION), Sampling(), monkeypatch)
    assert compute_distance(images, model, Sampling()) > 1e-3


@pytest.mark.parametrize("window", [2, 3])
@pytest.mark.parametrize("relaxation", [{"neighbors": 1, "lambda_": 2.0}, {"neighbors": 1, "delta": 0.3}])
def test_the_tvd_of_relaxed_images_is_within_the_realised_tvd(
    window: int, relaxation: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    method = SpeculativeJacobi(window=window, **relaxation)
    images, realised_tvd, model = enumerate_images(method, Sampling(), monkeypatch)
    assert 1e-3 < compute_distance(images, model, Sampling()) <= realised_tvd + 1e-6


class RepeatingTarget(ToyTarget):
    def run(self, batch: Any, cache: Any) -> Any:
        output = super().run(batch, cache)
        if batch.tokens is not None:
            output.logits[:] = 9.0 * np.eye(self.vocabulary)[batch.tokens]
        return output


@pytest.mark.parametrize("temperature", [0, 0.1])
def test_all_drafts_of_a_target_that_repeats_are_accepted(temperature: float) -> None:
    model = make_model(vocabulary=12, codes=29, columns=30)
    model = replace(model, target=RepeatingTarget(**vars(model.target)))
    method = SpeculativeJacobi(window=6)
    sampling = Sampling(temperature=temperature)
    steps = list(decode(model, [make_prompt(1)], [0], sampling, method))
    assert [len(step.parts[0].codes) for step in steps] == [1, 7, 7, 7, 7]


# ---------------------------------------------------------------- the window


def make_window() -> JacobiWindow:
    return JacobiWindow(4, RasterLayout(30, 3), stores_proposals=True)


def test_new_drafts_copy_the_token_on_the_left_or_above() -> None:
    """Check a grid of three columns: the token after 0 1 2 3 4 is the last token of the second row."""
    tree = make_window().draft([0, 1, 2, 3, 4], 20)
    assert tree.tokens.tolist() == [4, 4, 3, 3, 3], "the second draft starts a row and copies the token above"
    assert make_window().draft([5], 20).tokens.tolist() == [5, 5, 5, 5, 5], "the first row has no tokens above"
    assert [tree.proposal(node) for node in range(4)] == [None] * 4
    assert tree.parents.tolist() == [-1, 0, 1, 2, 3]


def test_no_token_is_drafted_past_the_end_of_the_image() -> None:
    window = make_window()
    assert window.draft([1], 20).num_nodes == 5
    assert window.draft([1], 3).num_nodes == 3
    assert window.draft([1], 1).num_nodes == 1


def test_a_jacobi_window_drafts_no_token_from_nan() -> None:
    window = make_window()
    logits = 40 * np.eye(9, dtype=np.float32)[None]
    logits[0, 3:] = np.nan
    tree = window.draft([1], 20)
    window.redraft(0, make_target_output(logits, tree.tree_structure, range(1, 6)))
    assert (window.codes, len(window.proposals)) == ([1, 2], 2)
    assert window.draft([1, 8], 20).tokens.tolist() == [8, 1, 2, 2, 2], "copies follow"


def test_positions_left_in_the_window_get_new_drafts() -> None:
    window = make_window()
    logits = 40 * np.eye(9, dtype=np.float32)[None]  # the token after node n is n
    window.draft([1], 20)
    chain = parse_tree("chain-4")
    assert isinstance(chain, StaticTreeShape)
    tree_structure = DraftTree(np.zeros(5, np.int64), chain.parents).tree_structure
    target = make_target_output(logits, tree_structure, range(1, 6))
    window.redraft(1, target)  # accepts the first draft token and replaces the second
    assert window.codes == [2, 3, 4]
    tree = window.draft([1, 1, 7], 20)
    assert tree.tokens.tolist() == [7, 2, 3, 4, 2], "the new draft starts a row and copies the token above"
    proposals = [tree.proposal(node) for node in range(4)]
    assert [None if q is None else int(q.argmax()) for q in proposals] == [2, 3, 4, None]
    window.redraft(4, target)
    assert window.codes == []


# ---------------------------------------------------------------- draft heads


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(cfg_scale=2.0, temperature=0.7), Sampling(top_p=0.6)])
@pytest.mark.parametrize(
    "method",
    [
        SpeculativeJacobi(window=2),
        SpeculativeJacobi(window=3, **BY_REJECTION),
        Eagle(tree="tree-2-10", drafter="heads"),
        LanternPlusPlus(tree="chain-2", drafter="heads", **BY_REJECTION),
        LanternPlusPlus(tree="tree-2-10", drafter="heads", **BY_REJECTION),
        Lantern(tree="dynamic-4-2-2", drafter="heads", neighbors=1, delta=1e-12),
    ],
    ids=str,
)
def test_images_of_draft_heads_have_the_targets_distribution(
    method: MethodConfig, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = make_random_heads(VOCABULARY, HIDDEN_SIZE)
    images, realised_tvd, model = enumerate_images(method, sampling, monkeypatch, heads)
    assert compute_distance(images, model, sampling) < 1e-6
    assert realised_tvd < 1e-9


@pytest.mark.parametrize(
    "method", [partial(SpeculativeJacobi, window=2), partial(LanternPlusPlus, drafter="heads")], ids=str
)
def test_relaxed_images_of_heads_are_within_the_realised_tvd(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = make_random_heads(VOCABULARY, HIDDEN_SIZE)
    relaxed = method(neighbors=1, lambda_=2.0)
    images, realised_tvd, model = enumerate_images(relaxed, Sampling(), monkeypatch, heads)
    assert 1e-3 < compute_distance(images, model, Sampling()) <= realised_tvd + 1e-6


def test_draft_heads_correct_drafts_after_a_new_token() -> None:
    """Use simple heads: after a new token n, the prediction is n + 1; at new positions, the prediction is n + 2."""
    codes = 12
    identity = np.eye(12)
    states = np.zeros((2, codes, codes))
    states[0] = identity  # the hidden state of the token above is one-hot
    after, later = (50 * np.roll(identity, shift, 1) for shift in (1, 2))
    heads = DraftHeads(identity, 0 * identity, np.full(codes, 9.0), after, identity, states, later, 0 * identity[0])
    plan = make_plan(RasterLayout(20, 3), Sampling(temperature=0), SpeculativeJacobi(window=4))
    sequence = ImageSequence(0, plan, make_prompt(1), 0)
    sequence.codes += [1, 2, 3, 4, 5, 10]
    # The first draft token is accepted, and the second draft token is replaced.
    draft = DraftTree(np.array([4, 5, 9, 6, 0]), np.arange(5) - 1)
    logits = 30 * identity[None, [5, 10, 3, 7, 8]]
    target = make_target_output(logits, draft.tree_structure, range(3, 8))
    hidden = np.zeros((1, 5, codes))
    hidden[0, :2] = identity[[3, 11]]
    state = DraftHeadState(sequence, heads)
    state.update(CommittedTokens(sequence, np.array([5, 10]), [np.array([0, 1])], slice(0, 1), hidden, target, draft))
    # Expected: the token 10, the successors of 10 and 11, the target's token, and the draft of a new position.
    assert state.draft(None).tokens.tolist() == [10, 11, 0, 8, 10]
    assert np.flatnonzero(heads.predict_logits(np.array([7]), 4, state.context)[0] > 9).tolist() == [5, 9]


def test_draft_heads_use_the_token_above_in_the_same_grid_only() -> None:
    """Check an image that consists of a grid of 2 x 2 cells and a grid of 2 x 3 cells."""
    raster = TwoGridLayout(10, 3, first_grid=(2, 2))
    assert [raster.find_code_index_above(cell) for cell in range(10)] == [-2, -1, 0, 1, -1, -1, -1, 4, 5, 6]
    heads = make_random_heads(VOCABULARY, HIDDEN_SIZE)
    plan = make_plan(raster, Sampling(), SpeculativeJacobi(window=4))
    rng = np.random.default_rng(0)
    state = DraftHeadState(ImageSequence(0, plan, make_prompt(1), 0), heads)
    state.context[:] = rng.standard_normal(state.context.shape)
    previous = np.array([1])
    without_token_above = heads.predict_logits(previous, -1, state.context)
    assert np.array_equal(state.compute_logits(6, previous), without_token_above)
    assert np.array_equal(state.compute_logits(9, previous), heads.predict_logits(previous, 6, state.context))
    assert not np.allclose(state.compute_logits(9, previous), without_token_above)


def test_always_rejected_drafts_cost_at_most_ten_percent() -> None:
    window = AdaptiveWindow(31)
    cost = 0.0  # total cost, where a pass of method ar costs 1
    for _ in range(256):
        cost += 1 + NODE_COST * (window.choose_size(1) - 1)  # a pass of ar has two nodes, too
        window.record(window.choose_size(1), 0)
    assert window.choose_size(1) == 1
    assert cost < 1.1 * 256


def test_a_window_grows_when_drafts_are_accepted() -> None:
    window = AdaptiveWindow(7)
    for _ in range(64):
        window.record(window.choose_size(1), 0)
    sizes = []
    for _ in range(64):
        sizes.append(window.choose_size(1))
        window.record(window.choose_size(1), window.choose_size(1))
    assert list(dict.fromkeys(sizes)) == [1, 3, 7]


def test_a_few_rejected_drafts_do_not_change_the_window() -> None:
    window = AdaptiveWindow(7)
    for accepted in (3, 0, 0, 0, 0, 4, 0, 2, 0, 0, 0, 3):
        assert window.choose_size(1) == 7
        window.record(7, accepted)


@pytest.mark.parametrize(("images", "size"), [(1, 15), (2, 7), (3, 3), (4, 3), (5, 2), (8, 2), (9, 1), (64, 1)])
def test_the_window_shrinks_with_the_images_of_a_pass(images: int, size: int) -> None:
    assert AdaptiveWindow(15).choose_size(images) == size


@pytest.mark.parametrize("images", [1, 3, 6, 10])
def test_adaptive_windows_limit_nodes_and_keep_the_tokens(images: int) -> None:
    model = make_model(5, 25, past_length_multiple=4)
    request = ([make_prompt(i) for i in range(images)], range(images), Sampling())
    codes = collect_codes(decode(model, *request, SpeculativeJacobi(window=12), adaptive_window=True), images)
    assert isinstance(model.target, ToyTarget)
    prefill, *passes = model.target.passes
    assert prefill[0] == images
    max_nodes = {1: 13, 3: 4, 6: 3, 10: 2}[images]
    assert all(nodes <= max_nodes for rows, nodes in passes if rows == images)
    undrafted = decode(make_model(5, 25, past_length_multiple=4), *request, Autoregressive())
    assert codes == collect_codes(undrafted, images)
