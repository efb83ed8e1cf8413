"""What one acceptance step gives out: the target's choices; or relaxed, within its bound, published beyond it.

`walk` itself is enumerated, see `acceptance_steps.py`. Nothing here is sampled.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from acceptance_steps import TOLERANCE, distributions, enumerated, orders, relaxations, step_output, tvd
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lantern_rt.runtime.acceptance import Acceptance, follow
from lantern_rt.runtime.relaxation import Relaxation, walk, walk_greedy
from lantern_rt.runtime.sampling import Probabilities
from lantern_rt.runtime.tree import DraftTree

SIZE = 5


class Zeros:
    """A stream of uniform numbers that are all the smallest."""

    def random(self) -> float:
        return 0.0


@given(distributions(SIZE), distributions(SIZE), st.integers(1, SIZE))
def test_exact_acceptance_of_sampled_siblings_gives_out_p(p: Probabilities, q: Probabilities, siblings: int) -> None:
    output, realised = step_output(p, list(orders(q, siblings)), q, None)
    np.testing.assert_allclose(output, p, atol=TOLERANCE)
    assert realised == 0


@given(distributions(SIZE), st.permutations(range(SIZE)), st.integers(0, SIZE))
def test_exact_acceptance_of_fixed_siblings_gives_out_p(p: Probabilities, codes: list[int], siblings: int) -> None:
    output, _ = step_output(p, [(1.0, tuple(codes[:siblings]))], None, None)
    np.testing.assert_allclose(output, p, atol=TOLERANCE)


@given(st.data())
@settings(max_examples=60)
def test_exact_acceptance_down_a_whole_tree_gives_out_the_joint_distribution(data: st.DataObject) -> None:
    """Random trees with fixed children, every node with a distribution of its own: three codes ahead."""
    size, count = 3, data.draw(st.integers(1, 9))
    parents, tokens = [-1], [0]
    for node in range(1, count):
        parent = data.draw(st.integers(0, node - 1))
        free = [c for c in range(size) if c not in [tokens[n] for n in range(1, node) if parents[n] == parent]]
        if not free:
            break
        parents.append(parent)
        tokens.append(data.draw(st.sampled_from(free)))
    tree = DraftTree(np.array(tokens), np.array(parents))
    table = {()} | {path for n in (1, 2) for path in itertools.product(range(size), repeat=n)}
    p = {path: data.draw(distributions(size)) for path in sorted(table)}

    def after(path: tuple[int, ...]) -> Probabilities:
        return p.get(path, np.full(size, 1 / size))

    def joint(start: Probabilities, codes: tuple[int, ...]) -> NDArray[np.float64]:
        """Distribution of three codes that begin with `codes`, then follow `start`, then p."""
        out = np.zeros((size,) * 3)
        for full in itertools.product(range(size), repeat=3):
            if full[: len(codes)] == codes[:3]:
                out[full] = np.prod(
                    [(start if n == len(codes) else after(full[:n]))[full[n]] for n in range(len(codes), 3)]
                )
        return out

    found = np.zeros((size,) * 3)
    for weight, accepted in enumerated(tree, lambda n: after(tuple(tree.tokens[tree.path_to(n)[1:]].tolist())), None):
        found += weight * joint(accepted.remainder, tuple(tree.tokens[accepted.path[1:]].tolist()))
    np.testing.assert_allclose(found, joint(p[()], ()), atol=TOLERANCE)


# ---------------------------------------------------------------- relaxed acceptance


@given(distributions(SIZE), st.integers(0, SIZE - 1), relaxations(SIZE))
def test_one_fixed_candidate_moves_the_output_by_what_was_lent(p: Probabilities, x: int, rule: Relaxation) -> None:
    output, realised = step_output(p, [(1.0, (x,))], None, rule)
    lent = float(p[rule.aggregation_set(p, x)].sum())
    bound = rule.delta if rule.delta is not None else (rule.lambda_ - 1) * p[x]  # type: ignore[operator]
    assert tvd(output, p) == pytest.approx(lent, abs=TOLERANCE)
    assert realised == pytest.approx(lent, abs=TOLERANCE)
    assert lent <= bound + TOLERANCE


@given(distributions(SIZE), distributions(SIZE), relaxations(SIZE))
def test_one_sampled_candidate_moves_the_output_by_the_expected_gain_in_acceptance(
    p: Probabilities, q: Probabilities, rule: Relaxation
) -> None:
    output, realised = step_output(p, list(orders(q, 1)), q, rule)
    gain = 0.0
    for x in np.flatnonzero(q):
        lent = p[rule.aggregation_set(p, x)].sum()
        gain += q[x] * (min(1, (p[x] + lent) / q[x]) - min(1, p[x] / q[x]))
    assert tvd(output, p) == pytest.approx(gain, abs=TOLERANCE)
    assert realised == pytest.approx(gain, abs=TOLERANCE)


@given(distributions(SIZE), distributions(SIZE), relaxations(SIZE), st.integers(2, 4), st.booleans())
def test_several_candidates_move_the_output_by_no_more_than_they_realise_together(
    p: Probabilities, q: Probabilities, rule: Relaxation, siblings: int, fixed: bool
) -> None:
    if fixed:
        codes = tuple(np.argsort(-q, kind="stable")[:siblings].tolist())
        output, realised = step_output(p, [(1.0, codes)], None, rule)
    else:
        output, realised = step_output(p, list(orders(q, siblings)), q, rule)
    assert tvd(output, p) <= realised + TOLERANCE
    if rule.delta is not None and fixed:
        assert realised <= siblings * rule.delta + TOLERANCE


@given(st.data())
@settings(max_examples=40)
def test_down_a_whole_tree_the_outputs_distance_is_at_most_what_was_realised(data: st.DataObject) -> None:
    """Two levels of fixed children: the joint distribution of two codes."""
    size = 4
    rule = data.draw(relaxations(size))
    p = {code: data.draw(distributions(size)) for code in range(-1, size)}
    first = data.draw(st.permutations(range(size)))[: data.draw(st.integers(1, 3))]
    second = data.draw(st.permutations(range(size)))[: data.draw(st.integers(1, 3))]
    tokens = [0, *first, *second]
    tree = DraftTree(np.array(tokens), np.array([-1] + [0] * len(first) + [1] * len(second)))
    found, realised = np.zeros((size, size)), 0.0
    for weight, accepted in enumerated(tree, lambda n: p[-1 if n == 0 else tokens[n]], rule):
        realised += weight * accepted.realised_tvd
        codes = [tokens[n] for n in accepted.path[1:]]
        if not codes:
            found += weight * accepted.remainder[:, None] * np.stack([p[c] for c in range(size)])
        elif len(codes) == 1:
            found[codes[0]] += weight * accepted.remainder
        else:
            found[codes[0], codes[1]] += weight
    expected = p[-1][:, None] * np.stack([p[c] for c in range(size)])
    assert tvd(found, expected) <= realised + TOLERANCE


@given(distributions(SIZE), distributions(SIZE), relaxations(SIZE))
def test_one_sampled_candidate_stays_within_lambda_less_one(
    p: Probabilities, q: Probabilities, rule: Relaxation
) -> None:
    if rule.lambda_ is not None:
        output, _ = step_output(p, list(orders(q, 1)), q, rule)
        assert tvd(output, p) <= rule.lambda_ - 1 + TOLERANCE


# ---------------------------------------------------------------- annealed relaxation


@given(distributions(SIZE), distributions(SIZE), relaxations(SIZE, annealed=True))
def test_with_annealing_too_one_sampled_candidate_moves_the_output_by_the_expected_gain_in_acceptance(
    p: Probabilities, q: Probabilities, rule: Relaxation
) -> None:
    output, realised = step_output(p, list(orders(q, 1)), q, rule)
    gain = 0.0
    for x in np.flatnonzero(q):
        lent = p[rule.aggregation_set(p, x)].sum()
        gain += q[x] * (min(1, rule.omega * (p[x] + lent) / q[x]) - min(1, p[x] / q[x]))
    assert tvd(output, p) == pytest.approx(gain, abs=TOLERANCE)
    assert realised == pytest.approx(gain, abs=TOLERANCE)


@given(distributions(SIZE), distributions(SIZE), st.floats(1.0, 8.0))
def test_omega_alone_moves_a_step_by_what_is_drafted_between_p_and_omega_p_at_most_1_less_1_in_omega(
    p: Probabilities, q: Probabilities, omega: float
) -> None:
    output, _ = step_output(p, list(orders(q, 1)), q, Relaxation(omega=omega))
    assert tvd(output, p) == pytest.approx((np.minimum(q, omega * p) - np.minimum(q, p)).sum(), abs=TOLERANCE)
    assert tvd(output, p) <= 1 - 1 / omega + TOLERANCE


@given(distributions(SIZE), distributions(SIZE), distributions(SIZE), st.floats(1.0, 8.0))
def test_no_other_residual_brings_an_annealed_step_closer(
    p: Probabilities, q: Probabilities, other: Probabilities, omega: float
) -> None:
    output, _ = step_output(p, list(orders(q, 1)), q, Relaxation(omega=omega))
    accepted = np.minimum(q, omega * p)
    assert tvd(output, p) <= tvd(accepted + (1 - accepted.sum()) * other, p) + TOLERANCE


@given(distributions(SIZE), st.integers(0, SIZE - 1), relaxations(SIZE, annealed=True))
def test_with_annealing_one_fixed_candidate_moves_the_output_by_its_gain(
    p: Probabilities, x: int, rule: Relaxation
) -> None:
    output, realised = step_output(p, [(1.0, (x,))], None, rule)
    gain = min(1.0, rule.omega * (p[x] + p[rule.aggregation_set(p, x)].sum())) - p[x]
    assert tvd(output, p) == pytest.approx(gain, abs=TOLERANCE)
    assert realised == pytest.approx(gain, abs=TOLERANCE)


@given(distributions(SIZE), distributions(SIZE), relaxations(SIZE, annealed=True), st.integers(2, 4), st.booleans())
def test_with_annealing_several_candidates_move_the_output_by_no_more_than_they_realise_together(
    p: Probabilities, q: Probabilities, rule: Relaxation, siblings: int, fixed: bool
) -> None:
    codes = tuple(np.argsort(-q, kind="stable")[:siblings].tolist())
    drafts = [(1.0, codes)] if fixed else list(orders(q, siblings))
    output, realised = step_output(p, drafts, None if fixed else q, rule)
    assert tvd(output, p) <= realised + TOLERANCE


@given(distributions(SIZE), distributions(SIZE), relaxations(SIZE, annealed=True))
def test_omega_and_lambda_together_stay_within_their_product(
    p: Probabilities, q: Probabilities, rule: Relaxation
) -> None:
    if rule.lambda_ is not None:
        output, _ = step_output(p, list(orders(q, 1)), q, rule)
        assert tvd(output, p) <= 1 - 1 / (rule.omega * rule.lambda_) + TOLERANCE


def test_omega_falls_geometrically_towards_exact_acceptance() -> None:
    assert [Relaxation(omega=3.0, anneal=0.5).factor(depth) for depth in range(4)] == [3.0, 2.0, 1.5, 1.25]
    assert [Relaxation(omega=3.0, anneal=0.0).factor(depth) for depth in range(3)] == [3.0, 1.0, 1.0]
    assert Relaxation(omega=3.0).factor(7) == 3.0


def test_deeper_codes_are_accepted_with_their_own_omega() -> None:
    """p / q is a half at both codes of the chain: omega 1.8 accepts the first nine times in ten, 1.4 seven."""
    p, q = np.array([0.25, 0.75]), np.array([0.5, 0.5])
    tree = DraftTree(np.array([0, 0, 0]), np.array([-1, 0, 1]), {0: q, 1: q})
    lengths = np.zeros(3)
    for weight, accepted in enumerated(tree, lambda node: p, Relaxation(omega=1.8, anneal=0.5)):
        lengths[len(accepted.path) - 1] += weight
    np.testing.assert_allclose(lengths, [0.1, 0.9 * 0.3, 0.9 * 0.7], atol=TOLERANCE)


def test_greedy_acceptance_too_takes_a_code_that_omega_lifts_above_the_arg_max() -> None:
    p = np.array([0.5, 0.3, 0.2])
    chain = DraftTree(np.array([0, 1, 1]), np.array([-1, 0, 1]))
    assert walk_greedy(chain, lambda node: p, Relaxation(omega=1.6)).path == [0]
    lifted = walk_greedy(chain, lambda node: p, Relaxation(omega=1.8, anneal=0.5))
    assert (lifted.path, lifted.realised_tvd) == ([0, 1], 1.0), "at the second code omega is 1.4"


def test_with_sampled_candidates_delta_bounds_each_loan_but_not_the_step() -> None:
    """Two codes can be drafted and each borrows 0.2: the step moves by 0.4."""
    p, q = np.array([0.05, 0.05, 0.2, 0.2, 0.5]), np.array([0.5, 0.5, 0.0, 0.0, 0.0])
    near = np.array([[2], [3], [0], [1], [0]])
    output, realised = step_output(p, list(orders(q, 1)), q, Relaxation(near, 1, delta=0.2))
    assert tvd(output, p) == pytest.approx(realised) == pytest.approx(0.4)


def test_the_published_residual_breaks_the_bound_with_fixed_candidates() -> None:
    """Code 0 borrows 0.1 from its neighbour 1; its refusal then also wipes out code 2, which lent nothing."""
    p, near = np.array([0.1, 0.1, 0.7, 0.1]), np.array([[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]])
    ours, realised = step_output(p, [(1.0, (0,))], None, Relaxation(near, 1, delta=0.15))
    published, _ = step_output(p, [(1.0, (0,))], None, Relaxation(near, 1, delta=0.15, residual="neighborhood"))
    np.testing.assert_allclose(ours, [0.2, 0, 0.7, 0.1], atol=TOLERANCE)
    np.testing.assert_allclose(published, [0.2, 0, 0, 0.8], atol=TOLERANCE)
    assert tvd(ours, p) == pytest.approx(realised) == pytest.approx(0.1)
    assert tvd(published, p) == pytest.approx(0.8)


def test_the_published_residual_breaks_the_bound_with_sampled_candidates() -> None:
    """It leaves q's mass of neighbours in p, so codes that were drafted and refused come back."""
    p, q = np.array([0.05, 0.05, 0.4, 0.5]), np.array([0.5, 0.45, 0.05, 0.0])
    near = np.array([[1, 2, 3], [0, 2, 3], [3, 1, 0], [2, 1, 0]])
    drafts = list(orders(q, 1))
    ours, realised = step_output(p, drafts, q, Relaxation(near, 1, lambda_=2.0))
    published, claimed = step_output(p, drafts, q, Relaxation(near, 1, lambda_=2.0, residual="neighborhood"))
    assert tvd(ours, p) == pytest.approx(realised)
    assert claimed == pytest.approx(realised)
    assert tvd(published, p) > realised + 0.01


