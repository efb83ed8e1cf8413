"""The bounds of relaxed acceptance for a candidate, a code and a step, against enumerated distances."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from acceptance_steps import TOLERANCE, distributions, enumerated, orders, relaxations, step_output, tvd
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lantern_rt.runtime.acceptance import Relaxation
from lantern_rt.runtime.sampling import Probabilities
from lantern_rt.runtime.tree import DraftTree

SIZE = 4


def bound(rule: Relaxation, k: int = 1, d: int = 1, drawn: bool = False) -> float:
    """Of the distance of a step that relaxes `d` codes, each with `k` candidates; 1 where nothing is bounded."""
    if rule.delta is None:
        return 1 - rule.lambda_**-d
    return 1.0 if drawn else 1 - (1 - rule.delta) ** (k * d)


@given(distributions(SIZE), distributions(SIZE), relaxations(SIZE), st.booleans())
def test_a_candidate_moves_its_code_by_no_more_than_its_bound(
    p: Probabilities, q: Probabilities, rule: Relaxation, drawn: bool
) -> None:
    drafts = list(orders(q, 1)) if drawn else [(1.0, (int(q.argmax()),))]
    output, realised = step_output(p, drafts, q if drawn else None, rule)
    assert tvd(output, p) <= bound(rule, drawn=drawn) + TOLERANCE
    assert realised <= bound(rule, drawn=drawn) + TOLERANCE


@given(distributions(SIZE), distributions(SIZE), relaxations(SIZE), st.integers(1, 4), st.booleans())
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
    found, realised = np.zeros((len(p) - 1,) * 2), 0.0
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
    rule = data.draw(relaxations(SIZE))
    p = {code: data.draw(distributions(SIZE)) for code in range(-1, SIZE)}
    k = data.draw(st.integers(1, 2))
    first, second = (data.draw(st.permutations(range(SIZE)))[:k] for _ in range(2))
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
            chain = DraftTree(np.array([0, x, y]), np.array([-1, 0, 1]), {0: q[-1], 1: q[x]})
            found += q[-1][x] * q[x][y] * joint(chain, p, rule)[0]
    assert tvd(found, of_the_model(p)) <= bound(rule, d=2) + TOLERANCE


# ---------------------------------------------------------------- the bounds are reached


def test_two_siblings_under_delta_a_quarter_move_a_code_further_than_delta() -> None:
    """Each candidate has no probability and borrows a quarter of what is left, from a neighbour of its own."""
    p, near = np.array([0.0, 0.0, 0.25, 0.1875, 0.5625]), np.array([[2], [3], [0], [1], [0]])
    rule = Relaxation(near, 1, delta=0.25)
    one, _ = step_output(p, [(1.0, (0,))], None, rule)
    two, realised = step_output(p, [(1.0, (0, 1))], None, rule)
    assert tvd(one, p) == pytest.approx(0.25)
    assert tvd(two, p) == pytest.approx(realised) == pytest.approx(0.4375)
    assert bound(rule, 2) == pytest.approx(0.4375)


def test_two_drawn_candidates_under_delta_move_a_code_by_more_than_two_fixed_ones_may() -> None:
    p, q = np.array([0.0, 0.0, 0.25, 0.25, 0.25, 0.25]), np.array([0.5, 0.5, 0, 0, 0, 0])
    rule = Relaxation(np.array([[2], [3], [0], [1], [0], [1]]), 1, delta=0.25)
    output, _ = step_output(p, list(orders(q, 1)), q, rule)
    assert tvd(output, p) == pytest.approx(0.5)
    assert bound(rule, drawn=True) == 1.0


def test_the_published_residual_has_no_bound() -> None:
    """Two certain candidates under delta 0.05 may take nearly everything from a code that lent nothing."""
    p, near = np.array([0.01, 0.04, 0.9, 0.05]), np.array([[1, 2], [0, 2], [0, 1], [0, 1]])
    output, _ = step_output(p, [(1.0, (0,))], None, Relaxation(near, 1, delta=0.05, residual="neighborhood"))
    assert tvd(output, p) > 0.85
