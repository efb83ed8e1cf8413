"""Acceptance as the published code does it: all 440 recorded cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from acceptance_steps import EXACT, MANY
from numpy.typing import NDArray

from lantern_rt.methods import Sampling
from lantern_rt.runtime.acceptance import Acceptance, Relaxation, walk_greedy, walk_relaxed
from lantern_rt.runtime.sampling import Probabilities, shape_distribution
from lantern_rt.runtime.tree import DraftTree, StaticTree

DATA = Path(__file__).parent.parent / "data"
GOLDEN = dict(np.load(DATA / "lantern-accept" / "golden.npz"))
CASES = json.loads((DATA / "lantern-accept" / "cases.json").read_text(encoding="utf-8"))
STATIC = json.loads((DATA / "lantern-drafter-llamagen" / "static_trees.json").read_text(encoding="utf-8"))


class Recorded:
    """The recorded uniform numbers, and one that was not recorded, for what is drawn where none was accepted."""

    def __init__(self, numbers: list[float]) -> None:
        self.left = [*numbers, 0.5]

    def random(self) -> float:
        return self.left.pop(0)


def recorded_tree(case: dict[str, Any]) -> tuple[DraftTree, NDArray[np.float32], list[list[int]]]:
    """The case's filled tree, its node logits and its leaf paths."""
    if case["tree"] == "dynamic":
        name = f"dyn{case['tree_index']}"
        leaves = [[n for n in row if n >= 0] for row in GOLDEN[f"{name}_retrieve_indices"].tolist()]
        order = [path[-1] for path in leaves]
        tree = DraftTree(GOLDEN[f"{name}_tokens"], GOLDEN[f"{name}_parents"], leaf_order=order)
        return tree, GOLDEN[f"{name}_node_logits"], leaves
    name = f"static{case['tree_index']}_{case['mode']}"
    published = STATIC[case["tree"].removeprefix("static:")]
    shape = StaticTree(tuple(map(tuple, published["paths"])))
    leaves = [[n for n in row if n >= 0] for row in published["verify"]["retrieve_indices"]]
    proposals: dict[int, Probabilities] = {}
    if case["mode"] == "sample":
        inner = np.unique(shape.parents[1:]).tolist()
        drawn_from = GOLDEN[f"{name}_draft_q"].astype(np.float64)
        proposals = dict(zip(inner, drawn_from, strict=True))
    tree = DraftTree(GOLDEN[f"{name}_tree_tokens"], shape.parents, proposals.get, [path[-1] for path in leaves])
    return tree, GOLDEN[f"{name}_node_logits"], leaves


def relaxation_of(case: dict[str, Any], residual: str = "neighborhood") -> Relaxation:
    if not case["lantern"]:
        return EXACT
    bound = case["lantern_delta"]
    neighbors = np.load(DATA / "lantern-accept" / "top_127_indices.npy")
    delta, lambda_ = (bound, None) if bound <= 1 else (None, bound)
    return Relaxation(neighbors, case["lantern_k"], delta, lambda_, residual)  # type: ignore[arg-type]


def replay(case: dict[str, Any], residual: str = "neighborhood") -> tuple[Acceptance, DraftTree, list[list[int]], int]:
    """Run the case; also its tree, its leaf paths and how many recorded numbers were left over."""
    tree, logits, leaves = recorded_tree(case)
    sampling = Sampling(
        temperature=case["temperature"], top_k=case["top_k"], top_p=case["top_p"], filter_order="top-p, top-k"
    )

    def target(node: int) -> Probabilities:
        return shape_distribution(logits[node], sampling)

    relaxation = relaxation_of(case, residual)
    if case["mode"] == "greedy":
        return walk_greedy(tree, target, relaxation, MANY), tree, leaves, 0
    numbers: Any = Recorded(case["uniforms"])
    accepted = walk_relaxed(tree, target, lambda node: 0, relaxation, lambda node: numbers, MANY)
    ended_on_a_leaf = not tree.structure.children[accepted.path[-1]]
    return accepted, tree, leaves, len(numbers.left) - ended_on_a_leaf


def label(number: int) -> str:
    case = CASES[number]
    rule = f"k{case['lantern_k']}-{case['lantern_delta']}" if case["lantern"] else "exact"
    return f"{number}-{case['tree']}-{case['mode']}-{rule}"


@pytest.mark.parametrize("number", range(len(CASES)), ids=label)
def test_the_published_rule_is_reproduced(number: int) -> None:
    case = CASES[number]
    accepted, tree, leaves, left_over = replay(case)
    assert tree.tokens[accepted.path].tolist() == case["accepted_tokens"]
    assert len(accepted.path) - 1 == case["accept_length"]
    assert left_over == 0, "every recorded number is used"
    best = leaves[case["best_candidate"]]
    assert accepted.path == best[: len(accepted.path)]
    expected = GOLDEN["sample_p"][case["sample_p_row"]]
    if case["mode"] == "greedy":
        assert accepted.bonus == expected.argmax()
    else:
        np.testing.assert_allclose(accepted.remainder, expected, atol=1e-5)


def test_there_are_440_recorded_cases() -> None:
    assert len(CASES) == 440


def test_our_own_residual_differs_from_the_published_one_where_neighbours_lent_and_the_code_was_refused() -> None:
    paths = 0
    remainders = 0
    for case in CASES:
        if case["mode"] == "greedy" or not case["lantern"]:
            continue
        published = replay(case)[0]
        case = {**case, "uniforms": case["uniforms"] + [0.5] * 100}  # another path may need more numbers
        ours = replay(case, "aggregated")[0]
        paths += ours.path != published.path
        remainders += ours.path == published.path and not np.allclose(ours.remainder, published.remainder, atol=1e-3)
    assert paths > 0
    assert remainders > 50


def test_both_residuals_are_the_same_for_exact_and_for_greedy_acceptance() -> None:
    for case in CASES:
        if case["mode"] == "greedy" or not case["lantern"]:
            ours = replay(case, "aggregated")[0]
            published = replay(case)[0]
            assert ours.path == published.path
            np.testing.assert_array_equal(ours.remainder, published.remainder)
