"""Ways to relax, from none to much, and what each gives: acceptance rates, total variation, likelihood.

Does not know costs or trees other than the probe; choosing is `tune.py`'s work.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import RequestError
from ..manifest import Manifest
from .store import Relaxed


@dataclass(frozen=True)
class Candidate:
    """A drafting method with its relaxation; both bounds are None for `eagle`."""

    method: Relaxed
    neighbors: int | None = None
    delta: float | None = None
    lambda_: float | None = None

    @property
    def label(self) -> str:
        """The candidate in a few words."""
        if self.neighbors is None:
            return self.method
        bound = f"delta {self.delta:g}" if self.delta is not None else f"lambda {self.lambda_:g}"
        return f"{self.method}, {self.neighbors} neighbours, {bound}"


@dataclass(frozen=True)
class Measured:
    """What a candidate does: acceptance rates `[depth, rank]`, and what it costs in quality.

    nll_ratio: nats per code over those of plain decoding on the same prompts; nll_error: its standard error.
    """

    candidate: Candidate
    rates: NDArray[np.float64]
    tvd_per_code: float
    nll_ratio: float
    nll_error: float


@dataclass(frozen=True)
class Budget:
    """What may be given away: mean total variation per code, and likelihood against plain decoding's."""

    name: str
    tvd_per_code: float
    nll_ratio: float

    @property
    def exact(self) -> bool:
        """Whether nothing may be given away."""
        return self.tvd_per_code == 0

    def allows(self, found: Measured) -> bool:
        """Whether a candidate stays within the budget, the likelihood as far as its standard error can tell."""
        return found.tvd_per_code <= self.tvd_per_code and found.nll_ratio - found.nll_error <= self.nll_ratio


_BUDGETS = {
    "strict": Budget("strict", 0.0, float("inf")),
    "balanced": Budget("balanced", 0.06, 1.02),
    "fast": Budget("fast", 0.15, 1.08),
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


def ladders(manifest: Manifest, budget: Budget) -> list[list[Candidate]]:
    """Candidates to measure, as ladders from careful to bold; what fails on one rung is not tried bolder."""
    rungs = [[Candidate("eagle")]]
    table = manifest.neighbors
    if budget.exact or not table:
        return rungs
    for neighbors in sorted({min(10, table), min(100, table)}):
        rungs.append([Candidate("lantern++", neighbors, lambda_=bound) for bound in (1.3, 1.7, 2.5, 4.0, 8.0)])
    rungs.append([Candidate("lantern", min(100, table), delta=bound) for bound in (0.01, 0.03, 0.1, 0.2)])
    return rungs
