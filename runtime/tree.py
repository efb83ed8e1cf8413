"""Draft trees: their shapes before drafting, and the filled tree after it. Node 0 is the root, the last committed code.

A `StaticTree` fixes the shape in advance; a `DynamicTree` (EAGLE-2) only bounds it. A `DraftTree` holds codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from ..errors import TreeError
from .engine import Bools, Ints
from .sampling import Probabilities

MOST_NODES, MOST_LEVELS = 128, 32  # drafting takes a pass per level


def _check_size(what: str, found: int, most: int) -> None:
    if found > most:
        raise TreeError(f"tree: found {found:,} {what}, expected at most {most}; give a smaller tree")


@dataclass(frozen=True)
class StaticTree:
    """A fixed shape, given as paths of child ranks: (0,) is the root's first child, (0, 1) its second child.

    Nodes are numbered from 1 in order of (length, path).
    Raises: TreeError: a missing parent, a gap among siblings, a path given twice, or more than can be drafted.
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not self.paths:
            raise TreeError("the tree has no paths; give at least one, such as [[0]]")
        _check_size("nodes", len(self.paths) + 1, MOST_NODES)
        _check_size("levels", max(map(len, self.paths)), MOST_LEVELS)
        known = set(self.paths)
        if len(known) != len(self.paths):
            raise TreeError("the tree lists a path twice; list every node once")
        for path in self.paths:
            if not path or min(path) < 0:
                raise TreeError(f"tree path {list(path)} is not a list of child ranks 0, 1, ...")
            if len(path) > 1 and path[:-1] not in known:
                raise TreeError(f"tree path {list(path)} has no parent {list(path[:-1])}; list it too")
            if path[-1] and (*path[:-1], path[-1] - 1) not in known:
                raise TreeError(f"tree path {list(path)} has no earlier sibling; child ranks must be 0, 1, 2, ...")
        object.__setattr__(self, "paths", tuple(sorted(self.paths, key=lambda path: (len(path), path))))

    @cached_property
    def parents(self) -> Ints:
        """Parent of every node, int64 `[nodes]`, -1 for the root."""
        index = {path: i + 1 for i, path in enumerate(self.paths)}
        return np.array([-1] + [index.get(path[:-1], 0) for path in self.paths], np.int64)

    @cached_property
    def levels(self) -> list[Ints]:
        """Nodes that have children, by depth: `levels[0]` is the root alone."""
        inner = sorted(set(self.parents[1:].tolist()))
        depth = [0] + [len(path) for path in self.paths]
        return [np.array([n for n in inner if depth[n] == d], np.int64) for d in range(max(depth))]

    @cached_property
    def children(self) -> list[Ints]:
        """Children of every node in order of rank."""
        return [np.flatnonzero(self.parents == n) for n in range(self.nodes)]

    @cached_property
    def leaves(self) -> list[int]:
        """Nodes without children, depth first: the published order, which settles greedy ties."""
        return sorted(set(range(self.nodes)) - set(self.parents.tolist()), key=lambda n: self.paths[n - 1])

    @property
    def nodes(self) -> int:
        """Nodes with the root."""
        return len(self.paths) + 1


@dataclass(frozen=True)
class DynamicTree:
    """An EAGLE-2 tree: `branch` children each of the `branch` best nodes of a level, `depth` levels deep.

    Of all nodes made, the root and the `nodes` - 1 with the highest probability of their path are kept.
    Raises: TreeError: sizes that contradict each other, or more than can be drafted.
    """

    nodes: int = 59
    depth: int = 5
    branch: int = 10

    def __post_init__(self) -> None:
        made = self.branch + (self.depth - 1) * self.branch**2
        if min(self.nodes - 1, self.depth, self.branch) < 1:
            raise TreeError(f"a dynamic tree needs nodes >= 2, depth >= 1, branch >= 1; found {self}")
        _check_size("nodes", self.nodes, MOST_NODES)
        _check_size("levels", self.depth, MOST_LEVELS)
        _check_size("children a node", self.branch, MOST_LEVELS)
        if self.nodes - 1 > made:
            raise TreeError(f"dynamic tree: {self.nodes} nodes asked for, but depth and branch make only {made + 1}")


class Proposals(Mapping[int, Probabilities]):
    """Distributions by node that are computed when they are asked for: a walk visits few nodes of a tree."""

    def __init__(self, make: Mapping[int, Callable[[], Probabilities]]) -> None:
        self._make, self._made = make, dict[int, Probabilities]()

    def __getitem__(self, node: int) -> Probabilities:
        if node not in self._made:
            self._made[node] = self._make[node]()
        return self._made[node]

    def __iter__(self) -> Iterator[int]:
        return iter(self._make)

    def __len__(self) -> int:
        return len(self._make)


