"""How good a drafter is, on pictures that it was not trained on: overlap, ranks, and tokens per forward pass of trees.

At every depth of a chain the drafter's guided distribution q is held against the target's p. Children of a node are
the best of log q + g, with Gumbel noise g, which is a draw without replacement; exact acceptance takes the child that
is the target's own choice, the best of log p + g, and relaxed acceptance tries one after the other as
`runtime/relaxation.py` does. What a tree gives follows from how often the child of each rank at each depth is taken, as
if these were independent: 1 + the sum over nodes of the product along its path. The true figure is that of
`lantern-rt bench`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...bundle.manifest import Manifest
from ...methods import Drafted, LanternPlusPlus
from ...runtime.tree import StaticTree
from ...runtime.tree_names import named_tree
from .losses import overlap

Chances = list[list[float]]  # [depth][rank]: how often the child of a rank is the one that is taken
_PAPERS = "balanced-25"  # LANTERN++'s own tree


class Tally:
    """Adds up what was seen at each depth, over batches, as far as some trees go."""

    def __init__(self, trees: Mapping[str, StaticTree]) -> None:
        self.trees = trees
        depths = max(len(path) for tree in trees.values() for path in tree.paths)
        ranks = 1 + max(max(path) for tree in trees.values() for path in tree.paths)
        self.count = [0] * depths
        self.sums = [dict.fromkeys(("overlap", "top-1", "top-3"), 0.0) for _ in range(depths)]
        self.exact, self.relaxed = ([[0] * ranks for _ in range(depths)] for _ in range(2))

    def add(
        self, depth: int, wanted: Tensor, logits: Tensor, near: tuple[Tensor, float] | None, generator: torch.Generator
    ) -> None:
        """Guided logits `[n, codes]` of target and drafter; near: neighbours `[codes, k]` and lambda."""
        p, q = wanted.softmax(-1), logits.softmax(-1)
        best, ranks = wanted.argmax(-1, keepdim=True), len(self.exact[0])
        self.count[depth] += len(p)
        sums = self.sums[depth]
        sums["overlap"] += float(overlap(p, q).sum())
        sums["top-1"] += float((logits.argmax(-1, keepdim=True) == best).sum())
        sums["top-3"] += float((logits.topk(min(3, logits.shape[1])).indices == best).sum())
        noise = -torch.empty_like(p).exponential_(generator=generator).log()
        children = (logits.log_softmax(-1) + noise).topk(min(ranks, p.shape[1])).indices  # [n, ranks]
        choice = (wanted.log_softmax(-1) + noise).argmax(-1, keepdim=True)
        for rank, hits in enumerate((children == choice).sum(0).tolist()):
            self.exact[depth][rank] += hits
        if near is not None:
            taken = relaxed_ranks(p, q, children, *near, generator)
            for rank in range(children.shape[1]):
                self.relaxed[depth][rank] += int((taken == rank).sum())

    def figures(self, relaxation: bool) -> dict[str, float]:
        """Means over all that was added, and the tokens per forward pass of each tree."""
        counts = [max(1, count) for count in self.count]
        found = {name: value / counts[0] for name, value in self.sums[0].items()}
        found |= {f"overlap at depth {d}": self.sums[d]["overlap"] / counts[d] for d in range(1, len(counts))}
        kinds = {"exact": self.exact} | ({"relaxed": self.relaxed} if relaxation else {})
        for kind, hits in kinds.items():
            chances = [[hit / count for hit in row] for row, count in zip(hits, counts, strict=True)]
            found |= {
                f"tokens per pass, {kind}, {name}": tree_tokens(tree, chances) for name, tree in self.trees.items()
            }
        return found


def default_trees(manifest: Manifest) -> dict[str, StaticTree]:
    """The static trees among a bundle's defaults and those of methods."""
    defaults = [method for method in manifest.decoding.methods if isinstance(method, Drafted)]
    names = {*(method.tree for method in defaults), LanternPlusPlus().tree, _PAPERS}
    shapes = {name: named_tree(name) for name in sorted(names)}
    return {name: shape for name, shape in shapes.items() if isinstance(shape, StaticTree)}


def default_relaxation(manifest: Manifest) -> tuple[int, float]:
    """How many neighbours LANTERN++ looks at by a bundle's defaults, and its lambda."""
    own = (method for method in manifest.decoding.methods if isinstance(method, LanternPlusPlus))
    method = next(own, LanternPlusPlus())
    return method.neighbors or 0, method.lambda_ or 1.0


def tree_tokens(tree: StaticTree, chances: Chances) -> float:
    """Tokens that a pass over a tree gives on average."""
    total = 1.0
    for path in tree.paths:
        chance = 1.0
        for depth, rank in enumerate(path):
            chance *= chances[depth][rank]
        total += chance
    return total


def relaxed_ranks(
    p: Tensor, q: Tensor, children: Tensor, neighbors: Tensor, bound: float, generator: torch.Generator
) -> Tensor:
    """Which of `children [n, ranks]` relaxed acceptance takes, `[n]`; as many as there are ranks where it takes none.

    p, q: distributions `[n, codes]`. bound: lambda of LANTERN++.
    """
    rows = torch.arange(len(p), device=p.device)
    taken = torch.full_like(rows, children.shape[1])
    for rank, token in enumerate(children.unbind(1)):
        own, near = p[rows, token], neighbors[token]  # [n], [n, k]
        sums = p.gather(1, near).cumsum(1)
        within = sums <= (bound - 1) * own[:, None]
        aggregated = (sums * within).amax(1)
        uniform = torch.rand(len(p), generator=generator, device=p.device)
        accepted = uniform * q[rows, token].clamp_min(1e-30) < own + aggregated
        taken = torch.where(accepted & (taken == children.shape[1]), rank, taken)
        left = p.scatter(1, near, p.gather(1, near) * ~within)
        left = (left - q).clamp_min(0).scatter(1, token[:, None], 0)
        p = _normalised(left, p)
        q = _normalised(q.scatter(1, token[:, None], 0), q)
    return taken


def _normalised(left: Tensor, otherwise: Tensor) -> Tensor:
    """`left` scaled to sum 1, or `otherwise` where nothing is left."""
    total = left.sum(1, keepdim=True)
    return torch.where(total > 0, left / total.clamp_min(1e-30), otherwise)
