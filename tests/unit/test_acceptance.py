"""What one acceptance step gives out: the target's choices; or relaxed, within its bound, published beyond it.

`walk_relaxed` itself is enumerated, see `acceptance_steps.py`. Nothing here is sampled.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from acceptance_steps import EXACT, MANY, TOLERANCE, distributions, enumerated, orders, relaxations, step_output, tvd
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lantern_rt.runtime.acceptance import Acceptance, Relaxation, walk_exact, walk_greedy, walk_relaxed
from lantern_rt.runtime.sampling import Probabilities
from lantern_rt.runtime.tree import DraftTree

SIZE = 5


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
    size = 3
    count = data.draw(st.integers(1, 9))
    parents = [-1]
    tokens = [0]
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


# ---------------------------------------------------------------- exact acceptance follows the target's choices


def test_a_walk_follows_the_choices_for_as_long_as_they_were_drafted() -> None:
    tree = DraftTree(np.array([0, 5, 6, 7, 8]), np.array([-1, 0, 0, 2, 3]))
    asked = []

    def choice(node: int) -> int:
        asked.append(node)
        return {0: 6, 2: 7, 3: 9}[node]

    assert walk_exact(tree, choice, MANY) == Acceptance([0, 2, 3], 9)
    assert asked == [0, 2, 3], "only visited nodes are asked"


def test_a_candidate_that_cannot_have_been_drawn_is_passed_over_but_uses_its_number() -> None:
    p = np.array([0.0, 0.0, 1.0])
    q = np.array([0.0, 0.0, 1.0])
    numbers = iter([0.0, 0.5])
    stream: Any = SimpleNamespace(random=lambda: next(numbers))
    tree = DraftTree(np.array([0, 1, 2]), np.array([-1, 0, 0]), lambda node: q)
    accepted = walk_relaxed(tree, lambda node: p, lambda node: 0, EXACT, lambda node: stream, MANY)
    assert (accepted.path, accepted.bonus, [*numbers]) == ([0, 2], 0, [])


@pytest.mark.parametrize(("missing", "bonus"), [(1, None), (2, None), (3, None), (4, 0)])
def test_what_lies_past_the_pictures_end_is_neither_accepted_nor_counted(missing: int, bonus: int | None) -> None:
    """A chain of three drafts that are all accepted, by relaxation alone, where there is room."""
    chain = lines([0, 1, 1, 1], [-1, 0, 1, 2])
    p = np.array([0.4, 0.3, 0.3])
    rule = Relaxation(np.array([[2], [2], [0]]), 1, delta=0.35)
    path = [0, 1, 2, 3][: missing + 1]
    stream: Any = SimpleNamespace(random=lambda: 0.5)
    walked = walk_relaxed(chain, lambda node: p, lambda node: 0, rule, lambda node: stream, missing)
    greedy = walk_greedy(chain, lambda node: p, rule, missing)
    assert walked.realised_tvd == pytest.approx(0.3 * (len(path) - 1))
    assert greedy.realised_tvd == len(path) - 1
    for accepted in (walked, greedy):
        assert (accepted.path, accepted.bonus, accepted.relaxed) == (path, bonus, path[1:])
    assert walk_exact(chain, lambda node: 1 if node < 3 else 0, missing) == Acceptance(path, bonus)


# ---------------------------------------------------------------- greedy


def lines(tokens: list[int], parents: list[int], leaf_order: list[int] | None = None) -> DraftTree:
    return DraftTree(np.array(tokens), np.array(parents), leaf_order=leaf_order)


def test_greedy_acceptance_follows_the_arg_max_and_gives_its_successor() -> None:
    tree = lines([0, 1, 2, 0, 1], [-1, 0, 0, 2, 2])
    table = {0: [0.1, 0.2, 0.7], 2: [0.3, 0.6, 0.1], 4: [0.5, 0.3, 0.2]}
    accepted = walk_greedy(tree, lambda node: np.array(table[node]), EXACT, MANY)
    assert (accepted.path, accepted.bonus, accepted.realised_tvd) == ([0, 2, 4], 0, 0.0)


def test_greedy_acceptance_takes_a_code_whose_neighbours_lift_it_above_the_arg_max() -> None:
    tree = lines([0, 1], [-1, 0])
    p = np.array([0.4, 0.25, 0.05, 0.3])
    near = np.array([[1, 2, 3], [3, 2, 0], [3, 1, 0], [1, 2, 0]])
    lifted = walk_greedy(tree, lambda node: p, Relaxation(near, 2, delta=0.3), MANY)
    held = walk_greedy(tree, lambda node: p, Relaxation(near, 2, delta=0.29), MANY)
    assert (lifted.path, lifted.realised_tvd) == ([0, 1], 1.0)
    assert held.path == [0]
    assert held.bonus == lifted.bonus == 0, "the bonus is never relaxed"


def test_greedy_acceptance_prefers_the_longest_path_and_then_the_first_leaf() -> None:
    near = np.array([[1, 2], [0, 2], [0, 1]])
    rule = Relaxation(near, 2, delta=0.9)
    p = np.array([0.34, 0.33, 0.33])
    both = lines([0, 0, 1, 0, 1], [-1, 0, 0, 1, 2])
    assert walk_greedy(both, lambda node: p, rule, MANY).path == [0, 1, 3]
    assert walk_greedy(lines([0, 0, 1, 0, 1], [-1, 0, 0, 1, 2], [4, 3]), lambda node: p, rule, MANY).path == [0, 2, 4]
    longer = lines([0, 0, 1, 1], [-1, 0, 0, 2])
    assert walk_greedy(longer, lambda node: p, rule, MANY).path == [0, 2, 3]


@given(distributions(SIZE), st.permutations(range(SIZE)), st.integers(0, SIZE))
def test_exact_greedy_acceptance_always_ends_on_arg_maxima(p: Probabilities, codes: list[int], count: int) -> None:
    tree = lines([0, *codes[:count]], [-1] + [0] * count)
    accepted = walk_greedy(tree, lambda node: p, EXACT, MANY)
    assert [*tree.tokens[accepted.path[1:]], accepted.bonus][0] == p.argmax()


# ---------------------------------------------------------------- bounds for a candidate, a code and a step

FEW = 4


def bound(rule: Relaxation, k: int = 1, d: int = 1, drawn: bool = False) -> float:
    """Of the distance of a step that relaxes `d` codes, each with `k` candidates; 1 where nothing is bounded."""
    if rule.delta is None:
        return 1 - rule.lambda_**-d
    return 1.0 if drawn else 1 - (1 - rule.delta) ** (k * d)


@given(distributions(FEW), distributions(FEW), relaxations(FEW), st.booleans())
def test_a_candidate_moves_its_code_by_no_more_than_its_bound(
    p: Probabilities, q: Probabilities, rule: Relaxation, drawn: bool
) -> None:
    drafts = list(orders(q, 1)) if drawn else [(1.0, (int(q.argmax()),))]
    output, realised = step_output(p, drafts, q if drawn else None, rule)
    assert tvd(output, p) <= bound(rule, drawn=drawn) + TOLERANCE
    assert realised <= bound(rule, drawn=drawn) + TOLERANCE


@given(distributions(FEW), distributions(FEW), relaxations(FEW), st.integers(1, 4), st.booleans())
@settings(max_examples=120)
def test_a_code_with_several_candidates_moves_by_no_more_than_its_bound(
    p: Probabilities, q: Probabilities, rule: Relaxation, siblings: int, drawn: bool
) -> None:
    fixed = tuple(np.argsort(-q, kind="stable")[:siblings].tolist())
    drafts = list(orders(q, siblings)) if drawn else [(1.0, fixed)]
    output, realised = step_output(p, drafts, q if drawn else None, rule)
    assert tvd(output, p) <= realised + TOLERANCE
    assert realised <= bound(rule, siblings, drawn=drawn) + TOLERANCE


def joint(tree: DraftTree, p: dict[int, Probabilities], rule: Relaxation | None) -> tuple[NDArray[np.float64], float]:
    """Distribution of the two codes after a step over a tree of depth two, and its realised TVD.

    p: of the second code by the first, and of the first at -1.
    """
    found = np.zeros((len(p) - 1,) * 2)
    realised = 0.0
    for weight, accepted in enumerated(tree, lambda n: p[-1 if n == 0 else int(tree.tokens[n])], rule):
        realised += weight * accepted.realised_tvd
        codes = [int(tree.tokens[n]) for n in accepted.path[1:]]
        if not codes:
            found += weight * accepted.remainder[:, None] * np.stack([p[c] for c in range(len(found))])
        elif len(codes) == 1:
            found[codes[0]] += weight * accepted.remainder
        else:
            found[codes[0], codes[1]] += weight
    return found, realised


def of_the_model(p: dict[int, Probabilities]) -> NDArray[np.float64]:
    return p[-1][:, None] * np.stack([p[c] for c in range(len(p) - 1)])


@given(st.data())
@settings(max_examples=60)
def test_a_step_that_relaxes_two_codes_moves_by_no_more_than_its_bound(data: st.DataObject) -> None:
    rule = data.draw(relaxations(FEW))
    p = {code: data.draw(distributions(FEW)) for code in range(-1, FEW)}
    k = data.draw(st.integers(1, 2))
    first, second = (data.draw(st.permutations(range(FEW)))[:k] for _ in range(2))
    tree = DraftTree(np.array([0, *first, *second]), np.array([-1] + [0] * k + [1] * k))
    found, realised = joint(tree, p, rule)
    assert tvd(found, of_the_model(p)) <= min(realised, bound(rule, k, 2)) + TOLERANCE
    assert realised <= 2 * bound(rule, k) + TOLERANCE


@given(st.data())
@settings(max_examples=30)
def test_a_step_of_two_drawn_codes_moves_by_no_more_than_its_bound(data: st.DataObject) -> None:
    size = 3
    near = np.array([[1, 2], [2, 0], [0, 1]])
    rule = Relaxation(near, 2, lambda_=data.draw(st.floats(1.01, 6.0)))
    p = {code: data.draw(distributions(size)) for code in range(-1, size)}
    q = {code: data.draw(distributions(size)) for code in range(-1, size)}
    found = np.zeros((size, size))
    for x, y in itertools.product(range(size), repeat=2):
        if q[-1][x] and q[x][y]:
            chain = DraftTree(np.array([0, x, y]), np.array([-1, 0, 1]), {0: q[-1], 1: q[x]}.get)
            found += q[-1][x] * q[x][y] * joint(chain, p, rule)[0]
    assert tvd(found, of_the_model(p)) <= bound(rule, d=2) + TOLERANCE


# ---------------------------------------------------------------- the bounds are reached


def test_two_siblings_under_delta_a_quarter_move_a_code_further_than_delta() -> None:
    """Each candidate has no probability and borrows a quarter of what is left, from a neighbour of its own."""
    p = np.array([0.0, 0.0, 0.25, 0.1875, 0.5625])
    near = np.array([[2], [3], [0], [1], [0]])
    rule = Relaxation(near, 1, delta=0.25)
    one, _ = step_output(p, [(1.0, (0,))], None, rule)
    two, realised = step_output(p, [(1.0, (0, 1))], None, rule)
    assert tvd(one, p) == pytest.approx(0.25)
    assert tvd(two, p) == pytest.approx(realised) == pytest.approx(0.4375)
    assert bound(rule, 2) == pytest.approx(0.4375)


def test_two_drawn_candidates_under_delta_move_a_code_by_more_than_two_fixed_ones_may() -> None:
    p = np.array([0.0, 0.0, 0.25, 0.25, 0.25, 0.25])
    q = np.array([0.5, 0.5, 0, 0, 0, 0])
    rule = Relaxation(np.array([[2], [3], [0], [1], [0], [1]]), 1, delta=0.25)
    output, _ = step_output(p, list(orders(q, 1)), q, rule)
    assert tvd(output, p) == pytest.approx(0.5)
    assert bound(rule, drawn=True) == 1.0


def test_the_published_residual_has_no_bound() -> None:
    """Two certain candidates under delta 0.05 may take nearly everything from a code that lent nothing."""
    p = np.array([0.01, 0.04, 0.9, 0.05])
    near = np.array([[1, 2], [0, 2], [0, 1], [0, 1]])
    output, _ = step_output(p, [(1.0, (0,))], None, Relaxation(near, 1, delta=0.05, residual="neighborhood"))
    assert tvd(output, p) > 0.85
