"""What one acceptance step gives out: the target's choices; or relaxed, within its bound, published beyond it.

`walk` itself is enumerated, see `acceptance_steps.py`. Nothing here is sampled.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from acceptance_steps import EXACT, TOLERANCE, distributions, enumerated, orders, relaxations, step_output, tvd
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lantern_rt.runtime.acceptance import Acceptance, Relaxation, follow, walk_greedy
from lantern_rt.runtime.sampling import Probabilities
from lantern_rt.runtime.tree import DraftTree

SIZE = 5


class Zeros:
    """A stream of uniform numbers that are all the smallest."""

    def random(self) -> float:
        return 0.0


@given(distributions(SIZE), distributions(SIZE), st.integers(1, SIZE))
def test_exact_acceptance_of_sampled_siblings_gives_out_p(p: Probabilities, q: Probabilities, siblings: int) -> None:
    output, realised = step_output(p, list(orders(q, siblings)), q, EXACT)
    np.testing.assert_allclose(output, p, atol=TOLERANCE)
    assert realised == 0


@given(distributions(SIZE), st.permutations(range(SIZE)), st.integers(0, SIZE))
def test_exact_acceptance_of_fixed_siblings_gives_out_p(p: Probabilities, codes: list[int], siblings: int) -> None:
    output, _ = step_output(p, [(1.0, tuple(codes[:siblings]))], None, EXACT)
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
    for weight, accepted in enumerated(tree, lambda n: after(tuple(tree.tokens[tree.path_to(n)[1:]].tolist())), EXACT):
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
    accepted = walk_greedy(tree, lambda node: np.array(table[node]), EXACT)
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
    accepted = walk_greedy(tree, lambda node: p, EXACT)
    assert [*tree.tokens[accepted.path[1:]], accepted.bonus][0] == p.argmax()
