"""Trees by name: the published static trees, chains, dynamic trees, and trees from JSON files."""

from __future__ import annotations

import json
import re
from pathlib import Path

from ..errors import TreeError
from .tree import DynamicTree, StaticTree, TreeShape


def _grow(*counts: str) -> tuple[tuple[int, ...], ...]:
    """Paths from child counts: each string lists, level by level, how many children the level's nodes have."""
    paths: list[tuple[int, ...]] = []
    level: list[tuple[int, ...]] = [()]
    for numbers in counts:
        level = [(*path, rank) for path, n in zip(level, map(int, numbers.split()), strict=True) for rank in range(n)]
        paths += level
    return tuple(paths)


PUBLISHED = {
    "naive-57": _grow(
        "5",
        "4 3 3 2 1",
        "4 3 3 2 2 1 0 1 0 0 0 0 0",
        "4 3 2 1 2 1 0 1 0 0 0 0 0 0 0 0",
        "3 2 0 0 2 1 0 1 0 0 0 0 0 0",
    ),
    "mc-25": _grow("4", "3 2 2 1", "3 2 2 1 0 0 0 0", "3 0 0 0 0 0 0 0", "2 0 0"),
    "balanced-25": _grow("3", "3 3 2", "3 2 0 2 2 0 0 0", "3 0 0 0 0 0 0 0 0", "2 0 0"),
    "reverse-25": _grow("3", "2 1 1", "3 2 1 0", "3 2 0 0 0 0", "4 3 0 0 0"),
    "medusa-63": _grow(
        "10",
        "10 5 2 2 1 1 1 1 0 0",
        "9 4 2 1 1 1 0 0 0 0 3 1 0 0 0 1 0 0 0 0 0 0 0",
        "4 1 1 0 0 0 0 0 0 1 0 0 0 0 0 0 0 0 0 0 0 0 0",
    ),
}


def named_tree(spec: str) -> TreeShape:
    """The tree that `spec` names.

    A published name, `chain-N`, `dynamic-NODES`, `dynamic-NODES-DEPTH-BRANCH`, or the path of a JSON file
    holding a list of paths such as [[0], [1], [0, 0]]. Raises TreeError for anything else.
    """
    if spec in PUBLISHED:
        return StaticTree(PUBLISHED[spec], spec)
    if match := re.fullmatch(r"chain-(\d{1,2})", spec):
        return StaticTree(tuple((0,) * n for n in range(1, int(match[1]) + 1)), spec)
    if match := re.fullmatch(r"dynamic-(\d{1,3})(?:-(\d{1,2})-(\d{1,2}))?", spec):
        return DynamicTree(int(match[1]), int(match[2] or 5), int(match[3] or 10), spec)
    if spec.endswith(".json"):
        return _read_tree(Path(spec))
    names = ", ".join(sorted(PUBLISHED))
    raise TreeError(f"no tree is called {spec!r}; use {names}, chain-N, dynamic-NODES[-DEPTH-BRANCH] or a .json file")


def _read_tree(path: Path) -> StaticTree:
    try:
        paths = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TreeError(f"cannot read tree file {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise TreeError(f"tree file {path} is not JSON: {error}") from error
    if isinstance(paths, dict):
        paths = paths.get("paths")
    fits = isinstance(paths, list) and len(paths) <= 512
    if not fits or not all(isinstance(p, list) and all(type(rank) is int for rank in p) for p in paths):
        raise TreeError(f"tree file {path} must hold a list of at most 512 paths such as [[0], [1], [0, 0]]")
    return StaticTree(tuple(tuple(p) for p in paths), path.stem)
