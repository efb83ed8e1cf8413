"""Acceptance of drafts: find the path of a draft tree that the target accepts, exactly or relaxed.

Exact acceptance: a draft token is accepted if and only if it is the target's choice. The choice after a node is a
function of the target's distribution there and of the noise of the position, see `noise.py`. So is every choice of
plain decoding. Whatever was drafted, a walk therefore ends on the tokens of plain decoding: drafts decide how many
passes are needed, never which tokens are generated.

Relaxed acceptance, as published: a draft token x may borrow the probability of its neighbours in the codebook. It is
speculative sampling with siblings, by rejection, in which the probability of A is added to the probability of x. The
aggregation set A of x is the longest nearest-first run of its neighbours whose summed probability stays within a bound.
The bound is `delta` (LANTERN, ICLR 2025) or (lambda - 1) p(x) (LANTERN++).

The total variation distance between the output of relaxed acceptance and the target's distribution is known exactly.
Let p be the target's and q the drafter's distribution. Exact acceptance accepts x with probability a(x) = min(1, p(x) /
q(x)). Relaxed acceptance accepts x with probability a'(x) = min(1, (p(x) + p(A)) / q(x)); a rejection removes x and A
from max(p - q, 0). For one *candidate*, the distance from p is the expectation of a'(x) - a(x) over the draft. (Derived
here; tests enumerate it.) With q = 1 it is p(A) <= delta. With a sampled draft, delta does not bound it, because every
token that can be drafted has another aggregation set; lambda does, see below. Every further sibling adds a term,
weighted by the probability that it is tried, and the distance of the *token* is at most the sum. With q = 1, k siblings
reach 1 - (1 - delta)^k, because the next sibling is tried with probability at most 1 - p(A). The published code removes
k + 1 neighbours instead of A. `residual="neighborhood"` reproduces that for comparison; nothing bounds its distance.

With lambda, a >= a' / lambda for every token, so a' - a <= c a' with c = 1 - 1 / lambda. This holds for each sibling,
and the probabilities that the siblings are accepted add up to at most 1. So the distribution of a *token* moves by at
most c, whatever the number of siblings. Let a *step* relax d tokens, each by at most b given the tokens before it.
Their joint distribution then moves by at most 1 - (1 - b)^d: couple them token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import RequestError
from ..methods import MethodConfig, RelaxedMethod, Residual
from .sampling import Probabilities, sample_code
from .tree import DraftTree

NodeDistribution = Callable[[int], Probabilities]
Codes = NDArray[np.integer]


class Acceptance(NamedTuple):
    """Outcome of one walk."""

    path: list[int]  # accepted nodes, the root first
    bonus_token: int | None  # token sampled after the path; None if the path ends the image
    realised_tvd: float = 0.0  # total variation distance that relaxed acceptance gave away
    # distribution of the bonus under relaxed acceptance; None without a bonus, and for exact acceptance
    bonus_distribution: Probabilities | None = None
    relaxed_nodes: Sequence[int] = ()  # nodes of the path that exact acceptance would have rejected
    # the target's probability of each draft token of the path; empty for exact acceptance, which reads no probabilities
    target_probabilities: Sequence[float] = ()


def verify_tree_exact(tree: DraftTree, choose_token: Callable[[int], int], max_tokens: int) -> Acceptance:
    """Walk down the tree for as long as the target's `choose_token(node)` is among the children of the node.

    Args:
        choose_token: function from a node to the token that the target samples after it.
        max_tokens: maximum number of tokens to accept, the tree's known tokens included.
    """
    path = [*range(1 + tree.num_preserved_tokens)]
    while len(path) <= max_tokens:
        token = choose_token(path[-1])
        for child in tree.tree_structure.children[path[-1]]:
            if tree.tokens[child] == token:
                path.append(child)
                break
        else:
            return Acceptance(path, token)
    return Acceptance(path, None)


@dataclass(frozen=True)
class RelaxationSettings:
    """Bounds of relaxed acceptance. Exactly one of `delta` and `lambda_` is set."""

    neighbors: Codes  # table of neighbours, nearest first, self excluded, integers `[vocab_size, at least k]`
    k: int  # number of neighbours considered
    delta: float | None = None  # bound in (0, 1) on p(A)
    lambda_: float | None = None  # bound > 1 on (p(x) + p(A)) / p(x)
    # Codes that a rejection removes from p: `aggregation_set` (x and A), or as the published code does, `neighborhood`
    # (k + 1 neighbours, removed from q instead if the draft was sampled)
    residual: Residual = "aggregated"

    @classmethod
    def from_method(cls, method: MethodConfig, neighbors: Codes | None) -> RelaxationSettings:
        """Return the relaxation of a relaxed method; `neighbors` is the bundle's table.

        Raises:
            RequestError: the model was loaded without the table.
        """
        assert isinstance(method, RelaxedMethod)
        if neighbors is None:
            problem = "reads a table of neighbours, which the model was loaded without"
            raise RequestError(problem, field="method", remedy="name the method when the model is loaded")
        return cls(neighbors, method.neighbors or 0, *method.acceptance_bounds, method.residual or "aggregated")

    def find_aggregation_set(self, target_probabilities: Probabilities, token: int) -> Codes:
        """Return A, the longest nearest-first run of neighbours of `token` whose summed p stays within the bound."""
        nearest_codes = self.neighbors[token, : self.k]
        bound = self.delta if self.delta is not None else ((self.lambda_ or 1.0) - 1.0) * target_probabilities[token]
        return nearest_codes[: int(target_probabilities[nearest_codes].cumsum().searchsorted(bound, "right"))]


def verify_tree_relaxed(
    tree: DraftTree,
    target_distribution: NodeDistribution,
    choose_token: Callable[[int], int],
    relaxation: RelaxationSettings,
    acceptance_rng: Callable[[int], np.random.Generator],
    max_tokens: int,
) -> Acceptance:
    """Walk down from the root with relaxed acceptance of sampled tokens, one child at a time.

    Args:
        target_distribution: function from a node to the target's distribution after it; called for visited nodes only.
        choose_token: function from a node to the target's token after it, called only for a leaf: nothing was rejected
            there.
        relaxation: bounds of relaxed acceptance.
        acceptance_rng: function from a node to the random stream that decides on its children. Every child uses one
            number, even if q gives its token probability 0. The token sampled after their rejection uses one more.
        max_tokens: maximum number of tokens to accept; later tokens do not count in the distance.
    """
    path = [*range(1 + tree.num_preserved_tokens)]  # preserved tokens are a chain below the root and need no acceptance
    relaxed_nodes: list[int] = []
    accepted_p: list[float] = []
    tvd = 0.0
    while len(path) <= max_tokens:
        node = path[-1]
        # Each rejection replaces p by the residual distribution, from which the next sibling is judged.
        p = before_rejections = target_distribution(node)
        siblings = tree.tree_structure.children[node]
        if not siblings:
            return Acceptance(path, choose_token(node), tvd, p, relaxed_nodes, accepted_p)
        q = tree.proposal(node)
        stream = acceptance_rng(node)
        for child in siblings:
            token = int(tree.tokens[child])
            # The number is taken before the token is skipped, so that it belongs to the child whatever q is.
            uniform = stream.random()
            draft = 1.0 if q is None else float(q[token])
            if draft <= 0:
                continue
            aggregation_set = relaxation.find_aggregation_set(p, token)
            exact = min(1.0, float(p[token]) / draft)  # a(x) of the module's docstring
            relaxed = min(1.0, float(p[token] + p[aggregation_set].sum()) / draft)  # a'(x)
            tvd += relaxed - exact
            if uniform < relaxed:
                path.append(child)
                accepted_p.append(float(before_rejections[token]))
                if relaxed > exact and not uniform < exact:
                    relaxed_nodes.append(child)
                break
            if relaxation.residual == "neighborhood":
                nearest_codes = relaxation.neighbors[token, : relaxation.k + 1]
                p = _compute_published_residual(p, q, token, nearest_codes if len(aggregation_set) else aggregation_set)
            else:
                p = residual_distribution(p, q, token, aggregation_set)
            if q is not None and child != siblings[-1]:
                # Siblings were sampled without replacement, so the next one came from q without this token.
                q = q.copy()
                q[token] = 0
                q = _normalize_weights(q, q)
        if path[-1] == node:  # none accepted
            return Acceptance(path, sample_code(p, stream), tvd, p, relaxed_nodes, accepted_p)
    return Acceptance(path, None, tvd, None, relaxed_nodes, accepted_p)


def residual_distribution(
    p: Probabilities, q: Probabilities | None, token: int, aggregation_set: Codes
) -> Probabilities:
    """Return the residual distribution after `token` is rejected.

    It is max(p - q, 0) without `token` and its aggregation set, scaled to sum 1.

    Args:
        p: target distribution, `[vocab_size]`.
        q: distribution that the token was sampled from, `[vocab_size]`; None if it was not sampled (q = 1).
        aggregation_set: aggregation set of the token.
    """
    residual = p.copy()
    residual[aggregation_set] = 0
    if q is not None:
        residual -= q
        np.maximum(residual, 0, out=residual)
    residual[token] = 0
    return _normalize_weights(residual, p)


def _compute_published_residual(
    p: Probabilities, q: Probabilities | None, token: int, nearest_codes: Codes
) -> Probabilities:
    """Return the residual of LANTERN's published code, which removes `nearest_codes` from q, or from p without a q."""
    residual = p.copy()
    if q is None:
        residual[nearest_codes] = 0
        residual[token] = 0
    else:
        removed = q.copy()
        removed[nearest_codes] = 0
        residual -= removed
        np.maximum(residual, 0, out=residual)
    return _normalize_weights(residual, np.ones_like(p))


