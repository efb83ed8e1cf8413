"""Quality budgets of method `auto`: what may be given away."""

from __future__ import annotations

from typing import NamedTuple

from ..methods import Auto, MethodConfig
from .acceptance_statistics import Quality


class Budget(NamedTuple):
    """Bounds on mean total variation per token, and on how far the likelihood may lie from plain decoding's.

    nll_change counts to either side of 1: tokens more likely than the target's own are a departure, too.
    """

    name: str
    tvd_per_token: float
    nll_change: float

    @property
    def exact(self) -> bool:
        """Whether nothing may be given away."""
        return self.tvd_per_token == 0

    def allows(self, method: MethodConfig, *found: Quality) -> bool:
        """Whether a method stays within the budget, by the best of what was found.

        What is exact always does: its likelihood differs from plain decoding's by chance only.
        """
        best = max(found, key=lambda one: one.images)
        within = best.tvd_per_token <= self.tvd_per_token and abs(best.nll_ratio - 1) <= self.nll_change
        return method.exact or (within and not self.exact)


_NAMED = {
    "strict": Budget("strict", 0.0, float("inf")),
    "balanced": Budget("balanced", 0.06, 0.02),
    "fast": Budget("fast", 0.15, 0.08),
}


def budget_of(method: Auto) -> Budget:
    """The budget that a quality names."""
    if method.quality in _NAMED:
        return _NAMED[method.quality]
    return Budget(method.quality, float(method.quality.partition("=")[2]), float("inf"))
