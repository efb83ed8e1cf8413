"""How good a drafter is, on pictures that it was not trained on: overlap, ranks, and tokens per forward pass of trees.

At every depth of a chain the drafter's guided distribution q is held against the target's p. Children of a node are
the best of log q + g, with Gumbel noise g, which is a draw without replacement; exact acceptance takes the child that
is the target's own choice, the best of log p + g, and relaxed acceptance tries one after the other as
`runtime/relaxation.py` does. Which child is taken at each code and depth is found with the codes of the data before it.
Steps through a picture then follow: each goes down its tree as far as these children are in it. The true figure, with
the codes that a step itself draws, is that of `lantern-rt bench`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

import torch
from torch import Tensor

from ...bundle.manifest import Manifest
from ...methods import Drafted, LanternPlusPlus
from ...runtime.tree import StaticTree
from ...runtime.tree_names import named_tree
from .losses import overlap

Near = tuple[Tensor, float]
_KINDS = ("exact", "relaxed")
_PAPERS = "balanced-25"  # LANTERN++'s own tree


class Tally:
    """Adds up what is seen of pictures at each depth, as far as some trees go."""

    def __init__(self, trees: Mapping[str, StaticTree]) -> None:
        self.trees = trees
        self.depths = max(len(path) for tree in trees.values() for path in tree.paths)
        self.ranks = 1 + max(max(path) for tree in trees.values() for path in tree.paths)
        self.count = [0] * self.depths
        self.sums = [dict.fromkeys(("overlap", "top-1", "top-3"), 0.0) for _ in range(self.depths)]
        self.tokens: dict[str, list[float]] = {}  # per forward pass, of each picture

    def add(self, seen: Iterable[tuple[Tensor, Tensor]], near: Near | None, generator: torch.Generator) -> None:
        """Guided logits of target and drafter for one picture, depth by depth: `[codes - 1 - depth, vocabulary]` each.

        near: neighbours `[vocabulary, k]` and lambda, for relaxed acceptance.
        """
        taken: dict[str, list[list[int]]] = {kind: [] for kind in _KINDS[: 1 if near is None else 2]}
        for depth, (wanted, logits) in enumerate(seen):
            p, q = wanted.softmax(-1), logits.softmax(-1)
            best = wanted.argmax(-1, keepdim=True)
            self.count[depth] += len(p)
            sums = self.sums[depth]
            sums["overlap"] += float(overlap(p, q).sum())
            sums["top-1"] += float((logits.argmax(-1, keepdim=True) == best).sum())
            sums["top-3"] += float((logits.topk(min(3, logits.shape[1])).indices == best).sum())
            noise = -torch.empty_like(p).exponential_(generator=generator).log()
            children = (logits.log_softmax(-1) + noise).topk(min(self.ranks, p.shape[1])).indices  # [n, ranks]
            hits = children == (wanted.log_softmax(-1) + noise).argmax(-1, keepdim=True)
            taken["exact"].append(torch.where(hits.any(1), hits.int().argmax(1), self.ranks).tolist())
            if near is not None:
                taken["relaxed"].append(relaxed_ranks(p, q, children, *near, generator).tolist())
        for kind, ranks in taken.items():
            for name, tree in self.trees.items():
                rate = (1 + len(ranks[0])) / (1 + steps_through(tree, ranks))  # the first code is the prefill's
                self.tokens.setdefault(f"tokens per pass, {kind}, {name}", []).append(rate)

    def figures(self) -> dict[str, float]:
        """Means over all that was added, and the tokens per forward pass of each tree."""
        counts = [max(1, count) for count in self.count]
        found = {name: value / counts[0] for name, value in self.sums[0].items()}
        found |= {f"overlap at depth {d}": self.sums[d]["overlap"] / counts[d] for d in range(1, self.depths)}
        return found | {name: fmean(rates) for name, rates in self.tokens.items()}


def steps_through(tree: StaticTree, taken: Sequence[Sequence[int]]) -> int:
    """Steps from the first code of a picture to its end, if each goes down the tree as far as its children are taken.

    taken: `[depth][code]`, the rank of the child that is taken at this depth below a root that is this code.
    """
    paths, codes = set(tree.paths), 1 + len(taken[0])
    steps, root = 0, 0
    while root < codes - 1:
        path: tuple[int, ...] = ()
        for ranks in taken[: codes - 1 - root]:
            if (*path, ranks[root]) not in paths:
                break
            path = (*path, ranks[root])
        root += len(path) + 1
        steps += 1
    return steps


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
