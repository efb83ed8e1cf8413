"""Which drafted codes are accepted: exactly, or relaxed by what neighbours in the codebook lend.

One walk down a draft tree per request and step. Without a `Relaxation` the target's distribution is left
unchanged (speculative sampling with siblings). With one, a drafted code x borrows the probability of A, the
longest nearest-first run of its neighbours whose sum stays within a bound: `delta` (LANTERN, ICLR 2025)
or (lambda_ - 1) p(x) (LANTERN++).

What the relaxation costs is known exactly. With p the target's and q the drafter's distribution, accept x
with probability a'(x) = min(1, (p(x) + p(A)) / q(x)) instead of a(x) = min(1, p(x) / q(x)), and on rejection
remove x and A from max(p - q, 0): the total variation distance between the step's output and p is then the
expectation of a'(x) - a(x) over the draft. (Derived here; tests enumerate it.) With q = 1 that is p(A) <=
delta. With a real q, lambda_ - 1 bounds it but delta does not, as every code that can be drafted brings a
loan of its own. Every further sibling adds its own term, weighted by the chance that it is tried, and the
distance is at most the sum. The published code removes k + 1 neighbours instead of A;
`residual="neighborhood"` does that, for comparison: it can move the output by more than the bound.

Annealed relaxation (Cool-SD, arXiv 2601.09212) multiplies p / q by omega >= 1, less and less down the path:
a'(x) = min(1, omega_d (p(x) + p(A)) / q(x)) at depth d. Its residual is the exact one, max(p - q, 0) without x
and A: what is accepted too often, min(q, omega p) above p, and what the residual gives never meet at a code, so
that no other residual brings the output closer to p. The distance is again the expectation of a' - a, and that
is sum over x of min(q, omega p) - min(q, p) without neighbours: at most 1 - 1 / omega for a sampled draft, and
at most (omega - 1) p(x) for a certain one. With lambda_ too it is at most 1 - 1 / (omega lambda_).

Does not know engines, logits or how the tree was drafted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from .sampling import Probabilities, draw
from .tree import DraftTree

Distribution = Callable[[int], Probabilities]
_NOBODY = np.zeros(0, np.int64)


class Uniforms(Protocol):
    """A source of uniform numbers in [0, 1): a generator, or recorded numbers in a test."""

    def random(self) -> float:
        """The next number."""
        ...


@dataclass(frozen=True)
class Relaxation:
    """How far acceptance may stray.

    neighbors: table of neighbours, nearest first, self excluded, integers `[vocabulary, k]`, or None where
    nobody lends; k is how many may lend. delta: bound in (0, 1) on what they lend. lambda_: bound > 1 on
    (p(x) + lent) / p(x). Exactly one of the two is set if there are neighbours. residual: what a rejection
    removes: `borrowed` (x and A) or `neighborhood` (the published code: k + 1 neighbours, from q where there is
    one). omega: factor >= 1 on the chance to accept the first drafted code; anneal: in [0, 1], the share of
    omega - 1 that each further depth keeps.
    """

    neighbors: NDArray[np.integer] | None = None
    k: int = 0
    delta: float | None = None
    lambda_: float | None = None
    residual: Literal["borrowed", "neighborhood"] = "borrowed"
    omega: float = 1.0
    anneal: float = 1.0

    def factor(self, depth: int) -> float:
        """omega_d for a candidate at `depth`, 0 for the children of the root.

        1 + (omega - 1) anneal^d: the paper lets omega fall with depth; that it falls geometrically towards exact
        acceptance, never below, is the choice made here.
        """
        return 1.0 + (self.omega - 1.0) * self.anneal**depth

    def lenders(self, p: Probabilities, code: int) -> NDArray[np.integer]:
        """A: the longest nearest-first run of neighbours of `code` whose summed p stays within the bound."""
        if self.neighbors is None:
            return _NOBODY
        near = self.neighbors[code, : self.k]
        bound = self.delta if self.delta is not None else ((self.lambda_ or 1.0) - 1.0) * p[code]
        return near[: int(p[near].cumsum().searchsorted(bound, "right"))]


@dataclass(frozen=True)
class Acceptance:
    """Outcome of one walk.

    path: accepted nodes, the root first. bonus: the code drawn after them. realised_tvd: summed a' - a over
    the candidates tried (greedy: codes accepted that are not the arg-max). tried: candidates looked at.
    remainder: the distribution the bonus was drawn from (greedy: the node's own distribution).
    """

    path: list[int]
    bonus: int
    realised_tvd: float
    tried: int
    remainder: Probabilities


def walk(
    tree: DraftTree,
    target: Distribution,
    relaxation: Relaxation | None,
    accept: Uniforms,
    residual: np.random.Generator,
) -> Acceptance:
    """Walk down from the root, one child at a time; sampling.

    `target(node)` is the target's distribution after `node`; it is asked for visited nodes only. One number
    of `accept` is drawn for every candidate, also for one that q says cannot have been drawn.
    """
    path, tvd, tried = [0], 0.0, 0
    while True:
        node = path[-1]
        p = target(node)
        q = tree.proposals.get(node)
        siblings = tree.children[node]
        for child in siblings:
            code = int(tree.tokens[child])
            uniform = accept.random()
            draft = 1.0 if q is None else float(q[code])
            if draft <= 0:
                continue
            tried += 1
            lenders = _NOBODY if relaxation is None else relaxation.lenders(p, code)
            exact = relaxed = min(1.0, float(p[code]) / draft)
            if relaxation is not None:
                factor = relaxation.factor(len(path) - 1)
                relaxed = min(1.0, factor * float(p[code] + p[lenders].sum()) / draft)
            tvd += relaxed - exact
            if uniform < relaxed:
                path.append(child)
                break
            p = _rest(p, q, code, lenders, relaxation)
            if q is not None and child != siblings[-1]:
                q = _without(q, code)
        if path[-1] == node:  # no child, or none accepted
            return Acceptance(path, draw(p, residual), tvd, tried, p)


def _rest(
    p: Probabilities,
    q: Probabilities | None,
    code: int,
    lenders: NDArray[np.integer],
    relaxation: Relaxation | None,
) -> Probabilities:
    """What is left of p after `code` was refused."""
    published = relaxation is not None and relaxation.residual == "neighborhood"
    removed = q
    left = p.copy()
    if len(lenders):
        assert relaxation is not None
        assert relaxation.neighbors is not None
        if not published:
            left[lenders] = 0
        elif q is None:
            left[relaxation.neighbors[code, : relaxation.k + 1]] = 0
        else:
            removed = q.copy()
            removed[relaxation.neighbors[code, : relaxation.k + 1]] = 0
    if removed is not None:
        left -= removed
        np.maximum(left, 0, out=left)
    if removed is None or not published:
        left[code] = 0
    return _normalised(left, np.ones_like(p) if published else p)


def _without(q: Probabilities, code: int) -> Probabilities:
    """q for the next sibling, after `code` was refused."""
    left = q.copy()
    left[code] = 0
    return _normalised(left, left)


def residual_distribution(p: Probabilities, q: Probabilities | None, code: int) -> Probabilities:
    """What a refused draft leaves: max(p - q, 0) scaled to sum 1; q = None says that `code` was certain."""
    return _rest(p, q, code, _NOBODY, None)


def _normalised(weights: Probabilities, otherwise: Probabilities) -> Probabilities:
    """`weights` scaled to sum 1, or `otherwise` where rounding has left nothing."""
    total = weights.sum()
    scaled: Probabilities = weights / total if total > 0 else otherwise / max(otherwise.sum(), 1e-300)
    return scaled


def walk_greedy(tree: DraftTree, target: Distribution, relaxation: Relaxation | None) -> Acceptance:
    """The longest path whose every code is the arg-max, or is once its neighbours have lent to it (times omega_d).

    Ties go to the path with the first leaf. The bonus is the arg-max after the path's end, unrelaxed.
    """
    best: tuple[int, int] = (0, 0)
    end, tried, best_tvd = 0, 0, 0.0
    open_nodes = [(0, 0.0)]
    seen: dict[int, Probabilities] = {}
    while open_nodes:
        node, tvd = open_nodes.pop()
        key = (-int(tree.depths[node]), int(tree.leaf_rank[node]))
        if node == 0 or key < best:
            best, end, best_tvd = key, node, tvd
        if not tree.children[node]:
            continue
        p = seen[node] = target(node)
        top = int(p.argmax())
        for child in tree.children[node]:
            code = int(tree.tokens[child])
            tried += 1
            if code == top:
                open_nodes.append((child, tvd))
            elif relaxation is not None:
                lent = float(p[relaxation.lenders(p, code)].sum())
                if relaxation.factor(int(tree.depths[node])) * (p[code] + lent) > p[top]:
                    open_nodes.append((child, tvd + 1.0))
    remainder = seen[end] if end in seen else target(end)
    return Acceptance(tree.path_to(end), int(remainder.argmax()), best_tvd, tried, remainder)
