"""Names of tree shapes: published static trees, chains, dynamic trees, and static trees as lists of child counts."""

from __future__ import annotations

import re

from ..errors import TreeError
from ..inputs import format_value
from .tree import DynamicTreeShape, StaticTreeShape, TreeShape


def _parse_child_counts(child_counts: str) -> tuple[tuple[int, ...], ...]:
    """Return the paths to all nodes of a tree from the numbers of children of its nodes, see `parse_tree`."""
    paths: list[tuple[int, ...]] = []
    level: list[tuple[int, ...]] = [()]
    for digits in child_counts.split("-"):
        level = [(*path, rank) for path, digit in zip(level, digits, strict=True) for rank in range(int(digit, 36))]
        paths += level
    return tuple(paths)


PUBLISHED_TREES = {
    "naive-57": _parse_child_counts("5-43321-4332210100000-4321210100000000-32002101000000"),
    "mc-25": _parse_child_counts("4-3221-32210000-30000000-200"),
    "balanced-25": _parse_child_counts("3-332-32022000-300000000-200"),
    "reverse-25": _parse_child_counts("3-211-3210-320000-43000"),
    "medusa-63": _parse_child_counts("a-a522111100-94211100003100010000000-41100000010000000000000"),
}


def parse_tree(tree_name: str) -> TreeShape:
    """Return the tree shape that a name specifies.

    Args:
        tree_name: a name in `PUBLISHED_TREES`, `chain-N`, `dynamic-NODES`, `dynamic-NODES-DEPTH-BRANCH`, or
            `tree-LEVELS`. LEVELS has digits (0 .. 9, a .. z) for each level, separated by `-`. Each digit is the number
            of children of one node of the level above. In `tree-2-10-1`, the root has two children. The first of these
            has one child, which has one child.

    Raises:
        TreeError: the name is unknown, or the tree is not valid.
    """
    if tree_name in PUBLISHED_TREES:
        return StaticTreeShape(PUBLISHED_TREES[tree_name])
    if match := re.fullmatch(r"chain-(\d{1,2})", tree_name):
        # Every node of a chain is the first child of its parent, so its path is (0, ..., 0).
        return StaticTreeShape(tuple((0,) * n for n in range(1, int(match[1]) + 1)))
    if match := re.fullmatch(r"dynamic-(\d{1,3})(?:-(\d{1,2})-(\d{1,2}))?", tree_name):
        return DynamicTreeShape(int(match[1]), int(match[2] or 5), int(match[3] or 10))
    if match := re.fullmatch(r"tree((?:-[0-9a-z]{1,512}){1,20})", tree_name):
        try:
            return StaticTreeShape(_parse_child_counts(match[1][1:]))
        except ValueError as error:
            expected = "one digit (0 .. 9, a .. z) a level for each node of the level above"
            raise TreeError(field="tree", found=format_value(tree_name), expected=expected) from error
    names = ", ".join([*sorted(PUBLISHED_TREES), "chain-N", "dynamic-NODES[-DEPTH-BRANCH]", "tree-LEVELS"])
    raise TreeError(field="tree", found=format_value(tree_name), expected=names)
