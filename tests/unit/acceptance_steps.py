"""Acceptance steps enumerated: `Script` stands in for the stream of uniforms, and nothing is sampled."""

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
from lantern_rt.runtime.acceptance import Acceptance, Relaxation, walk_relaxed
from lantern_rt.runtime.sampling import Probabilities
from lantern_rt.runtime.tree import DraftTree

EXACT = Relaxation(np.zeros((1 << 16, 0), np.int64), 0, lambda_=2.0)  # no code has neighbours
MANY = 1 << 30  # codes that the picture still needs
TOLERANCE = 1e-9  # conditional chances of draws cancel to about 1e-12 relative


def enumerated(tree: DraftTree, target: Any, rule: Relaxation) -> Iterator[tuple[float, Acceptance]]:
    """Every outcome of `walk_relaxed` with its probability; the bonus stays a distribution, `remainder`."""
    total = 0.0
    for script in Script(seed=0).runs():
        script.armed = True
        stream: Any = script
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(acceptance, "sample", lambda distribution, stream: 0)
            streams = dict.fromkeys(range(tree.nodes), stream)
            accepted = walk_relaxed(tree, target, lambda node: 0, rule, streams.__getitem__, MANY)
        total += script.weight
        yield script.weight, accepted
    assert total == pytest.approx(1)


def orders(q: Probabilities, count: int) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Every outcome of `count` draws without replacement from q, with its probability."""
    support = np.flatnonzero(q).tolist()
    for codes in itertools.permutations(support, min(count, len(support))):
        weight = 1.0
        left = 1.0
        for code in codes:
            weight *= q[code] / left
            left -= q[code]
        yield weight, codes


def step_output(
    p: Probabilities, drafts: list[tuple[float, tuple[int, ...]]], q: Probabilities | None, rule: Relaxation
) -> tuple[Probabilities, float]:
    """Distribution of the first code of a step whose root has the drafted children, and its realised TVD."""
    output = np.zeros_like(p)
    realised = 0.0
    for weight, codes in drafts:
        tree = DraftTree(np.array([0, *codes]), np.array([-1] + [0] * len(codes)), lambda node: q)
        for chance, accepted in enumerated(tree, lambda node: p, rule):
            realised += weight * chance * accepted.realised_tvd
            if len(accepted.path) > 1:
                output[tree.tokens[accepted.path[1]]] += weight * chance
            else:
                output += weight * chance * accepted.remainder
    return output, realised


def tvd(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    return float(np.abs(a - b).sum() / 2)


@st.composite
def distributions(draw: st.DrawFn, size: int) -> Probabilities:
    """Distributions with zeros, ties and wide ranges."""
    kinds = st.one_of(st.just(0.0), st.sampled_from([1.0, 2.0]), st.floats(1e-4, 1.0), st.floats(1.0, 50.0))
    weights = np.array(draw(st.lists(kinds, min_size=size, max_size=size)))
    if weights.sum() == 0:
        weights[draw(st.integers(0, size - 1))] = 1
    return weights / weights.sum()


@st.composite
def relaxations(draw: st.DrawFn, size: int) -> Relaxation:
    rows = [draw(st.permutations([c for c in range(size) if c != code])) for code in range(size)]
    k = draw(st.integers(1, size - 1))
    if draw(st.booleans()):
        return Relaxation(np.array(rows), k, delta=draw(st.floats(0.01, 0.99)))
    return Relaxation(np.array(rows), k, lambda_=draw(st.floats(1.01, 8.0)))
