"""Draft trees: shapes of trees, builders, and trees of draft tokens. Node 0 is the root, the last committed token.

A `StaticTreeShape` is fixed before drafting. A `DynamicTreeShape` (EAGLE-2) only limits the size of the shape. A
`DraftTree` contains the draft tokens.
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
MAX_NODES = 128  # maximum number of nodes of a tree
MAX_LEVELS = 32  # maximum number of levels; a limit, because drafting needs one drafter pass for each level


def _check_size(noun: str, size: int, limit: int) -> None:
    if size > limit:
        expected = f"at most {limit}"
        raise TreeError(field="tree", found=f"{size:,} {noun}", expected=expected, remedy="give a smaller tree")


@dataclass(frozen=True)
class StaticTreeShape:
    """Fixed shape of a draft tree.

    Nodes below the root are numbered from 1, sorted by depth and then by path.

    Raises:
        TreeError: a parent is missing, siblings have a gap, a path is repeated, or the tree is too large.
    """

    # Path to each node below the root, as ranks among siblings: (0,) is the first child of the root, and (0, 1) is the
    # second child of (0,).
    paths: tuple[tuple[int, ...], ...]

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
            parent = path[:-1]
            rank = path[-1]
            if parent and parent not in listed:
                raise TreeError(field="tree", found=f"path {list(path)}", expected=f"the parent {list(parent)}, too")
            if rank and (*parent, rank - 1) not in listed:
                sibling = f"the sibling of rank {rank - 1}, too"
                raise TreeError(field="tree", found=f"path {list(path)}", expected=sibling)
        # A frozen dataclass allows no direct assignment. Sorting gives every node its number.
        object.__setattr__(self, "paths", tuple(sorted(self.paths, key=lambda path: (len(path), path))))

    @cached_property
    def parents(self) -> Ints:
        """Parent of every node, int64 `[nodes]`, -1 for the root."""
        index = {path: i + 1 for i, path in enumerate(self.paths)}
        return np.array([-1] + [index.get(path[:-1], 0) for path in self.paths], np.int64)

    @cached_property
    def levels(self) -> list[Ints]:
        """Nodes that have children, as one array for each depth; `levels[0]` contains the root alone."""
        inner = sorted(set(self.parents[1:].tolist()))
        depth = [0] + [len(path) for path in self.paths]
        return [np.array([n for n in inner if depth[n] == d], np.int64) for d in range(max(depth))]

    def find_inner_node(self, node: int) -> tuple[int, int]:
        """Return the depth of a node that has children, and its index in `levels[depth]`."""
        depth = len(self.paths[node - 1]) if node else 0  # `paths` has no entry for the root, node 0
        return depth, int(np.searchsorted(self.levels[depth], node))

    @cached_property
    def children(self) -> list[Ints]:
        """Children of every node, sorted by rank, int64 `[children]` each."""
        return [np.flatnonzero(self.parents == n) for n in range(self.num_nodes)]

    @cached_property
    def leaves(self) -> list[int]:
        """Nodes without children, in depth-first order.

        As in the published code, greedy decoding prefers the first leaf among equally long paths.
        """
        return sorted(set(range(self.num_nodes)) - set(self.parents.tolist()), key=lambda n: self.paths[n - 1])

    @property
    def num_nodes(self) -> int:
        return len(self.paths) + 1


@dataclass(frozen=True)
class DynamicTreeShape:
    """Size limits of an EAGLE-2 tree, which grows along the most probable paths.

    Raises:
        TreeError: the sizes contradict each other, or the tree is too large.
    """

    num_nodes: int  # number of nodes after pruning: the root and the nodes with the most probable paths
    depth: int  # number of levels below the root
    branching_factor: int  # number of nodes in a level that get children, and number of children of each node

    def __post_init__(self) -> None:
        # The root has `branching_factor` children; in each later level, that many nodes have that many children.
        num_candidates = self.branching_factor + (self.depth - 1) * self.branching_factor**2
        if min(self.num_nodes - 1, self.depth, self.branching_factor) < 1:
            raise TreeError(field="tree", found=str(self), expected="nodes >= 2, depth >= 1, branch >= 1")
        _check_size("nodes", self.num_nodes, MAX_NODES)
        _check_size("levels", self.depth, MAX_LEVELS)
        _check_size("children a node", self.branching_factor, MAX_LEVELS)
        if self.num_nodes - 1 > num_candidates:
            expected = f"at most {num_candidates + 1}, which depth {self.depth} and branch {self.branching_factor} make"
            raise TreeError(field="tree", found=f"{self.num_nodes} nodes", expected=expected)


TreeShape = StaticTreeShape | DynamicTreeShape


def no_proposal_distribution(node: int) -> None:
    """Return None: the children of `node` were not sampled and count as certain (q = 1)."""


@dataclass(eq=False)
class DraftTree:
    """Tree of draft tokens of one sequence, which is never changed after it was built."""

    tokens: Ints  # token of each node, int64 `[nodes]`
    parents: Ints  # parent of each node, int64 `[nodes]`, -1 for the root; a parent comes before its children
    # Function from a node to the distribution from which its children were sampled without replacement, one after
    # another; the function returns None if they were not sampled (q = 1). A function, because acceptance visits few
    # nodes, and only their distributions need to be computed.
    proposal: Proposal = no_proposal_distribution
    # Leaves in the order in which acceptance tries siblings, and in which greedy decoding prefers equally long paths.
    # None: the order of node numbers.
    leaf_order: Sequence[int] | None = None
    num_preserved_tokens: int = 0  # number of preserved tokens, a chain directly below the root; they are not drafts
    _structure: TreeStructure | None = field(init=False, default=None)  # a `cached_property` would take a lock

    @property
    def num_nodes(self) -> int:
        return len(self.tokens)

    @property
    def tree_structure(self) -> TreeStructure:
        """Depths, children and ancestor mask of the nodes; trees of the same shape have the same object."""
        if self._structure is None:
            order = None if self.leaf_order is None else tuple(self.leaf_order)
            self._structure = _build_structure(self.parents.tobytes(), order)
        return self._structure

    def path_to(self, node: int) -> list[int]:
        path = [node]
        while self.parents[path[-1]] >= 0:
            path.append(int(self.parents[path[-1]]))
        return path[::-1]


@dataclass(frozen=True)
class TreeStructure:
    """Depths, children and ancestor mask of the nodes of a tree, derived from `parents` and `leaf_order`."""

    depths: Ints  # depth of each node, 0 for the root, int64 `[nodes]`
    children: tuple[tuple[int, ...], ...]  # children of every node, sorted by `leaf_rank`, else in node order
    ancestor_mask: Bools  # whether the column node is the row node or an ancestor of it, bool `[nodes, nodes]`
    leaf_rank: Ints  # smallest index in `leaf_order` of a leaf below each node, int64 `[nodes]`
    is_chain: bool  # whether every node is the parent of the next node


# Cached, because most passes of a decode have trees of the same shape. The key is bytes, as arrays are not hashable.
@lru_cache(maxsize=64)
def _build_structure(parents_bytes: bytes, leaf_order: tuple[int, ...] | None) -> TreeStructure:
    parents = np.frombuffer(parents_bytes, np.int64).tolist()
    depths: list[int] = []
    children: list[list[int]] = [[] for _ in parents]
    ancestor_mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):  # a parent precedes its children, so its mask row is complete
        depths.append(0 if parent < 0 else depths[parent] + 1)
        if parent >= 0:
            children[parent].append(node)
            ancestor_mask[node] |= ancestor_mask[parent]
    leaves = leaf_order if leaf_order is not None else [node for node, below in enumerate(children) if not below]
    leaf_rank = [len(parents)] * len(parents)
    for rank, leaf in enumerate(leaves):
        node = int(leaf)
        while node >= 0 and leaf_rank[node] > rank:  # up to an ancestor that has a leaf of smaller rank
            leaf_rank[node] = rank
            node = parents[node]
    if leaf_order is not None:
        for siblings in children:
            siblings.sort(key=leaf_rank.__getitem__)
    return TreeStructure(
        depths=np.array(depths, np.int64),
        children=tuple(map(tuple, children)),  # the garbage collector need not track tuples of integers
        ancestor_mask=ancestor_mask,
        leaf_rank=np.array(leaf_rank, np.int64),
        is_chain=depths == list(range(len(depths))),
    )


class StaticTreeBuilder:
    """Builder of the draft tree of one sequence, level by level, with a fixed shape."""

    def __init__(self, shape: StaticTreeShape, root: int) -> None:
        self.shape = shape
        self.tokens = np.zeros(shape.num_nodes, np.int64)
        self.has_token = np.zeros(shape.num_nodes, bool)
        self.tokens[0] = root
        self.has_token[0] = True

    def add_children(self, parents: Ints, codes: Ints, scores: Floats) -> None:
        """Store tokens for the children of the nodes of one level.

        Args:
            parents: nodes of the level that have children, int64 `[n]`.
            codes: candidate tokens for the children of each parent, best first, int64 `[n, candidates]`.
            scores: scores of the candidates, float32 `[n, candidates]`; -inf excludes a candidate.
        """
        counts = np.isfinite(scores).sum(1)  # excluded candidates come last, because the best candidates come first
        for slot in np.flatnonzero(self.has_token[parents]).tolist():
            children = self.shape.children[int(parents[slot])][: counts[slot]]
            self.tokens[children] = codes[slot, : len(children)]
            self.has_token[children] = True

    def build(self, proposal: Proposal, greedy: bool) -> DraftTree:
        """Return the draft tree of all nodes that have a token.

        A node has no token if the distribution had too few candidates, or if the image ends before the node. In greedy
        decoding the order of the leaves decides between equally long paths.
        """
        leaf_order = self.shape.leaves if greedy else None
        tree = DraftTree(self.tokens, self.shape.parents, proposal, leaf_order)
        return tree if self.has_token.all() else extract_subtree(tree, np.flatnonzero(self.has_token))


class DynamicTreeBuilder:
    """Builder of the draft tree of one sequence, level by level, along the most probable paths."""

    def __init__(self, root: int) -> None:
        self.tokens = np.array([root])
        self.parents = np.array([-1])
        self.scores = np.zeros(1)  # log-probability of the path to each node
        # Index of each node's parent in the argument `nodes` of the `add_children` call that added the node.
        self.slot_of_parent = np.zeros(1, np.int64)
        self.last_level_start = 0  # first node of the last level

    def add_children(self, nodes: Ints, codes: Ints, log_probabilities: Floats) -> None:
        """Append a new level, which contains the children of `nodes`.

        Args:
            nodes: nodes of the last level that get children, int64 `[nodes]`.
            codes: codes of the children, best first, int64 `[nodes, branch]`.
            log_probabilities: log-probabilities of the codes, `[nodes, branch]`; -inf excludes a child.
        """
        branch = codes.shape[1]
        scores = log_probabilities + self.scores[nodes][:, None]  # log-probability of each path, [nodes, branch]
        possible = np.isfinite(scores).ravel()
        self.last_level_start = len(self.tokens)
        self.tokens = np.concatenate([self.tokens, codes.ravel()[possible]])
        self.scores = np.concatenate([self.scores, scores.ravel()[possible]])
        self.parents = np.concatenate([self.parents, np.repeat(nodes, branch)[possible]])
        slots = np.repeat(np.arange(len(nodes)), branch)[possible]
        self.slot_of_parent = np.concatenate([self.slot_of_parent, slots])

    def choose_best_of_last_level(self, count: int) -> Ints:
        """Return the `count` nodes of the last level with the most probable paths, best first."""
        return self.last_level_start + np.argsort(-self.scores[self.last_level_start :], kind="stable")[:count]

    def prune(self, count: int) -> DraftTree:
        """Return the tree of the root and the `count` - 1 nodes with the most probable paths, in node order."""
        # The best nodes include all their parents: a path is never more probable than the path to its parent, and the
        # stable sort puts the parent first if both are equal. The root is not sorted, so indices are shifted by 1.
        best = np.argsort(-self.scores[1:], kind="stable")[: count - 1] + 1
        return extract_subtree(DraftTree(self.tokens, self.parents), np.concatenate([[0], np.sort(best)]))


def extract_subtree(tree: DraftTree, nodes: Ints) -> DraftTree:
    """Return the tree of `nodes`, in their order; the parent of a node is included and comes before the node."""
    # New index of each old node. The root has parent -1, so the additional last entry is read for it and stays -1.
    new_index = np.full(tree.num_nodes + 1, -1, np.int64)
    new_index[nodes] = np.arange(len(nodes))
    return DraftTree(tree.tokens[nodes], new_index[tree.parents[nodes]], lambda node: tree.proposal(int(nodes[node])))
