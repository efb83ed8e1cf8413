"""Acceptance of drafts: find the path of a draft tree that the target accepts, with exact or relaxed acceptance.

Exact acceptance accepts a draft token if and only if it is the token that the target chooses. The chosen token depends
only on the target's distribution and on the noise of the position, see `noise.py`. The same is true in autoregressive
decoding. So the accepted tokens are the tokens of autoregressive decoding, whatever was drafted. Drafts decide how many
passes are needed, but never which tokens are generated.

Relaxed acceptance, as published, adds to the probability of a draft token x the probability of its neighbours in the
codebook. It is speculative sampling that tries one sibling after another, with p(x) + p(A) in place of p(x). Here A is
the aggregation set of x. A consists of the nearest neighbours of x, as many as possible while their summed probability
stays within a bound. The bound is `delta` (LANTERN, ICLR 2025) or (lambda - 1) p(x) (LANTERN++).

The total variation distance between the output of relaxed acceptance and the target's distribution is known exactly.
Let p be the target's distribution, and q the drafter's distribution. Exact acceptance accepts x with probability
a(x) = min(1, p(x) / q(x)). Relaxed acceptance accepts x with probability a'(x) = min(1, (p(x) + p(A)) / q(x)). A
rejection removes x and A from max(p - q, 0). For one *candidate*, the distance from p is the expectation of
a'(x) - a(x) over the draft token x. (Derived here; tests enumerate it.) With q = 1 the distance is p(A) <= delta. With
a sampled draft token, delta does not bound the distance, because every possible draft token has a different aggregation
set. But lambda bounds the distance, see below.

Every further sibling adds a term, weighted by the probability that the sibling is tried. The distance of the *token* is
at most the sum of the terms. With q = 1, k siblings reach at most 1 - (1 - delta)^k, because the next sibling is tried
with probability at most 1 - p(A). The published code removes k + 1 neighbours instead of A.
`residual="neighborhood"` reproduces the published code for comparison, but nothing bounds its distance.

With lambda, a >= a' / lambda for every token, so a' - a <= c a' with c = 1 - 1 / lambda. This holds for each sibling,
and the probabilities that the siblings are accepted add up to at most 1. So the distribution of a *token* moves by at
most c, whatever the number of siblings. Assume that a *step* relaxes d tokens, and moves each token by at most b, given
the tokens before it. Then their joint distribution moves by at most 1 - (1 - b)^d, by coupling token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import EngineError, RequestError
from ..methods import MethodConfig, RelaxedMethod, Residual
from .sampling import Probabilities, sample_code
from .tree import DraftTree

NodeDistribution = Callable[[int], Probabilities]  # a node -> the target's distribution after the node
Codes = NDArray[np.integer]


class Acceptance(NamedTuple):
    """Result of verifying a draft tree."""

    path: list[int]  # accepted nodes, the root first
    bonus_token: int | None  # token sampled after the path; None if the path has the maximum number of tokens
    # Total variation distance from the target's distribution that relaxed acceptance caused in this tree, summed.
    realised_tvd: float = 0.0
    # Distribution of the bonus token with relaxed acceptance; None without a bonus token, and for exact acceptance.
    bonus_distribution: Probabilities | None = None
    relaxed_nodes: Sequence[int] = ()  # nodes of the path that exact acceptance would have rejected
    # The target's probability of each draft token of the path; empty for exact acceptance, which does not need it.
    target_probabilities: Sequence[float] = ()


def verify_tree_exact(tree: DraftTree, choose_token: Callable[[int], int], max_tokens: int) -> Acceptance:
    """Find the path of draft tokens that equal the tokens that the target chooses.

    Args:
        choose_token: function from a node to the token that the target chooses after the node.
        max_tokens: maximum number of tokens to accept, including the preserved tokens of the tree.
    """
    # Preserved tokens are a chain below the root and need no acceptance.
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
    """Parameters of relaxed acceptance for draft token x, target distribution p and aggregation set A.

    Exactly one of `delta` and `lambda_` is set.
    """

    # Neighbours of each code in the codebook, nearest first, the code itself excluded, `[vocab_size, at least k]`.
    neighbors: Codes
    k: int  # maximum number of neighbours in an aggregation set
    delta: float | None = None  # upper bound on p(A), in (0, 1)
    lambda_: float | None = None  # upper bound on (p(x) + p(A)) / p(x), greater than 1
    # Codes that a rejection removes from p. `aggregated`: x and A. `neighborhood`: k + 1 neighbours as in the published
    # code, which removes them from q instead if the draft token was sampled.
    residual: Residual = "aggregated"

    @classmethod
    def from_method(cls, method: MethodConfig, neighbors: Codes | None) -> RelaxationSettings:
        """Return a method's parameters, or raise RequestError if the model was loaded without a table of neighbours."""
        assert isinstance(method, RelaxedMethod)
        if neighbors is None:
            problem = "reads a table of neighbours, which the model was loaded without"
            raise RequestError(problem, field="method", remedy="name the method when the model is loaded")
        return cls(neighbors, method.neighbors or 0, *method.acceptance_bounds, method.residual or "aggregated")

    def find_aggregation_set(self, target_probabilities: Probabilities, token: int) -> Codes:
        """Return the nearest neighbours of a draft token whose summed probability is within the bound."""
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
    """Find the accepted path with relaxed acceptance of sampled tokens, trying one child after another.

    Args:
        target_distribution: called only for visited nodes.
        choose_token: called only for a leaf, after which no draft token was rejected.
        acceptance_rng: function from a node to the random number generator that decides on the node's children. Every
            child uses one number, even if q gives its token probability 0. If all children are rejected, one more
            number samples the token after the node.
        max_tokens: maximum number of tokens to accept; later tokens do not count in the total variation distance.
    """
    # Preserved tokens are a chain below the root and need no acceptance.
    path = [*range(1 + tree.num_preserved_tokens)]
    relaxed_nodes: list[int] = []
    accepted_p: list[float] = []
    tvd = 0.0
    while len(path) <= max_tokens:
        node = path[-1]
        # Each rejection replaces p by the residual distribution, with which the next sibling is verified.
        p = before_rejections = target_distribution(node)
        siblings = tree.tree_structure.children[node]
        if not siblings:
            return Acceptance(path, choose_token(node), tvd, p, relaxed_nodes, accepted_p)
        q = tree.proposal(node)
        stream = acceptance_rng(node)
        for child in siblings:
            token = int(tree.tokens[child])
            # The number is read before the token may be skipped, so that every child has the same number for every q.
            uniform = stream.random()
            draft = 1.0 if q is None else float(q[token])  # q(x)
            if draft <= 0:
                continue  # q cannot have sampled this token
            aggregation_set = relaxation.find_aggregation_set(p, token)
            exact = min(1.0, float(p[token]) / draft)  # a(x) in the module's docstring
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
                p = compute_residual_distribution(p, q, token, aggregation_set)
            if q is not None and child != siblings[-1]:
                # Siblings were sampled without replacement, so the next one came from q without this token.
                q = q.copy()
                q[token] = 0
                q = _normalize_weights(q, q)
        if path[-1] == node:  # no child was accepted
            return Acceptance(path, sample_code(p, stream), tvd, p, relaxed_nodes, accepted_p)
    return Acceptance(path, None, tvd, None, relaxed_nodes, accepted_p)