@dataclass(eq=False)
class DraftTree:
    """A filled tree of one request; never changed.

    tokens: int64 `[nodes]`. parents: int64 `[nodes]`, -1 for the root; a parent comes before its children. proposals:
    for each node with sampled children the distribution they were drawn from without replacement, in the children's
    order; a node without an entry has deterministic children (q = 1). leaf_order: leaves in the order in which siblings
    are tried and ties between equally long greedy paths are broken; node order by default.
    """

    tokens: Ints
    parents: Ints
    proposals: Mapping[int, Probabilities] = field(default_factory=dict)
    leaf_order: Sequence[int] | None = None
    _structure: TreeStructure | None = field(init=False, default=None)  # a cached_property takes a lock

    @property
    def nodes(self) -> int:
        """Nodes with the root."""
        return len(self.tokens)

    @property
    def structure(self) -> TreeStructure:
        """What follows from `parents` and `leaf_order` alone; trees of one shape share it."""
        if self._structure is None:
            order = None if self.leaf_order is None else tuple(self.leaf_order)
            self._structure = _structure(self.parents.tobytes(), order)
        return self._structure

    def path_to(self, node: int) -> list[int]:
        """Nodes from the root to `node`, both included."""
        path = [node]
        while self.parents[path[-1]] >= 0:
            path.append(int(self.parents[path[-1]]))
        return path[::-1]


@dataclass(frozen=True)
class TreeStructure:
    """What can be read off the parents of a tree's nodes.

    depths: int64 `[nodes]`. children: of every node, in the order of their first leaves if a leaf order is given, else
    in node order. ancestors: whether the column node is the row node or an ancestor of it, bool `[nodes, nodes]`.
    leaf_rank: for every node the rank of the first leaf below it, int64 `[nodes]`. chain: whether every node is the
    parent of the next.
    """

    depths: Ints
    children: tuple[tuple[int, ...], ...]
    ancestors: Bools
    leaf_rank: Ints
    chain: bool


@dataclass(frozen=True)
class Front:
    """The nodes of one pass over the active rows of a grid, see `rows.py`; what a tree is to other methods.

    tokens: int64 `[nodes]`. cells: the cell each token stands in, or stands in for, int64 `[nodes]`; after it comes the
    next cell. rows, counts: the row each node belongs to, and how many tokens of it are known to it, both int64
    `[nodes]`; 0 of one that only stands in, which no other sees. drawn: nodes after which a code is drawn. order: cells
    in the order in which the cache has them, int64 `[entries]`. columns: of the grid. window: how far rows are apart.
    Where rows end with a token, that is the last column of this grid. following: the code that comes after each node,
    counted without these, int64 `[nodes]`.
    """

    tokens: Ints
    cells: Ints
    rows: Ints
    counts: Ints
    drawn: list[int]
    order: Ints
    columns: int
    window: int
    following: Ints

    @property
    def nodes(self) -> int:
        """Nodes of the pass."""
        return len(self.tokens)

    @cached_property
    def structure(self) -> TreeStructure:
        """What nodes see of each other, and themselves. `depths` are their cells."""
        seen = self.sees(self.cells) & (self.counts > 0) | np.eye(self.nodes, dtype=bool)
        return TreeStructure(self.cells, (), seen, self.cells, False)

    def sees(self, cells: Ints) -> Bools:
        """Which of these cells each node may see, bool `[nodes, cells]`; those of rows above as far as the window."""
        row, column = np.divmod(cells, self.columns)
        above = self.rows[:, None] - row
        seen: Bools = (above >= 0) & (column < self.counts[:, None] + above * self.window)
        return seen


@lru_cache(maxsize=64)
def _structure(parents_bytes: bytes, leaf_order: tuple[int, ...] | None) -> TreeStructure:
    parents = np.frombuffer(parents_bytes, np.int64).tolist()
    depths: list[int] = []
    children: list[list[int]] = [[] for _ in parents]
    ancestors = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        if parent >= 0:
            children[parent].append(node)
            ancestors[node] |= ancestors[parent]
    leaves = leaf_order if leaf_order is not None else [node for node, below in enumerate(children) if not below]
    rank = [len(parents)] * len(parents)
    for position, leaf in enumerate(leaves):
        node = int(leaf)
        while node >= 0 and rank[node] > position:
            rank[node] = position
            node = parents[node]
    if leaf_order is not None:
        for siblings in children:
            siblings.sort(key=rank.__getitem__)
    chain = depths == list(range(len(depths)))
    below_each = tuple(map(tuple, children))  # of tuples nothing is left for the garbage collector to walk through
    return TreeStructure(np.array(depths, np.int64), below_each, ancestors, np.array(rank, np.int64), chain)
