"""Draft trees: their shapes before drafting, and the filled tree after it. Node 0 is the root, the last committed code.

A `StaticTree` fixes the shape in advance; a `DynamicTree` (EAGLE-2) only bounds it. A `DraftTree` holds codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from ..errors import TreeError
from .engine import Bools, Floats, Ints
from .sampling import Probabilities

Proposal = Callable[[int], Probabilities | None]
MAX_NODES, MAX_LEVELS = 128, 32  # drafting takes a pass per level


def _check_size(what: str, size: int, limit: int) -> None:
    if size > limit:
        raise TreeError(
            field="tree", found=f"{size:,} {what}", expected=f"at most {limit}", remedy="give a smaller tree"
        )


@dataclass(frozen=True)
class StaticTree:
    """A fixed shape. Nodes are numbered from 1 in order of (length, path).

    Raises:
        TreeError: a missing parent, a gap among siblings, a path given twice, or more than can be drafted.
    """

    paths: tuple[tuple[int, ...], ...]  # of child ranks: (0,) is the root's first child, (0, 1) that one's second child

    def __post_init__(self) -> None:
        if not self.paths:
            raise TreeError(field="tree", found="no paths", expected="at least one, such as [[0]]")
        _check_size("nodes", len(self.paths) + 1, MAX_NODES)
        _check_size("levels", max(map(len, self.paths)), MAX_LEVELS)
        listed = set(self.paths)
        if len(listed) != len(self.paths):
            raise TreeError(field="tree", found="a path twice", expected="every node once")
        for path in self.paths:
            if not path or min(path) < 0:
                raise TreeError(field="tree", found=f"path {list(path)}", expected="child ranks 0, 1, ...")
            parent, rank = path[:-1], path[-1]
            if parent and parent not in listed:
                raise TreeError(field="tree", found=f"path {list(path)}", expected=f"its parent {list(parent)}, too")
            if rank and (*parent, rank - 1) not in listed:
                raise TreeError(field="tree", found=f"path {list(path)}", expected=f"its sibling {rank - 1}, too")
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
    """An EAGLE-2 tree, which grows where paths are most probable.

    Raises:
        TreeError: sizes that contradict each other, or more than can be drafted.
    """

    # that are kept of all that are made: the root, and those with the highest probability of their path
    nodes: int
    depth: int  # levels below the root
    branch: int  # how many nodes of a level get children, and how many children each

    def __post_init__(self) -> None:
        made = self.branch + (self.depth - 1) * self.branch**2
        if min(self.nodes - 1, self.depth, self.branch) < 1:
            raise TreeError(field="tree", found=str(self), expected="nodes >= 2, depth >= 1, branch >= 1")
        _check_size("nodes", self.nodes, MAX_NODES)
        _check_size("levels", self.depth, MAX_LEVELS)
        _check_size("children a node", self.branch, MAX_LEVELS)
        if self.nodes - 1 > made:
            expected = f"at most {made + 1}, which depth {self.depth} and branch {self.branch} make"
            raise TreeError(field="tree", found=f"{self.nodes} nodes", expected=expected)


def no_proposal(node: int) -> None:
    """Of children that nothing was drawn for."""


@dataclass(eq=False)
class DraftTree:
    """A filled tree of one sequence; never changed."""

    tokens: Ints  # int64 `[nodes]`
    parents: Ints  # int64 `[nodes]`, -1 for the root; a parent comes before its children
    # gives the distribution that a node's children were drawn from without replacement, in their order; None where they
    # are certain (q = 1). Computed when it is called for: a walk visits few nodes
    proposal: Proposal = no_proposal
    # leaves in the order in which siblings are tried and ties between equally long greedy paths are broken; node
    # order by default
    leaf_order: Sequence[int] | None = None
    # how many nodes, a chain below the root, hold codes that the sequence keeps: they are no guesses
    num_preserved: int = 0
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
    """What can be read off the parents of a tree's nodes."""

    depths: Ints  # int64 `[nodes]`
    # of every node, in the order of their first leaves if a leaf order is given, else in node order
    children: tuple[tuple[int, ...], ...]
    ancestors: Bools  # whether the column node is the row node or an ancestor of it, bool `[nodes, nodes]`
    leaf_rank: Ints  # for every node the rank of the first leaf below it, int64 `[nodes]`
    is_chain: bool  # whether every node is the parent of the next


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


