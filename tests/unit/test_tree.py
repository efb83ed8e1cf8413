"""Draft trees: shapes, attention masks, names, and the published static trees."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import catch_error

from lantern_rt.errors import TreeError
from lantern_rt.runtime.tree import DraftTree, DynamicTreeShape, StaticTreeShape
from lantern_rt.runtime.tree_names import parse_tree

DATA = Path(__file__).parent.parent / "data"
GOLDEN = json.loads((DATA / "lantern-drafter-llamagen" / "static_trees.json").read_text(encoding="utf-8"))
OUR_NAMES = {
    "naive_extend_57": "naive-57",
    "mc_sim_7b_63": "mc-25",
    "mc_sim_7b_63_balanced": "balanced-25",
    "reverse_balanced_25": "reverse-25",
    "medusa_2_7b_63": "medusa-63",
    "chain": "chain-5",
}


@st.composite
def parent_lists(draw: st.DrawFn) -> np.ndarray:
    """Generate the parent of each node of a random tree; the root is node 0 with parent -1."""
    count = draw(st.integers(1, 20))
    return np.array([-1] + [draw(st.integers(0, node - 1)) for node in range(1, count)], np.int64)


@st.composite
def path_sets(draw: st.DrawFn) -> list[tuple[int, ...]]:
    """Generate the paths of a random static tree in random order; a path has a child index for each level."""
    paths: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(1, 20))):
        parent = draw(st.sampled_from([(), *paths]))
        rank = sum(len(path) == len(parent) + 1 and path[:-1] == parent for path in paths)
        paths.append((*parent, rank))
    return draw(st.permutations(paths))


# ---------------------------------------------------------------- the published trees


@pytest.mark.parametrize("published", OUR_NAMES)
def test_a_published_tree_has_the_recorded_structure(published: str) -> None:
    golden = GOLDEN[published]
    shape = parse_tree(OUR_NAMES[published])
    assert isinstance(shape, StaticTreeShape)
    assert [list(path) for path in shape.paths] == golden["paths"]
    verify = golden["verify"]
    tree = DraftTree(np.arange(shape.num_nodes), shape.parents)
    np.testing.assert_array_equal(tree.tree_structure.ancestor_mask, np.array(verify["tree_mask"], bool))
    assert tree.tree_structure.depths.tolist() == verify["tree_position_ids"]
    leaves = [[node for node in row if node >= 0] for row in verify["retrieve_indices"]]
    children = tree.tree_structure.children
    assert sorted(leaves) == sorted(tree.path_to(n) for n in range(tree.num_nodes) if not children[n])
    ordered = DraftTree(np.arange(shape.num_nodes), shape.parents, leaf_order=[path[-1] for path in leaves])
    assert ordered.tree_structure.children == children, "siblings have the same order by leaves and by node numbers"
    for path, earlier_siblings in zip(verify["retrieve_indices"], verify["b_indices"], strict=True):
        for node, siblings in zip(path[1:], earlier_siblings[1:], strict=True):
            if node > 0:
                assert siblings == [n for n in shape.children[shape.parents[node]].tolist() if n < node]


@pytest.mark.parametrize("published", OUR_NAMES)
def test_a_published_tree_is_expanded_as_published(published: str) -> None:
    """Check which of the ten candidates of each node are expanded, and to which nodes each expanded node attends."""
    draft = GOLDEN[published]["draft"]
    shape = parse_tree(OUR_NAMES[published])
    assert isinstance(shape, StaticTreeShape)
    levels = [level for level in shape.levels if len(level)]
    assert len(levels) - 1 == len(draft["tree_indices"])
    expanded: list[int] = []
    mask = DraftTree(np.zeros(shape.num_nodes, np.int64), shape.parents).tree_structure.ancestor_mask
    published_levels = zip(levels, levels[1:], draft["tree_indices"], draft["attn_mask"], strict=False)
    for parent_level, level, indices, attended in published_levels:
        slots = {int(node): slot for slot, node in enumerate(parent_level)}
        ranks = [shape.paths[node - 1][-1] for node in level]
        assert indices == [slots[int(shape.parents[n])] * 10 + rank for n, rank in zip(level, ranks, strict=True)]
        expanded += level.tolist()
        np.testing.assert_array_equal(mask[np.ix_(level, expanded)], np.array(attended, bool))


# ---------------------------------------------------------------- shapes


@given(path_sets())
def test_a_static_tree_sorts_paths_by_length_then_child(paths: list[tuple[int, ...]]) -> None:
    shape = StaticTreeShape(tuple(paths))
    assert list(shape.paths) == sorted(paths, key=lambda path: (len(path), path))
    assert shape.num_nodes == len(paths) + 1
    for node, path in enumerate(shape.paths, 1):
        parent = int(shape.parents[node])
        assert parent < node
        assert (() if parent == 0 else shape.paths[parent - 1]) == path[:-1]
        assert shape.children[parent][path[-1]] == node


@given(path_sets())
def test_levels_contain_every_inner_node_once(paths: list[tuple[int, ...]]) -> None:
    shape = StaticTreeShape(tuple(paths))
    assert len(shape.levels) == max(map(len, paths))
    assert sorted(np.concatenate(shape.levels).tolist()) == sorted(set(shape.parents[1:].tolist()))
    for depth, level in enumerate(shape.levels):
        assert all((0 if node == 0 else len(shape.paths[node - 1])) == depth for node in level)


@pytest.mark.parametrize(
    ("paths", "expected_fault"),
    [
        ((), "no paths"),
        (((0,), (0,)), "a path twice"),
        (((0,), (1, 0)), "path [1, 0]"),  # the parent path [1] is missing
        (((0, 0),), "path [0, 0]"),
        (((0,), (2,)), "path [2]"),  # the sibling path [1] is missing
        (((1,),), "path [1]"),
        (((),), "path []"),
        (((-1,),), "path [-1]"),
        (tuple((n,) for n in range(513)), "514 nodes"),
    ],
)
def test_a_malformed_static_tree_is_rejected(paths: Any, expected_fault: str) -> None:
    error = catch_error(TreeError, StaticTreeShape, paths)
    assert (error.field, error.found) == ("tree", expected_fault)


@pytest.mark.parametrize("sizes", [(1, 5, 10), (10, 0, 10), (10, 5, 0), (5, 1, 3), (59, 2, 5), (129, 5, 10)])
def test_a_dynamic_tree_with_impossible_sizes_is_rejected(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(TreeError):
        DynamicTreeShape(*sizes)


# ---------------------------------------------------------------- draft trees


@given(parent_lists())
def test_the_ancestor_mask_is_the_path_from_the_root(parents: np.ndarray) -> None:
    tree = DraftTree(np.arange(len(parents)), parents)
    for node in range(tree.num_nodes):
        path = tree.path_to(node)
        assert np.flatnonzero(tree.tree_structure.ancestor_mask[node]).tolist() == sorted(path)
        assert tree.tree_structure.depths[node] == len(path) - 1
        assert all(parents[child] == node for child in tree.tree_structure.children[node])
    assert sum(map(len, tree.tree_structure.children)) == tree.num_nodes - 1


@given(parent_lists(), st.randoms(use_true_random=False))
def test_the_leaf_rank_orders_siblings(parents: np.ndarray, random: Any) -> None:
    children = DraftTree(np.arange(len(parents)), parents).tree_structure.children
    leaves = [node for node in range(len(parents)) if not children[node]]
    random.shuffle(leaves)
    tree = DraftTree(np.arange(len(parents)), parents, leaf_order=leaves)
    for node in range(tree.num_nodes):
        ranks_below = [rank for rank, leaf in enumerate(leaves) if node in tree.path_to(leaf)]
        assert tree.tree_structure.leaf_rank[node] == min(ranks_below)
        assert tuple(sorted(tree.tree_structure.children[node])) == children[node]
        ranks = [int(tree.tree_structure.leaf_rank[child]) for child in tree.tree_structure.children[node]]
        assert ranks == sorted(ranks)


def test_a_cached_tree_adds_two_objects_to_the_collector() -> None:
    def count_objects() -> int:
        gc.collect()
        return len(gc.get_objects())

    before = count_objects()
    parent_lists = [np.array([-1, *([0] * n), *range(32 - n)]) for n in range(9)]
    shapes = [DraftTree(np.zeros(33, np.int64), parents).tree_structure for parents in parent_lists]
    assert len({id(shape) for shape in shapes}) == len(shapes)
    assert count_objects() - before <= 2 * len(shapes)


# ---------------------------------------------------------------- names and files


def test_tree_names_describe_chains_and_dynamic_trees() -> None:
    chain = parse_tree("chain-3")
    assert isinstance(chain, StaticTreeShape)
    assert chain.paths == ((0,), (0, 0), (0, 0, 0))
    assert parse_tree("dynamic-20-4-3") == DynamicTreeShape(20, 4, 3)
    assert parse_tree("dynamic-40") == DynamicTreeShape(40, 5, 10)


@pytest.mark.parametrize(
    "name", ["", "oak", "chain", "chain-0", "chain--1", "dynamic", "dynamic-1", "dynamic-9-9", "tree-2-1", "oak.json"]
)
def test_invalid_tree_names_are_rejected(name: str) -> None:
    with pytest.raises(TreeError):
        parse_tree(name)


def test_a_static_trees_name_has_a_digit_for_each_node() -> None:
    assert parse_tree("tree-2-10-1") == StaticTreeShape(((0,), (1,), (0, 0), (0, 0, 0)))
    assert parse_tree("tree-a") == StaticTreeShape(tuple((rank,) for rank in range(10)))
