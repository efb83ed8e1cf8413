"""Quality budgets: what may be given away, and whether a method keeps to it by what is known of it."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..methods import Auto, MethodConfig
from .acceptance_statistics import Judged, Quality


class Budget(NamedTuple):
    """Bounds on mean total variation per token, and on how far the likelihood may lie from plain decoding's.

    nll_change counts to either side of 1: tokens more likely than the target's own are a departure, too. Where no total
    variation is measured (`rows`), the likelihood decides alone, and its whole 95 % interval must be within. Where
    images were judged, that decides instead: whole intervals have to keep to excess_nll (nats a token, to either side)
    and agreement (of 1, downwards), and Frechet distances to plain decoding's own interval. excess_nll None: it never
    does.
    """

    tvd_per_token: float
    nll_change: float = float("inf")
    excess_nll: float | None = None
    agreement: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether nothing may be given away."""
        return self.tvd_per_token == 0

    def allows(self, method: MethodConfig, *found: Quality) -> bool:
        """Whether a method, its window included, stays within the budget, by what was found of the most images.

        What is exact always does: it draws plain decoding's codes, but for rounding.
        """
        if method.exact or self.exact:
            return method.exact
        judged = judged_of(method, *found)
        if judged is not None and self.excess_nll is not None:
            excess, agreement = judged.excess_nll, judged.agreement
            agrees = agreement is None or agreement.low >= -self.agreement
            return max(-excess.low, excess.high) <= self.excess_nll and agrees and judged.frechet_within is not False
        best = max(found, key=lambda one: one.images)
        change = abs(best.nll_ratio - 1) + (0.0 if method.measured else 1.96 * best.nll_error)
        within = best.tvd_per_token <= self.tvd_per_token and change <= self.nll_change
        return within and (method.measured or math.isfinite(self.nll_change))


def budget_of(method: Auto) -> Budget:
    """The budget that a quality names."""
    named = {"strict": Budget(0.0), "balanced": Budget(0.06, 0.02, 0.04, 0.02), "fast": Budget(0.15, 0.08, 0.12, 0.03)}
    return named.get(method.quality) or Budget(float(method.quality.partition("=")[2]))


def judged_of(method: MethodConfig, *found: Quality) -> Judged | None:
    """What was found of the most images that holds for a method; None where nobody judged any."""
    judged = [one.judged for one in found if one.judged is not None and one.judged.holds_for(method)]
    return max(judged, key=lambda one: one.images, default=None)


def given_away(method: MethodConfig, found: Quality) -> str:
    """What a relaxed method gives away, in words."""
    if (judged := judged_of(method, found)) is not None:
        points = "" if judged.agreement is None else f", {100 * judged.agreement.value:+.1f} points of prompt agreement"
        return f"{judged.excess_nll.value:+.3f} nats a token{points} against ar in {judged.images} images"
    likely = f"tokens {abs(found.nll_ratio - 1):.1%} {'more' if found.nll_ratio < 1 else 'less'} likely than ar's"
    return f"{likely}, total variation {found.tvd_per_token:.3f} a token" if method.measured else likely
