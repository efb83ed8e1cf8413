"""Dynamic trees while they grow, and trees of some nodes of others."""

from __future__ import annotations

from functools import partial

import numpy as np

from .engine import Floats, Ints
from .tree import DraftTree, Proposals


class Growth:
    """A dynamic tree of one request while it grows; node 0 is the root."""

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self.scores = np.array([root]), np.array([-1]), np.zeros(1)
        self.slot_of_parent = np.zeros(1, np.int64)  # slot of a node's parent among those expanded last
        self.last_level = 0  # its first node

    def add_children(self, nodes: Ints, codes: Ints, log_probabilities: Floats) -> None:
        """Give each of `nodes` its children: codes and log-probabilities `[nodes, branch]`, best first."""
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
    proposals = {int(renumber[node]): partial(tree.proposals.__getitem__, node) for node in tree.proposals}
    return DraftTree(tree.tokens[kept], renumber[tree.parents[kept]], Proposals(proposals))
