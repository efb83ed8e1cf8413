"""Quality budgets of method `auto`: what may be given away."""

from __future__ import annotations

from typing import NamedTuple

from ..methods import Auto, MethodConfig
from .acceptance_statistics import Quality


class Budget(NamedTuple):
    """Bounds on mean total variation per token, and on how far the likelihood may lie from plain decoding's.

    nll_change counts to either side of 1: tokens more likely than the target's own are a departure, too.
    """

    tvd_per_token: float
    nll_change: float = float("inf")

    @property
    def exact(self) -> bool:
        """Whether nothing may be given away."""
        return self.tvd_per_token == 0

    def allows(self, method: MethodConfig, *found: Quality) -> bool:
        """Whether a method stays within the budget, by what was found of the most images.

        What is exact always does: its likelihood differs from plain decoding's by chance only.
        """
        best = max(found, key=lambda one: one.images)
        within = best.tvd_per_token <= self.tvd_per_token and abs(best.nll_ratio - 1) <= self.nll_change
        return method.exact or (within and not self.exact)


def budget_of(method: Auto) -> Budget:
    """The budget that a quality names."""
    named = {"strict": Budget(0.0), "balanced": Budget(0.06, 0.02), "fast": Budget(0.15, 0.08)}
    return named.get(method.quality) or Budget(float(method.quality.partition("=")[2]))
