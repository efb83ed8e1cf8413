"""Exact probabilities of acceptance steps: `Script` enumerates all random choices, so nothing is sampled."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from numpy.typing import NDArray
from toy_script import Script

from lantern_rt.runtime import acceptance
from lantern_rt.runtime.acceptance import Acceptance, RelaxationSettings, verify_tree_relaxed
from lantern_rt.runtime.sampling import Probabilities
from lantern_rt.runtime.tree import DraftTree

EXACT_RULE = RelaxationSettings(np.zeros((1 << 16, 0), np.int64), 0, lambda_=2.0)  # no token has neighbours
MANY_TOKENS = 1 << 30  # more remaining tokens than any step can commit
TOLERANCE = 1e-9  # products of conditional probabilities have a relative error of about 1e-12


def enumerate_outcomes(tree: DraftTree, target: Any, rule: RelaxationSettings) -> Iterator[tuple[float, Acceptance]]:
    """Yield every outcome of `verify_tree_relaxed` with its probability, and the bonus token's distribution in it."""
    total = 0.0
    for script in Script(seed=0).follow_all_plans():
        script.follows_plan = True
        stream: Any = script
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(acceptance, "sample_code", lambda distribution, stream: 0)
            streams = dict.fromkeys(range(tree.num_nodes), stream)
            accepted = verify_tree_relaxed(tree, target, lambda node: 0, rule, streams.__getitem__, MANY_TOKENS)
        total += script.weight
        yield script.weight, accepted
    assert total == pytest.approx(1)


def enumerate_ordered_samples(q: Probabilities, count: int) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Yield every ordered sample of `count` tokens without replacement from `q`, with its probability."""
    support = np.flatnonzero(q).tolist()
    for codes in itertools.permutations(support, min(count, len(support))):
        weight = 1.0
        remaining = 1.0
        for code in codes:
            weight *= q[code] / remaining
            remaining -= q[code]
        yield weight, codes


def compute_step_distribution(
    p: Probabilities, drafts: list[tuple[float, tuple[int, ...]]], q: Probabilities | None, rule: RelaxationSettings
) -> tuple[Probabilities, float]:
    """Return the exact distribution of the first committed token, and the expected TVD that the step reports."""
    output = np.zeros_like(p)
    realised = 0.0
    for draft_probability, codes in drafts:
        tree = DraftTree(np.array([0, *codes]), np.array([-1] + [0] * len(codes)), lambda node: q)
        for outcome_probability, accepted in enumerate_outcomes(tree, lambda node: p, rule):
            realised += draft_probability * outcome_probability * accepted.realised_tvd
            if len(accepted.path) > 1:
                output[tree.tokens[accepted.path[1]]] += draft_probability * outcome_probability
            else:
                output += draft_probability * outcome_probability * accepted.bonus_distribution
    return output, realised


def compute_tvd(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    return float(np.abs(a - b).sum() / 2)


@st.composite
def generate_distributions(draw: st.DrawFn, size: int) -> Probabilities:
    """Generate distributions over `size` tokens, with zeros, ties and wide ranges."""
    weight = st.one_of(st.just(0.0), st.sampled_from([1.0, 2.0]), st.floats(1e-4, 1.0), st.floats(1.0, 50.0))
    weights = np.array(draw(st.lists(weight, min_size=size, max_size=size)))
    if weights.sum() == 0:
        weights[draw(st.integers(0, size - 1))] = 1
    return weights / weights.sum()


@st.composite
def generate_relaxation_settings(draw: st.DrawFn, size: int) -> RelaxationSettings:
    """Generate rules of relaxed acceptance for a vocabulary of `size` tokens."""
    neighbors = [draw(st.permutations([c for c in range(size) if c != code])) for code in range(size)]
    count = draw(st.integers(1, size - 1))
    if draw(st.booleans()):
        return RelaxationSettings(np.array(neighbors), count, delta=draw(st.floats(0.01, 0.99)))
    return RelaxationSettings(np.array(neighbors), count, lambda_=draw(st.floats(1.01, 8.0)))
