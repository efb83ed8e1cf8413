"""`--method auto`: the choice that was stored for this host, or else one made from known rates and a probe.

Rates (`rates_file.py`) depend on the model, not on the host; a bundle may bring them, and `tune` keeps what it found.
With them a two-second probe of this host's passes is enough to plan a tree or a window. Without rates and without a
stored choice, decoding is plain: nothing is known to be faster.

Does not decode and does not store.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..bundle.manifest import Manifest
from .candidates import parse_budget
from .costs import HostCosts
from .rates_file import Rates, RatesEntry, merge
from .store import Choice, Situation, Tuning
from .tree_search import best_plan

PROBE_SECONDS = 2.0
PROBE_MARGIN = 1.15  # what is only predicted must promise this much over plain decoding


def stored_choice(tuning: Tuning, situation: Situation) -> tuple[Choice, str] | None:
    """The choice that `tune` stored for this situation, and a line that says why."""
    entry = tuning.find(situation)
    if entry is None:
        return None
    choice = entry.choice
    if choice.method == "ar":
        return choice, f"auto: ar, as nothing was faster here when tuned on {entry.date}"
    return choice, f"auto: {_words(choice)}, {choice.speed_against_ar:.2f} x ar here when tuned on {entry.date}"


def known_rates(
    manifest: Manifest, brought: Rates | None, tuning: Tuning, greedy: bool
) -> tuple[tuple[RatesEntry, ...], str]:
    """Rates to plan with, found here or brought by the bundle, whichever is of more images; where there are none, a
    line that says why."""
    fitting = brought.fitting(manifest) if brought is not None else ()
    known = merge(tuning.rates, fitting)
    found = tuple(entry for entry in known if entry.greedy == greedy)
    if found:
        return found, ""
    name = f"bundle {manifest.name}"
    if known:
        why = f"the rates known of {name} are not of {'greedy decoding' if greedy else 'sampling'}"
    elif brought is not None:
        why = f"the rates in {name} were measured with other weights"
    else:
        why = f"{name} brings no rates"
    return (), f"auto: ar, as {why}; `lantern-rt tune` measures them"


def predicted_choice(entries: Iterable[RatesEntry], costs: HostCosts, situation: Situation) -> tuple[Choice, str]:
    """The best plan by rates and this host's costs; plain decoding unless it promises a clear gain."""
    budget = parse_budget(situation.quality)
    plain = 1 / costs.plain_seconds
    best, best_rate = Choice(method="ar"), PROBE_MARGIN * plain
    for entry in entries:
        way = entry.candidate
        if entry.greedy != situation.greedy or not budget.allows(way, entry.quality):
            continue
        plan = best_plan(entry.tree_rates(), entry.window_codes(), costs)
        if plan.drafts and plan.rate > best_rate:
            best_rate = plan.rate
            best = Choice(
                **way.model_dump(),
                tree=plan.name if plan.paths else None,
                window=plan.window,
                speed_against_ar=plan.rate / plain,
                tokens_per_target_pass=plan.codes,
                tvd_per_code=entry.tvd_per_code,
                nll_ratio=entry.nll_ratio,
            )
    if best.method == "ar":
        return best, "auto: ar, as a short probe of this host promises no gain; `lantern-rt tune` measures it"
    return best, (
        f"auto: {_words(best)}, {best.speed_against_ar:.2f} x ar by a short probe of this host; "
        "`lantern-rt tune` measures it"
    )


def _words(choice: Choice) -> str:
    """The method, its window or tree, and how it relaxes."""
    shape = f"window {choice.window}" if choice.window is not None else choice.tree or ""
    relaxing = " ".join(
        f"{name.rstrip('_')} {value if isinstance(value, str) else f'{value:g}'}"
        for name, value in choice.relaxing().items()
    )
    return " ".join(word for word in (choice.method, shape, relaxing) if word)