def compute_residual_distribution(
    p: Probabilities, q: Probabilities | None, token: int, aggregation_set: Codes
) -> Probabilities:
    """Return the residual distribution, from which a token is sampled after `token` was rejected.

    The residual distribution is max(p - q, 0) without `token` and its aggregation set, scaled to sum 1. If q is None,
    the token was not sampled (q = 1), and q is not subtracted.
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
    """Return the residual distribution of LANTERN's published code, see `RelaxationSettings`."""
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
    """Find the longest path that relaxed acceptance of greedy decoding accepts.

    The arg-max of the target's distribution is accepted. Another token is accepted if the summed probability of the
    token and its aggregation set exceeds the probability of the arg-max. Among equally long paths, the path with the
    first leaf is accepted. The bonus token is the arg-max after the path. Every token that only relaxed
    acceptance accepts counts 1 in the total variation distance. A path longer than `max_tokens` is cut.
    """
    reached = [tree.num_preserved_tokens]  # the last preserved node, or the root
    distributions: dict[int, Probabilities] = {}
    # The loop appends to the list that it iterates over, and so visits all accepted nodes, level by level.
    for node in reached:
        if not tree.tree_structure.children[node]:
            continue
        try:
            p = distributions[node] = target_distribution(node)
        except EngineError:
            continue  # the logits are NaN, which is an error only if the accepted path ends here
        top = int(p.argmax())
        for child in tree.tree_structure.children[node]:
            token = int(tree.tokens[child])
            if token == top or p[token] + float(p[relaxation.find_aggregation_set(p, token)].sum()) > p[top]:
                reached.append(child)
    end = min(reached, key=lambda node: (-tree.tree_structure.depths[node], tree.tree_structure.leaf_rank[node]))
    path = tree.path_to(end)[: max_tokens + 1]  # + 1 for the root
    steps = list(pairwise(path[tree.num_preserved_tokens :]))
    relaxed = [child for node, child in steps if tree.tokens[child] != distributions[node].argmax()]
    accepted_p = [float(distributions[node][tree.tokens[child]]) for node, child in steps]
    if len(path) > max_tokens:
        return Acceptance(path, None, float(len(relaxed)), None, relaxed, accepted_p)
    bonus_distribution = distributions[end] if end in distributions else target_distribution(end)
    return Acceptance(
        path, int(bonus_distribution.argmax()), float(len(relaxed)), bonus_distribution, relaxed, accepted_p
    )