class StaticTreeBuilder:
    """A static tree of one sequence while its codes are drawn."""

    def __init__(self, shape: StaticTree, root: int) -> None:
        self.shape = shape
        self.tokens = np.zeros(shape.nodes, np.int64)
        self.sampled = np.zeros(shape.nodes, bool)
        self.tokens[0], self.sampled[0] = root, True

    def add_children(self, inner: Ints, codes: Ints, scores: Floats) -> None:
        """Give nodes of a level `inner [n]` their children's codes `[n, most]`, the best first; -inf scores none."""
        counts = np.isfinite(scores).sum(1)
        for slot in np.flatnonzero(self.sampled[inner]).tolist():
            filled = self.shape.children[int(inner[slot])][: counts[slot]]
            self.tokens[filled], self.sampled[filled] = codes[slot, : len(filled)], True

    def build(self, proposal: Callable[[int], Probabilities | None], greedy: bool) -> DraftTree:
        """What was drawn: a peaked distribution may run out of codes, an image of cells."""
        leaf_order = self.shape.leaves if greedy else None  # sampling knows no ties
        tree = DraftTree(self.tokens, self.shape.parents, proposal, leaf_order)
        return tree if self.sampled.all() else subtree(tree, np.flatnonzero(self.sampled))


class DynamicTreeBuilder:
    """A dynamic tree of one sequence while it grows; node 0 is the root."""

    def __init__(self, root: int) -> None:
        self.tokens = np.array([root])
        self.parents = np.array([-1])
        self.scores = np.zeros(1)  # log-probabilities of paths
        self.slot_of_parent = np.zeros(1, np.int64)  # slot of a node's parent among those expanded last
        self.last_level = 0  # its first node

    def add_children(self, nodes: Ints, codes: Ints, log_probabilities: Floats) -> None:
        """Give each of `nodes` its children.

        Args:
            nodes: int64 `[nodes]`.
            codes: int64 `[nodes, branch]`, best first.
            log_probabilities: of the codes, `[nodes, branch]`; -inf where there are fewer.
        """
        branch = codes.shape[1]
        scores = log_probabilities + self.scores[nodes][:, None]
        possible = np.isfinite(scores).ravel()
        self.last_level = len(self.tokens)
        self.tokens = np.concatenate([self.tokens, codes.ravel()[possible]])
        self.scores = np.concatenate([self.scores, scores.ravel()[possible]])
        self.parents = np.concatenate([self.parents, np.repeat(nodes, branch)[possible]])
        slots = np.repeat(np.arange(len(nodes)), branch)[possible]
        self.slot_of_parent = np.concatenate([self.slot_of_parent, slots])

    def best_of_last_level(self, count: int) -> Ints:
        """The best nodes of the last level, best first."""
        return self.last_level + np.argsort(-self.scores[self.last_level :], kind="stable")[:count]

    def prune(self, count: int) -> DraftTree:
        """Keep the root and the `count` - 1 best nodes, in order of creation."""
        best = np.argsort(-self.scores[1:], kind="stable")[: count - 1] + 1
        return subtree(DraftTree(self.tokens, self.parents), np.concatenate([[0], np.sort(best)]))


def subtree(tree: DraftTree, kept: Ints) -> DraftTree:
    """The tree of some nodes in their order, every one's parent among them."""
    renumber = np.full(tree.nodes + 1, -1, np.int64)
    renumber[kept] = np.arange(len(kept))
    return DraftTree(tree.tokens[kept], renumber[tree.parents[kept]], lambda node: tree.proposal(int(kept[node])))