@given(distributions(SIZE), st.integers(0, SIZE - 1), relaxations(SIZE))
def test_the_aggregation_set_is_the_longest_nearest_first_run_within_the_bound(
    p: Probabilities, x: int, rule: Relaxation
) -> None:
    bound = rule.delta if rule.delta is not None else (rule.lambda_ - 1) * p[x]  # type: ignore[operator]
    expected: list[int] = []
    for neighbor in rule.neighbors[x, : rule.k].tolist():
        if sum(p[n] for n in [*expected, neighbor]) > bound:
            break
        expected.append(neighbor)
    assert rule.aggregation_set(p, x).tolist() == expected


def test_a_code_without_probability_is_refused_even_at_the_smallest_uniform_number() -> None:
    tree = DraftTree(np.array([0, 1]), np.array([-1, 0]))
    always: Any = Zeros()
    accepted = walk(tree, lambda node: np.array([1.0, 0.0]), lambda node: 0, None, lambda node: always)
    assert accepted.path == [0]


def test_only_visited_nodes_are_asked_for_their_distribution() -> None:
    tree, asked = DraftTree(np.array([0, 1, 2, 0, 0]), np.array([-1, 0, 0, 1, 2])), []

    def target(node: int) -> Probabilities:
        asked.append(node)
        return np.array([0.0, 0.0, 1.0])

    accepted = walk(tree, target, lambda node: 7, None, np.random.default_rng)
    assert (accepted.path, accepted.bonus) == ([0, 2], 2)
    assert asked == [0, 2]


