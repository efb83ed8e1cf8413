"""Ways to draft and to relax, from none to much, and what each gives: codes, total variation, likelihood.

Does not know costs or trees; choosing is `tune.py`'s work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..bundle.manifest import Manifest
from ..errors import RequestError
from .records import Candidate

# Windows of sjd. A pass has one node more: these are sizes at which passes are timed, and two between them.
WINDOWS = (3, 5, 7, 11, 15, 31)
NO_RATES = np.zeros((0, 0))


class Quality(NamedTuple):
    """What a candidate gives away, and how many images say so; of several, the one with the most images counts.

    It is the same on every host, unlike speed.
    """

    images: int
    tvd_per_code: float
    nll_ratio: float


@dataclass(frozen=True)
class Measured:
    """What a candidate does, and what it costs in quality.

    nll_ratio: `measure.likelihood_ratio` on the same prompts; nll_error: its standard error. images:
    how many of them were drawn. rates: acceptance `[depth, rank]`, for methods with a drafter. windows: codes per
    target pass by window, for `sjd`.
    """

    candidate: Candidate
    tvd_per_code: float
    nll_ratio: float
    nll_error: float
    images: int
    rates: NDArray[np.float64] = field(default_factory=lambda: NO_RATES)
    windows: Mapping[int, float] = field(default_factory=dict)

    @property
    def quality(self) -> Quality:
        """What was found of it here."""
        return Quality(self.images, self.tvd_per_code, self.nll_ratio)


@dataclass(frozen=True)
class Budget:
    """What may be given away: mean total variation per code, and how far the likelihood may lie from plain decoding's,
    to either side of 1: likelier codes than the target's own are a departure, too."""

    name: str
    tvd_per_code: float
    nll_change: float

    @property
    def exact(self) -> bool:
        """Whether nothing may be given away."""
        return self.tvd_per_code == 0

    def allows(self, candidate: Candidate, *found: Quality) -> bool:
        """Whether a candidate stays within the budget, by the best of what was found.

        What is exact always does: its likelihood differs from plain decoding's by chance only.
        """
        best = max(found, key=lambda one: one.images)
        within = best.tvd_per_code <= self.tvd_per_code and abs(best.nll_ratio - 1) <= self.nll_change
        return candidate.exact or (within and not self.exact)


_BUDGETS = {
    "strict": Budget("strict", 0.0, float("inf")),
    "balanced": Budget("balanced", 0.06, 0.02),
    "fast": Budget("fast", 0.15, 0.08),
}


def parse_budget(text: str) -> Budget:
    """The budget that `strict`, `balanced`, `fast` or `TVD=x` names; RequestError for anything else."""
    if text in _BUDGETS:
        return _BUDGETS[text]
    name, _, number = text.partition("=")
    try:
        bound = float(number)
    except ValueError:
        bound = -1.0
    if name.upper() != "TVD" or not 0 < bound < 1:
        raise RequestError(f"quality: found {text!r}, expected strict, balanced, fast, or TVD=x with x between 0 and 1")
    return Budget(f"TVD={bound:g}", bound, float("inf"))


def exact_candidates(manifest: Manifest, greedy: bool) -> list[Candidate]:
    """Ways that give nothing away. Greedy decoding always drafts the likeliest children."""
    drafted = [Candidate(method="eagle")]
    if not greedy:
        drafted.append(Candidate(method="eagle", children="likeliest"))
    return [Candidate(method="sjd"), *(drafted if manifest.drafter else [])]


def ladders(manifest: Manifest) -> list[list[Candidate]]:
    """Relaxed ways, as ladders from careful to bold; what fails on one rung is not tried bolder."""
    table = manifest.neighbors
    few, many = min(10, table), min(100, table)
    rungs = [[Candidate(method="sjd", omega=omega, anneal=0.5) for omega in (1.25, 1.5, 2.0, 3.0)]]
    if table:
        rungs.append([Candidate(method="sjd", neighbors=few, lambda_=bound) for bound in (1.5, 2.0, 3.0, 5.0)])
        rungs.append([Candidate(method="sjd", neighbors=many, delta=bound) for bound in (0.01, 0.03, 0.1)])
    if manifest.drafter:
        rungs.append(
            [Candidate(method="lantern++", neighbors=0, omega=omega, anneal=0.5) for omega in (1.25, 1.5, 2.0, 3.0)]
        )
    if manifest.drafter and table:
        for neighbors in sorted({few, many}):
            bounds = (1.3, 1.7, 2.5, 4.0, 8.0)
            rungs.append([Candidate(method="lantern++", neighbors=neighbors, lambda_=bound) for bound in bounds])
        likeliest = [
            Candidate(method="lantern", neighbors=many, delta=bound, children="likeliest")
            for bound in (0.01, 0.03, 0.1, 0.2)
        ]
        rungs.append(likeliest)
    return rungs