def _normalize_weights(weights: Probabilities, fallback: Probabilities) -> Probabilities:
    """Scale `weights` to sum 1, or `fallback` if rounding made all weights 0."""
    total = float(weights.sum())
    return weights / total if total > 0 else fallback / max(float(fallback.sum()), 1e-300)


def verify_tree_greedy(
    tree: DraftTree, target_distribution: NodeDistribution, relaxation: RelaxationSettings, max_tokens: int
) -> Acceptance:
    """Find the longest path on which every token is the arg-max, alone or with its aggregation set added.

    Ties go to the path with the first leaf. The bonus is the arg-max after the path's end, unrelaxed. Every relaxed
    token counts 1 in the distance.

    Args:
        target_distribution: function from a node to the target's distribution after it.
        relaxation: bounds of relaxed acceptance.
        max_tokens: maximum number of tokens to accept; the path is cut there.
    """
    reached = [tree.num_preserved_tokens]  # the last preserved node, or the root
    distributions: dict[int, Probabilities] = {}
    for node in reached:  # grows while it is read: a walk over the whole tree, level by level
        if not tree.tree_structure.children[node]:
            continue
        p = distributions[node] = target_distribution(node)
        top = int(p.argmax())
        for child in tree.tree_structure.children[node]:
            token = int(tree.tokens[child])
            if token == top or p[token] + float(p[relaxation.find_aggregation_set(p, token)].sum()) > p[top]:
                reached.append(child)
    end = min(reached, key=lambda node: (-tree.tree_structure.depths[node], tree.tree_structure.leaf_rank[node]))
    path = tree.path_to(end)[: max_tokens + 1]  # the root is no token to accept
    steps = list(pairwise(path[tree.num_preserved_tokens :]))
    relaxed = [child for node, child in steps if tree.tokens[child] != distributions[node].argmax()]
    accepted_p = [float(distributions[node][tree.tokens[child]]) for node, child in steps]
    if len(path) > max_tokens:
        return Acceptance(path, None, float(len(relaxed)), None, relaxed, accepted_p)
    bonus_distribution = distributions[end] if end in distributions else target_distribution(end)
    return Acceptance(
        path, int(bonus_distribution.argmax()), float(len(relaxed)), bonus_distribution, relaxed, accepted_p
    )