def test_a_path_that_ends_on_a_leaf_is_followed_by_the_targets_choice() -> None:
    tree = DraftTree(np.array([0, 1]), np.array([-1, 0]))
    accepted = walk(tree, lambda node: np.array([0.0, 1.0]), lambda node: 10 + node, None, np.random.default_rng)
    assert (accepted.path, accepted.bonus) == ([0, 1], 11)


# ---------------------------------------------------------------- exact acceptance follows the target's choices


def test_a_walk_follows_the_choices_for_as_long_as_they_were_drafted() -> None:
    tree, asked = DraftTree(np.array([0, 5, 6, 7, 8]), np.array([-1, 0, 0, 2, 3])), []

    def choice(node: int) -> int:
        asked.append(node)
        return {0: 6, 2: 7, 3: 9}[node]

    assert follow(tree, choice) == Acceptance([0, 2, 3], 9)
    assert asked == [0, 2, 3], "only visited nodes are asked"


# ---------------------------------------------------------------- greedy


def lines(tokens: list[int], parents: list[int], leaf_order: list[int] | None = None) -> DraftTree:
    return DraftTree(np.array(tokens), np.array(parents), leaf_order=leaf_order)


def test_greedy_acceptance_follows_the_arg_max_and_gives_its_successor() -> None:
    tree = lines([0, 1, 2, 0, 1], [-1, 0, 0, 2, 2])
    table = {0: [0.1, 0.2, 0.7], 2: [0.3, 0.6, 0.1], 4: [0.5, 0.3, 0.2]}
    accepted = walk_greedy(tree, lambda node: np.array(table[node]), None)
    assert (accepted.path, accepted.bonus, accepted.realised_tvd) == ([0, 2, 4], 0, 0.0)


