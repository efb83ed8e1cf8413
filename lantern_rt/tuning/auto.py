"""`--method auto`: the choice that was stored for this host, or else one made from the bundle's rates and a probe.

A bundle may bring acceptance rates (role `rates`), measured where it was made: they depend on the model, not on the
host. With them a two-second probe of this host's passes is enough to plan a tree. Without rates and without a stored
choice, decoding is plain: nothing is known to be faster.

Does not decode and does not store.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from ..errors import BundleError
from ..runtime.published_trees import tree_name
from .candidates import Measured, parse_budget
from .costs import HostCosts
from .store import Choice, Part, Relaxed, Situation, Tuning
from .tree_search import best_plan

PROBE_SECONDS = 2.0
PROBE_MARGIN = 1.15  # what is only predicted must promise this much over plain decoding


class RatesEntry(Part):
    """Acceptance rates `[depth][rank]` of one candidate, and what it costs in quality."""

    method: Relaxed
    neighbors: int | None = None
    delta: float | None = None
    lambda_: float | None = None
    greedy: bool
    tvd_per_code: float
    nll_ratio: float
    nll_error: float
    rates: tuple[tuple[float, ...], ...]


class Rates(Part):
    """The file of role `rates`; `images`: from how many images, at least, each candidate's rates come."""

    images: int
    entries: tuple[RatesEntry, ...]


def read_rates(path: Path) -> Rates:
    """A bundle's rates; BundleError if the file is not what it should be."""
    try:
        return Rates.model_validate_json(path.read_bytes())
    except (OSError, ValidationError, ValueError) as error:
        raise BundleError(
            f"{path}: found no acceptance rates in it ({_brief(error)}); make the bundle again"
        ) from error


def as_rates(measured: Sequence[Measured], greedy: bool, images: int) -> Rates:
    """What to store of measured candidates."""
    return Rates(
        images=images,
        entries=tuple(
            RatesEntry(
                method=one.candidate.method,
                neighbors=one.candidate.neighbors,
                delta=one.candidate.delta,
                lambda_=one.candidate.lambda_,
                greedy=greedy,
                tvd_per_code=round(one.tvd_per_code, 5),
                nll_ratio=round(one.nll_ratio, 5),
                nll_error=round(one.nll_error, 5) if np.isfinite(one.nll_error) else 1.0,
                rates=tuple(tuple(round(float(rate), 4) for rate in row) for row in one.rates),
            )
            for one in measured
        ),
    )


def stored_choice(tuning: Tuning, situation: Situation) -> tuple[Choice, str] | None:
    """The choice that `tune` stored for this situation, and a line that says why."""
    entry = tuning.find(situation)
    if entry is None:
        return None
    choice = entry.choice
    if choice.method == "ar":
        return choice, f"auto: ar, as nothing was faster here when tuned on {entry.date}"
    return choice, f"auto: {choice.method}, {choice.speed_against_ar:.2f} x ar here when tuned on {entry.date}"


def predicted_choice(rates: Rates, costs: HostCosts, situation: Situation) -> tuple[Choice, str]:
    """The best plan by a bundle's rates and this host's costs; plain decoding unless it promises a clear gain."""
    budget = parse_budget(situation.quality)
    plain = 1 / costs.seconds(1, ())
    best, best_rate = Choice(method="ar"), PROBE_MARGIN * plain
    for entry in rates.entries:
        relaxed = entry.method != "eagle"
        within = entry.tvd_per_code <= budget.tvd_per_code and entry.nll_ratio - entry.nll_error <= budget.nll_ratio
        if entry.greedy != situation.greedy or (relaxed and not within):
            continue
        plan = best_plan(np.array(entry.rates), costs)
        if plan.paths and plan.rate > best_rate:
            best_rate = plan.rate
            best = Choice(
                method=entry.method,
                tree=tree_name(plan.paths),
                neighbors=entry.neighbors,
                delta=entry.delta,
                lambda_=entry.lambda_,
                speed_against_ar=plan.rate / plain,
                tokens_per_target_pass=plan.codes,
                tvd_per_code=entry.tvd_per_code,
                nll_ratio=entry.nll_ratio,
            )
    if best.method == "ar":
        return best, "auto: ar, as a short probe of this host promises no gain; `lantern-rt tune` measures it"
    return best, (
        f"auto: {best.method}, {best.speed_against_ar:.2f} x ar by a short probe of this host; "
        "`lantern-rt tune` measures it"
    )


def _brief(error: BaseException) -> str:
    return " ".join(str(error).split())[:100]
