"""Distribution of the tokens that an acceptance step commits, computed by enumerating all random choices.

Exact acceptance keeps the target's distribution. The total variation distance (TVD) of relaxed acceptance has a bound,
except with the residual of the published LANTERN code.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from acceptance_steps import (
    EXACT_RULE,
    MANY_TOKENS,
    TOLERANCE,
    compute_step_distribution,
    compute_tvd,
    enumerate_ordered_samples,
    enumerate_outcomes,
    generate_distributions,
    generate_relaxation_settings,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lantern_rt.runtime.acceptance import (
    Acceptance,
    RelaxationSettings,
    verify_tree_exact,
    verify_tree_greedy,
    verify_tree_relaxed,
)
from lantern_rt.runtime.sampling import Probabilities, make_invalid_logits_error
from lantern_rt.runtime.tree import DraftTree

VOCABULARY = 5  # number of tokens


@given(generate_distributions(VOCABULARY), generate_distributions(VOCABULARY), st.integers(1, VOCABULARY))
def test_exact_acceptance_of_sampled_siblings_keeps_the_target(
    p: Probabilities, q: Probabilities, siblings: int
) -> None:
    output, realised = compute_step_distribution(p, list(enumerate_ordered_samples(q, siblings)), q, EXACT_RULE)
    np.testing.assert_allclose(output, p, atol=TOLERANCE)
    assert realised == 0


@given(generate_distributions(VOCABULARY), st.permutations(range(VOCABULARY)), st.integers(0, VOCABULARY))
def test_exact_acceptance_of_fixed_siblings_keeps_the_target(p: Probabilities, codes: list[int], siblings: int) -> None:
    output, _ = compute_step_distribution(p, [(1.0, tuple(codes[:siblings]))], None, EXACT_RULE)
    np.testing.assert_allclose(output, p, atol=TOLERANCE)


@given(st.data())
@settings(max_examples=60)
def test_exact_acceptance_in_a_tree_keeps_the_joint_target(data: st.DataObject) -> None:
    """Check the joint distribution of three tokens, for random trees with a different distribution at each node."""
    size = 3
    count = data.draw(st.integers(1, 9))
    parents = [-1]
    tokens = [0]
    for node in range(1, count):
        parent = data.draw(st.integers(0, node - 1))
        used_codes = [tokens[n] for n in range(1, node) if parents[n] == parent]
        unused_codes = [code for code in range(size) if code not in used_codes]
        if not unused_codes:
            break
        parents.append(parent)
        tokens.append(data.draw(st.sampled_from(unused_codes)))
    tree = DraftTree(np.array(tokens), np.array(parents))
    paths = {()} | {path for n in (1, 2) for path in itertools.product(range(size), repeat=n)}
    p = {path: data.draw(generate_distributions(size)) for path in sorted(paths)}

    def compute_next_distribution(path: tuple[int, ...]) -> Probabilities:
        return p.get(path, np.full(size, 1 / size))

    def compute_joint(start: Probabilities, codes: tuple[int, ...]) -> NDArray[np.float64]:
        """Return the joint distribution of three tokens, `[size, size, size]`."""
        distribution = np.zeros((size,) * 3)
        for full in itertools.product(range(size), repeat=3):
            if full[: len(codes)] == codes[:3]:
                distribution[full] = np.prod(
                    [
                        (start if n == len(codes) else compute_next_distribution(full[:n]))[full[n]]
                        for n in range(len(codes), 3)
                    ]
                )
        return distribution

    output = np.zeros((size,) * 3)
    for weight, accepted in enumerate_outcomes(
        tree, lambda n: compute_next_distribution(tuple(tree.tokens[tree.path_to(n)[1:]].tolist())), EXACT_RULE
    ):
        output += weight * compute_joint(accepted.bonus_distribution, tuple(tree.tokens[accepted.path[1:]].tolist()))
    np.testing.assert_allclose(output, compute_joint(p[()], ()), atol=TOLERANCE)


# ---------------------------------------------------------------- relaxed acceptance


@given(generate_distributions(VOCABULARY), st.integers(0, VOCABULARY - 1), generate_relaxation_settings(VOCABULARY))
def test_the_tvd_of_a_fixed_draft_is_the_borrowed_probability(
    p: Probabilities, x: int, rule: RelaxationSettings
) -> None:
    output, realised = compute_step_distribution(p, [(1.0, (x,))], None, rule)
    borrowed = float(p[rule.find_aggregation_set(p, x)].sum())
    bound = rule.delta if rule.delta is not None else (rule.lambda_ - 1) * p[x]  # type: ignore[operator]
    assert compute_tvd(output, p) == pytest.approx(borrowed, abs=TOLERANCE)
    assert realised == pytest.approx(borrowed, abs=TOLERANCE)
    assert borrowed <= bound + TOLERANCE


@given(generate_distributions(VOCABULARY), generate_distributions(VOCABULARY), generate_relaxation_settings(VOCABULARY))
def test_the_tvd_of_a_sampled_draft_is_the_expected_gain(
    p: Probabilities, q: Probabilities, rule: RelaxationSettings
) -> None:
    output, realised = compute_step_distribution(p, list(enumerate_ordered_samples(q, 1)), q, rule)
    gain = 0.0
    for x in np.flatnonzero(q):
        borrowed = p[rule.find_aggregation_set(p, x)].sum()
        gain += q[x] * (min(1, (p[x] + borrowed) / q[x]) - min(1, p[x] / q[x]))
    assert compute_tvd(output, p) == pytest.approx(gain, abs=TOLERANCE)
    assert realised == pytest.approx(gain, abs=TOLERANCE)


# ---------------------------------------------------------------- exact acceptance follows the target's choices


def test_drafts_are_accepted_as_long_as_the_target_chooses_them() -> None:
    tree = DraftTree(np.array([0, 5, 6, 7, 8]), np.array([-1, 0, 0, 2, 3]))
    visited_nodes = []

    def choose_token(node: int) -> int:
        visited_nodes.append(node)
        return {0: 6, 2: 7, 3: 9}[node]

    assert verify_tree_exact(tree, choose_token, MANY_TOKENS) == Acceptance([0, 2, 3], 9)
    assert visited_nodes == [0, 2, 3], "the target chose at a node that was not accepted"


def test_a_rejected_impossible_candidate_uses_a_random_number() -> None:
    p = np.array([0.0, 0.0, 1.0])
    q = np.array([0.0, 0.0, 1.0])
    uniforms = iter([0.0, 0.5])
    stream: Any = SimpleNamespace(random=lambda: next(uniforms))
    tree = DraftTree(np.array([0, 1, 2]), np.array([-1, 0, 0]), lambda node: q)
    accepted = verify_tree_relaxed(tree, lambda node: p, lambda node: 0, EXACT_RULE, lambda node: stream, MANY_TOKENS)
    assert (accepted.path, accepted.bonus_token, [*uniforms]) == ([0, 2], 0, [])


@pytest.mark.parametrize(("remaining", "bonus"), [(1, None), (2, None), (3, None), (4, 0)])
def test_drafts_past_the_end_of_the_image_are_not_accepted(remaining: int, bonus: int | None) -> None:
    """Draft a chain of three tokens, all of which relaxed acceptance would accept in a longer image."""
    chain = make_tree([0, 1, 1, 1], [-1, 0, 1, 2])
    p = np.array([0.4, 0.3, 0.3])
    rule = RelaxationSettings(np.array([[2], [2], [0]]), 1, delta=0.35)
    path = [0, 1, 2, 3][: remaining + 1]
    stream: Any = SimpleNamespace(random=lambda: 0.5)
    by_rejection = verify_tree_relaxed(chain, lambda node: p, lambda node: 0, rule, lambda node: stream, remaining)
    greedy = verify_tree_greedy(chain, lambda node: p, rule, remaining)
    assert by_rejection.realised_tvd == pytest.approx(0.3 * (len(path) - 1))
    assert greedy.realised_tvd == len(path) - 1
    for accepted in (by_rejection, greedy):
        assert (accepted.path, accepted.bonus_token, accepted.relaxed_nodes) == (path, bonus, path[1:])
    assert verify_tree_exact(chain, lambda node: 1 if node < 3 else 0, remaining) == Acceptance(path, bonus)


# ---------------------------------------------------------------- greedy


def make_tree(tokens: list[int], parents: list[int], leaf_order: list[int] | None = None) -> DraftTree:
    return DraftTree(np.array(tokens), np.array(parents), leaf_order=leaf_order)


def test_greedy_acceptance_follows_the_arg_max() -> None:
    tree = make_tree([0, 1, 2, 0, 1], [-1, 0, 0, 2, 2])
    distributions_by_node = {0: [0.1, 0.2, 0.7], 2: [0.3, 0.6, 0.1], 4: [0.5, 0.3, 0.2]}
    accepted = verify_tree_greedy(tree, lambda node: np.array(distributions_by_node[node]), EXACT_RULE, MANY_TOKENS)
    assert (accepted.path, accepted.bonus_token, accepted.realised_tvd) == ([0, 2, 4], 0, 0.0)


def test_greedy_acceptance_accepts_a_more_probable_neighbourhood() -> None:
    tree = make_tree([0, 1], [-1, 0])
    p = np.array([0.4, 0.25, 0.05, 0.3])
    neighbors = np.array([[1, 2, 3], [3, 2, 0], [3, 1, 0], [1, 2, 0]])
    wider = verify_tree_greedy(tree, lambda node: p, RelaxationSettings(neighbors, 2, delta=0.3), MANY_TOKENS)
    narrower = verify_tree_greedy(tree, lambda node: p, RelaxationSettings(neighbors, 2, delta=0.29), MANY_TOKENS)
    assert (wider.path, wider.realised_tvd) == ([0, 1], 1.0)
    assert narrower.path == [0]
    assert narrower.bonus_token == wider.bonus_token == 0, "the bonus token is never relaxed"


def test_greedy_acceptance_prefers_the_longest_then_first_path() -> None:
    neighbors = np.array([[1, 2], [0, 2], [0, 1]])
    rule = RelaxationSettings(neighbors, 2, delta=0.9)
    p = np.array([0.34, 0.33, 0.33])
    equal_paths = make_tree([0, 0, 1, 0, 1], [-1, 0, 0, 1, 2])
    assert verify_tree_greedy(equal_paths, lambda node: p, rule, MANY_TOKENS).path == [0, 1, 3]
    assert verify_tree_greedy(
        make_tree([0, 0, 1, 0, 1], [-1, 0, 0, 1, 2], [4, 3]), lambda node: p, rule, MANY_TOKENS
    ).path == [0, 2, 4]
    longer = make_tree([0, 0, 1, 1], [-1, 0, 0, 2])
    assert verify_tree_greedy(longer, lambda node: p, rule, MANY_TOKENS).path == [0, 2, 3]


def test_greedy_acceptance_ignores_nan_on_shorter_paths() -> None:
    tree = make_tree([0, 0, 1, 2, 1], [-1, 0, 0, 1, 2])
    rule = RelaxationSettings(np.array([[1], [0], [0]]), 1, delta=0.9)

    def compute_distribution(node: int) -> Probabilities:
        if node == 1:
            raise make_invalid_logits_error()
        return np.array([0.4, 0.5, 0.1])

    assert verify_tree_greedy(tree, compute_distribution, rule, MANY_TOKENS).path == [0, 2, 4]


@given(generate_distributions(VOCABULARY), st.permutations(range(VOCABULARY)), st.integers(0, VOCABULARY))
def test_exact_greedy_acceptance_always_commits_the_arg_max(p: Probabilities, codes: list[int], count: int) -> None:
    tree = make_tree([0, *codes[:count]], [-1] + [0] * count)
    accepted = verify_tree_greedy(tree, lambda node: p, EXACT_RULE, MANY_TOKENS)
    assert [*tree.tokens[accepted.path[1:]], accepted.bonus_token][0] == p.argmax()


# ---------------------------------------------------------------- bounds for a candidate, a token and a step

SMALL_VOCABULARY = 4  # number of tokens


def compute_tvd_bound(rule: RelaxationSettings, candidates: int = 1, tokens: int = 1, sampled: bool = False) -> float:
    """Return the upper bound of the TVD between a step's output and the target's distribution; 1 means no bound."""
    if rule.delta is None:
        return 1 - rule.lambda_**-tokens
    return 1.0 if sampled else 1 - (1 - rule.delta) ** (candidates * tokens)


@given(
    generate_distributions(SMALL_VOCABULARY),
    generate_distributions(SMALL_VOCABULARY),
    generate_relaxation_settings(SMALL_VOCABULARY),
    st.booleans(),
)
def test_the_tvd_of_one_draft_token_is_within_the_bound(
    p: Probabilities, q: Probabilities, rule: RelaxationSettings, sampled: bool
) -> None:
    drafts = list(enumerate_ordered_samples(q, 1)) if sampled else [(1.0, (int(q.argmax()),))]
    output, realised = compute_step_distribution(p, drafts, q if sampled else None, rule)
    assert compute_tvd(output, p) <= compute_tvd_bound(rule, sampled=sampled) + TOLERANCE
    assert realised <= compute_tvd_bound(rule, sampled=sampled) + TOLERANCE


@given(
    generate_distributions(SMALL_VOCABULARY),
    generate_distributions(SMALL_VOCABULARY),
    generate_relaxation_settings(SMALL_VOCABULARY),
    st.integers(1, 4),
    st.booleans(),
)
@settings(max_examples=120)
def test_the_tvd_of_sibling_draft_tokens_is_within_the_bound(
    p: Probabilities, q: Probabilities, rule: RelaxationSettings, siblings: int, sampled: bool
) -> None:
    fixed = tuple(np.argsort(-q, kind="stable")[:siblings].tolist())
    drafts = list(enumerate_ordered_samples(q, siblings)) if sampled else [(1.0, fixed)]
    output, realised = compute_step_distribution(p, drafts, q if sampled else None, rule)
    assert compute_tvd(output, p) <= realised + TOLERANCE
    assert realised <= compute_tvd_bound(rule, siblings, sampled=sampled) + TOLERANCE


def compute_joint_step_distribution(
    tree: DraftTree, p: dict[int, Probabilities], rule: RelaxationSettings | None
) -> tuple[NDArray[np.float64], float]:
    """Return the exact joint distribution of two committed tokens, and the expected TVD that the step reports."""
    output = np.zeros((len(p) - 1,) * 2)
    realised = 0.0
    for weight, accepted in enumerate_outcomes(tree, lambda n: p[-1 if n == 0 else int(tree.tokens[n])], rule):
        realised += weight * accepted.realised_tvd
        codes = [int(tree.tokens[n]) for n in accepted.path[1:]]
        if not codes:
            output += weight * accepted.bonus_distribution[:, None] * np.stack([p[c] for c in range(len(output))])
        elif len(codes) == 1:
            output[codes[0]] += weight * accepted.bonus_distribution
        else:
            output[codes[0], codes[1]] += weight
    return output, realised


def compute_joint_target_distribution(p: dict[int, Probabilities]) -> NDArray[np.float64]:
    return p[-1][:, None] * np.stack([p[c] for c in range(len(p) - 1)])


@given(st.data())
@settings(max_examples=60)
def test_the_tvd_of_two_relaxed_acceptances_is_within_the_bound(data: st.DataObject) -> None:
    rule = data.draw(generate_relaxation_settings(SMALL_VOCABULARY))
    p = {code: data.draw(generate_distributions(SMALL_VOCABULARY)) for code in range(-1, SMALL_VOCABULARY)}
    candidates = data.draw(st.integers(1, 2))
    first, second = (data.draw(st.permutations(range(SMALL_VOCABULARY)))[:candidates] for _ in range(2))
    tree = DraftTree(np.array([0, *first, *second]), np.array([-1] + [0] * candidates + [1] * candidates))
    output, realised = compute_joint_step_distribution(tree, p, rule)
    assert (
        compute_tvd(output, compute_joint_target_distribution(p))
        <= min(realised, compute_tvd_bound(rule, candidates, 2)) + TOLERANCE
    )
    assert realised <= 2 * compute_tvd_bound(rule, candidates) + TOLERANCE


@given(st.data())
@settings(max_examples=30)
def test_the_tvd_of_two_sampled_tokens_is_within_the_bound(data: st.DataObject) -> None:
    size = 3
    neighbors = np.array([[1, 2], [2, 0], [0, 1]])
    rule = RelaxationSettings(neighbors, 2, lambda_=data.draw(st.floats(1.01, 6.0)))
    p = {code: data.draw(generate_distributions(size)) for code in range(-1, size)}
    q = {code: data.draw(generate_distributions(size)) for code in range(-1, size)}
    output = np.zeros((size, size))
    for x, y in itertools.product(range(size), repeat=2):
        if q[-1][x] and q[x][y]:
            chain = DraftTree(np.array([0, x, y]), np.array([-1, 0, 1]), {0: q[-1], 1: q[x]}.get)
            output += q[-1][x] * q[x][y] * compute_joint_step_distribution(chain, p, rule)[0]
    assert compute_tvd(output, compute_joint_target_distribution(p)) <= compute_tvd_bound(rule, tokens=2) + TOLERANCE


# ---------------------------------------------------------------- the bounds are reached


def test_two_relaxed_siblings_can_have_a_tvd_above_delta() -> None:
    """Check two candidates of probability 0: each borrows a quarter of the remaining probability from a neighbour."""
    p = np.array([0.0, 0.0, 0.25, 0.1875, 0.5625])
    neighbors = np.array([[2], [3], [0], [1], [0]])
    rule = RelaxationSettings(neighbors, 1, delta=0.25)
    one_sibling, _ = compute_step_distribution(p, [(1.0, (0,))], None, rule)
    two_siblings, realised = compute_step_distribution(p, [(1.0, (0, 1))], None, rule)
    assert compute_tvd(one_sibling, p) == pytest.approx(0.25)
    assert compute_tvd(two_siblings, p) == pytest.approx(realised) == pytest.approx(0.4375)
    assert compute_tvd_bound(rule, 2) == pytest.approx(0.4375)


def test_one_sampled_draft_can_have_more_tvd_than_two_fixed_ones() -> None:
    p = np.array([0.0, 0.0, 0.25, 0.25, 0.25, 0.25])
    q = np.array([0.5, 0.5, 0, 0, 0, 0])
    rule = RelaxationSettings(np.array([[2], [3], [0], [1], [0], [1]]), 1, delta=0.25)
    output, _ = compute_step_distribution(p, list(enumerate_ordered_samples(q, 1)), q, rule)
    assert compute_tvd(output, p) == pytest.approx(0.5)
    assert compute_tvd_bound(rule, sampled=True) == 1.0


def test_the_published_residual_can_far_exceed_delta() -> None:
    """Check that the residual removes nearly all probability of a token that is no neighbour of the candidate."""
    p = np.array([0.01, 0.04, 0.9, 0.05])
    neighbors = np.array([[1, 2], [0, 2], [0, 1], [0, 1]])
    output, _ = compute_step_distribution(
        p, [(1.0, (0,))], None, RelaxationSettings(neighbors, 1, delta=0.05, residual="neighborhood")
    )
    assert compute_tvd(output, p) > 0.85
