"""`lantern-rt tune`: measure this host and this model, and choose how to decode.

Costs of passes, then what every method within the budget gives, then the best tree or window for each, then the most
promising ones against plain decoding, in turns with the same prompts and seeds. What wins is stored; plain decoding
wins where nothing is faster.
"""

from __future__ import annotations

import datetime
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..methods import Ar, MethodConfig
from ..planning.acceptance_statistics import MethodStatistics, Quality, drafting_aside, merge
from ..planning.auto import Budget
from ..planning.costs import HostCosts
from ..planning.store import Choice, read_tuning, write_tuning
from ..planning.tree_search import Plan, best_plan
from ..runner import Run, take_turns
from .measure import Measurement, likelihood_ratio, likelihoods, mean_tvd

FINALISTS = 4
FEWEST_TURNS = 3
MARGIN = 1.02  # a finalist must beat plain decoding by this much, or plain decoding is chosen


class Finalist(NamedTuple):
    """A method with its tree or window: the statistics it was planned by, and what was found comparing.

    report: what was expected of it, and what was found run by run and image by image, ready for JSON.
    """

    entry: MethodStatistics
    choice: Choice
    images: int
    report: dict[str, Any]


def tune(measured: Measurement, minutes: float) -> tuple[Choice, list[Finalist], Path]:
    """Measure for about `minutes`, choose and store: the choice, what was compared, and where the choice is kept."""
    began, seconds, digest = time.monotonic(), 60 * minutes, measured.pipeline.bundle.digest
    measured.run(0.7 * seconds)
    plans = choose_finalists(measured.entries, measured.costs)
    finalists = compare(measured, plans, max(0.2 * seconds, seconds - (time.monotonic() - began)))
    choice, tuning = choose(finalists, measured.budget, measured.known), read_tuning(digest)
    choices, statistics = (
        {**tuning.choices, str(measured.situation): choice},
        merge(measured.entries, tuning.statistics),
    )
    return choice, finalists, write_tuning(tuning.model_copy(update={"choices": choices, "statistics": statistics}))


def choose_finalists(entries: Sequence[MethodStatistics], costs: HostCosts) -> list[tuple[MethodStatistics, Plan]]:
    """The most promising plans, one for each method."""
    plans = [(entry, best_plan(entry, costs)) for entry in entries]
    drafting = [(entry, plan) for entry, plan in plans if plan.nodes > 1]
    return sorted(drafting, key=lambda planned: -planned[1].rate)[:FINALISTS]


def compare(measured: Measurement, plans: Sequence[tuple[MethodStatistics, Plan]], seconds: float) -> list[Finalist]:
    """Run every plan and plain decoding in turns for about `seconds`."""
    if not plans:
        return []
    began = time.monotonic()
    methods = (entry.method.model_copy(update=plan.drafting) for entry, plan in plans)
    contenders = [measured.contender(method) for method in (Ar(), *methods)]
    requests = (measured.subjects.request(turn, measured.images) for turn in itertools.count())
    turns: list[list[Run]] = []
    for runs in take_turns(measured.pipeline, contenders, requests, paint=False):
        turns.append(runs)
        measured.say(f"compared {len(plans)} methods with plain decoding, turn {len(turns)}")
        if len(turns) >= FEWEST_TURNS and time.monotonic() - began > seconds:
            break
    plain, *others = map(list, zip(*turns, strict=True))
    return [_finalist(*planned, runs, plain) for planned, runs in zip(plans, others, strict=True)]


def _finalist(entry: MethodStatistics, plan: Plan, runs: list[Run], plain: list[Run]) -> Finalist:
    method = entry.method.model_copy(update=plan.drafting)
    stats, scores = [one.statistics for one in runs], likelihoods(runs)
    speed_ups = [ar.statistics.seconds / one.seconds for ar, one in zip(plain, stats, strict=True)]
    choice = Choice(
        method=method,
        speed_up=statistics.median(speed_ups),
        tokens_per_forward_pass=statistics.mean(one.tokens_per_forward_pass for one in stats),
        tvd_per_token=mean_tvd(runs),
        nll_ratio=likelihood_ratio(scores, likelihoods(plain))[0],
        date=datetime.date.today().isoformat(),
    )
    report = {
        "method": method.model_dump(),
        "predicted_tokens_per_forward_pass": plan.tokens,
        "predicted_seconds_per_step": plan.seconds,
        "speed_ups": speed_ups,
        "tokens_per_forward_pass": [one.tokens_per_forward_pass for one in stats],
        "tvd_per_token": [one.tvd_per_token for one in runs],
        "nll_per_token": [score.nats for score in scores],
        "entropy_per_token": [score.entropy for score in scores],
    }
    return Finalist(entry, choice, len(scores), report)


def choose(finalists: Sequence[Finalist], budget: Budget, known: Mapping[MethodConfig, Quality]) -> Choice:
    """The fastest finalist that keeps to the budget by whatever is known best, if it beats plain decoding."""
    for finalist in sorted(finalists, key=lambda finalist: -finalist.choice.speed_up):
        choice, entry = finalist.choice, finalist.entry
        here = Quality(images=finalist.images, tvd_per_token=choice.tvd_per_token, nll_ratio=choice.nll_ratio)
        before = known.get(drafting_aside(entry.method), entry)
        if choice.speed_up > MARGIN and budget.allows(entry.method, here, entry, before):
            return choice
    return Choice(method=Ar(), date=datetime.date.today().isoformat())