def test_greedy_acceptance_takes_a_code_whose_neighbours_lift_it_above_the_arg_max() -> None:
    tree, p = lines([0, 1], [-1, 0]), np.array([0.4, 0.25, 0.05, 0.3])
    near = np.array([[1, 2, 3], [3, 2, 0], [3, 1, 0], [1, 2, 0]])
    lifted = walk_greedy(tree, lambda node: p, Relaxation(near, 2, delta=0.3))
    held = walk_greedy(tree, lambda node: p, Relaxation(near, 2, delta=0.29))
    assert (lifted.path, lifted.realised_tvd) == ([0, 1], 1.0)
    assert held.path == [0]
    assert held.bonus == lifted.bonus == 0, "the bonus is never relaxed"


def test_greedy_acceptance_prefers_the_longest_path_and_then_the_first_leaf() -> None:
    near = np.array([[1, 2], [0, 2], [0, 1]])
    rule, p = Relaxation(near, 2, delta=0.9), np.array([0.34, 0.33, 0.33])
    both = lines([0, 0, 1, 0, 1], [-1, 0, 0, 1, 2])
    assert walk_greedy(both, lambda node: p, rule).path == [0, 1, 3]
    assert walk_greedy(lines([0, 0, 1, 0, 1], [-1, 0, 0, 1, 2], [4, 3]), lambda node: p, rule).path == [0, 2, 4]
    longer = lines([0, 0, 1, 1], [-1, 0, 0, 2])
    assert walk_greedy(longer, lambda node: p, rule).path == [0, 2, 3]


@given(distributions(SIZE), st.permutations(range(SIZE)), st.integers(0, SIZE))
def test_exact_greedy_acceptance_always_ends_on_arg_maxima(p: Probabilities, codes: list[int], count: int) -> None:
    tree = lines([0, *codes[:count]], [-1] + [0] * count)
    accepted = walk_greedy(tree, lambda node: p, None)
    assert [*tree.tokens[accepted.path[1:]], accepted.bonus][0] == p.argmax()
