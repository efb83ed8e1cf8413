"""Acceptance of draft trees, compared with 440 acceptance steps recorded with the published LANTERN code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from acceptance_steps import EXACT_RULE, MANY_TOKENS
from guided_logits import make_sampler
from numpy.typing import NDArray

from lantern_rt.methods import Sampling
from lantern_rt.runtime.acceptance import Acceptance, RelaxationSettings, verify_tree_greedy, verify_tree_relaxed
from lantern_rt.runtime.sampling import Probabilities
from lantern_rt.runtime.tree import DraftTree, StaticTreeShape

DATA = Path(__file__).parent.parent / "data"
GOLDEN = dict(np.load(DATA / "lantern-accept" / "golden.npz"))
CASES = json.loads((DATA / "lantern-accept" / "cases.json").read_text(encoding="utf-8"))
STATIC_TREES = json.loads((DATA / "lantern-drafter-llamagen" / "static_trees.json").read_text(encoding="utf-8"))


class RecordedStream:
    """A random stream that returns the recorded numbers, and then 0.5: no number was recorded for the bonus token."""

    def __init__(self, numbers: list[float]) -> None:
        self.remaining = [*numbers, 0.5]

    def random(self) -> float:
        return self.remaining.pop(0)


def read_recorded_tree(case: dict[str, Any]) -> tuple[DraftTree, NDArray[np.float32], list[list[int]]]:
    """Return the draft tree of a recorded step, the logits `[nodes, vocabulary]`, and the paths to the leaves."""
    if case["tree"] == "dynamic":
        name = f"dyn{case['tree_index']}"
        leaves = [[n for n in row if n >= 0] for row in GOLDEN[f"{name}_retrieve_indices"].tolist()]
        leaf_order = [path[-1] for path in leaves]
        tree = DraftTree(GOLDEN[f"{name}_tokens"], GOLDEN[f"{name}_parents"], leaf_order=leaf_order)
        return tree, GOLDEN[f"{name}_node_logits"], leaves
    name = f"static{case['tree_index']}_{case['mode']}"
    published = STATIC_TREES[case["tree"].removeprefix("static:")]
    static_tree = StaticTreeShape(tuple(map(tuple, published["paths"])))
    leaves = [[n for n in row if n >= 0] for row in published["verify"]["retrieve_indices"]]
    proposals: dict[int, Probabilities] = {}
    if case["mode"] == "sample":
        inner_nodes = np.unique(static_tree.parents[1:]).tolist()
        draft_distributions = GOLDEN[f"{name}_draft_q"].astype(np.float64)
        proposals = dict(zip(inner_nodes, draft_distributions, strict=True))
    tree = DraftTree(GOLDEN[f"{name}_tree_tokens"], static_tree.parents, proposals.get, [path[-1] for path in leaves])
    return tree, GOLDEN[f"{name}_node_logits"], leaves


def make_relaxation(case: dict[str, Any], residual: str = "neighborhood") -> RelaxationSettings:
    if not case["lantern"]:
        return EXACT_RULE
    bound = case["lantern_delta"]
    neighbors = np.load(DATA / "lantern-accept" / "top_127_indices.npy")
    delta, lambda_ = (bound, None) if bound <= 1 else (None, bound)  # LANTERN has delta < 1, LANTERN++ lambda > 1
    return RelaxationSettings(neighbors, case["lantern_k"], delta, lambda_, residual)  # type: ignore[arg-type]


def run_recorded_step(
    case: dict[str, Any], residual: str = "neighborhood"
) -> tuple[Acceptance, DraftTree, list[list[int]], int]:
    """Return the acceptance, draft tree, paths to the leaves, and number of recorded uniforms that were not used."""
    tree, logits, leaves = read_recorded_tree(case)
    filters = {name: case[name] for name in ("temperature", "top_k", "top_p")}
    sampling = Sampling(**filters, filter_order="top-p, top-k")

    def target(node: int) -> Probabilities:
        return make_sampler(sampling).compute_distribution(logits[node])

    relaxation = make_relaxation(case, residual)
    if case["mode"] == "greedy":
        return verify_tree_greedy(tree, target, relaxation, MANY_TOKENS), tree, leaves, 0
    numbers: Any = RecordedStream(case["uniforms"])
    accepted = verify_tree_relaxed(tree, target, lambda node: 0, relaxation, lambda node: numbers, MANY_TOKENS)
    ended_on_a_leaf = not tree.tree_structure.children[accepted.path[-1]]
    return accepted, tree, leaves, len(numbers.remaining) - ended_on_a_leaf


def test_acceptance_equals_the_recorded_steps() -> None:
    assert len(CASES) == 440
    for index, case in enumerate(CASES):
        rule = f"{case['lantern_k']} neighbors, {case['lantern_delta']}" if case["lantern"] else "exact"
        name = f"case {index}: {case['tree']}, {case['mode']}, {rule}"
        accepted, tree, leaves, unused = run_recorded_step(case)
        assert tree.tokens[accepted.path].tolist() == case["accepted_tokens"], name
        assert len(accepted.path) - 1 == case["accept_length"], name
        assert unused == 0, f"{name}: a recorded uniform number was not used"
        assert accepted.path == leaves[case["best_candidate"]][: len(accepted.path)], name
        expected = GOLDEN["sample_p"][case["sample_p_row"]]
        if case["mode"] == "greedy":
            assert accepted.bonus_token == expected.argmax(), name
        else:
            np.testing.assert_allclose(accepted.bonus_distribution, expected, atol=1e-5, err_msg=name)


def test_the_aggregated_residual_differs_from_the_published() -> None:
    num_different_paths = 0
    num_different_residuals = 0
    for case in CASES:
        if case["mode"] == "greedy" or not case["lantern"]:
            continue
        published = run_recorded_step(case)[0]
        case = {**case, "uniforms": case["uniforms"] + [0.5] * 100}  # another path may need more numbers
        ours = run_recorded_step(case, "aggregated")[0]
        num_different_paths += ours.path != published.path
        num_different_residuals += ours.path == published.path and not np.allclose(
            ours.bonus_distribution, published.bonus_distribution, atol=1e-3
        )
    assert num_different_paths > 0
    assert num_different_residuals > 50


def test_exact_acceptance_does_not_depend_on_the_residual() -> None:
    for case in CASES:
        if case["mode"] == "greedy" or not case["lantern"]:
            ours = run_recorded_step(case, "aggregated")[0]
            published = run_recorded_step(case)[0]
            assert ours.path == published.path
            np.testing.assert_array_equal(ours.bonus_distribution, published.bonus_distribution)
