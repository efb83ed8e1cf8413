"""Trees by name: the published static trees, chains, dynamic trees, and trees from JSON files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from ..errors import TreeError
from ..inputs import read_plain_file, reading, short
from .tree import DynamicTree, StaticTree

_FILE_LIMIT = 1 << 20  # bytes
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def _grow(counts: str) -> tuple[tuple[int, ...], ...]:
    """Paths from child counts: level by level, a digit (a = 10 .. z = 35) for each node of the level above."""
    paths: list[tuple[int, ...]] = []
    level: list[tuple[int, ...]] = [()]
    for digits in counts.split("-"):
        level = [(*path, rank) for path, digit in zip(level, digits, strict=True) for rank in range(int(digit, 36))]
        paths += level
    return tuple(paths)


PUBLISHED = {
    "naive-57": _grow("5-43321-4332210100000-4321210100000000-32002101000000"),
    "mc-25": _grow("4-3221-32210000-30000000-200"),
    "balanced-25": _grow("3-332-32022000-300000000-200"),
    "reverse-25": _grow("3-211-3210-320000-43000"),
    "medusa-63": _grow("a-a522111100-94211100003100010000000-41100000010000000000000"),
}


def named_tree(spec: str) -> StaticTree | DynamicTree:
    """The tree that `spec` names.

    Args:
        spec: a published name, `chain-N`, `dynamic-NODES`, `dynamic-NODES-DEPTH-BRANCH`, a name that `tree_name` gave,
            or the path of a JSON file holding a list of paths such as [[0], [1], [0, 0]].

    Raises:
        TreeError: it is anything else.
    """
    if spec in PUBLISHED:
        return StaticTree(PUBLISHED[spec])
    if match := re.fullmatch(r"chain-(\d{1,2})", spec):
        return StaticTree(tuple((0,) * n for n in range(1, int(match[1]) + 1)))
    if match := re.fullmatch(r"dynamic-(\d{1,3})(?:-(\d{1,2})-(\d{1,2}))?", spec):
        return DynamicTree(int(match[1]), int(match[2] or 5), int(match[3] or 10))
    if match := re.fullmatch(r"tree((?:-[0-9a-z]{1,512}){1,20})", spec):
        try:
            return StaticTree(_grow(match[1][1:]))
        except ValueError as error:
            expected = "one digit (0 .. 9, a .. z) a level for each node of the level above"
            raise TreeError(field="tree", found=short(spec), expected=expected) from error
    if spec.endswith(".json"):
        return _read_tree(Path(spec))
    names = ", ".join([*sorted(PUBLISHED), "chain-N", "dynamic-NODES[-DEPTH-BRANCH]", "tree-LEVELS"])
    raise TreeError(field="tree", found=short(spec), expected=f"{names} or a .json file")


def tree_name(paths: Iterable[tuple[int, ...]]) -> str:
    """A name that holds a tree's whole shape: per level, how many children each node of the level above has.

    `tree-2-10-1` is a root with two children, of which the first has one child, and that one another. Counts are
    digits 0 .. 9, a .. z, so no node may have more than 35 children.
    """
    listed = sorted(set(paths))
    level: list[tuple[int, ...]] = [()]
    name = "tree"
    while any(children := [[path for path in listed if path[:-1] == parent] for parent in level]):
        if max(map(len, children)) > 35:
            raise TreeError(field="tree", found=f"{max(map(len, children))} children", expected="at most 35 a node")
        name += "-" + "".join(_DIGITS[len(group)] for group in children)
        level = [path for group in children for path in group]
    return name


def _read_tree(path: Path) -> StaticTree:
    with reading(path, "a tree in JSON", TreeError, "give a list of paths such as [[0], [1], [0, 0]]"):
        paths = json.loads(read_plain_file(path, _FILE_LIMIT).decode())
    if isinstance(paths, dict):
        paths = paths.get("paths")
    listed = isinstance(paths, list) and all(isinstance(p, list) for p in paths)
    if not listed or not all(type(rank) is int for p in paths for rank in p):
        raise TreeError(field=str(path), found="other JSON", expected="a list of paths such as [[0], [1], [0, 0]]")
    return StaticTree(tuple(tuple(p) for p in paths))
