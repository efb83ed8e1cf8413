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
from dataclasses import dataclass, field

from .. import __version__
from ..methods import Ar, Auto, MethodConfig
from ..planning.acceptance_statistics import MethodStatistics, Quality, bundle_statistics, drafting_aside
from ..planning.auto import known_statistics
from ..planning.budget import Budget, budget_of
from ..planning.costs import HostCosts, measure_costs
from ..planning.store import Choice, Entry, Situation, read_tuning, write_tuning
from ..planning.tree_search import Plan, best_plan
from ..runner import take_turns
from ..runtime.likelihood import Likelihood
from .measure import Calibration, Say, likelihood_ratio, measure_methods

FINALISTS = 4
FEWEST_TURNS = 3
MARGIN = 1.02  # a finalist must beat plain decoding by this much, or plain decoding is chosen


@dataclass(frozen=True)
class Finalist:
    """A method with its tree or window, the statistics it was planned by, and what the comparison found of it.

    speed_ups, tokens_per_forward_pass and tvd_per_token: run by run. scores: image by image.
    """

    entry: MethodStatistics
    plan: Plan
    speed_ups: list[float] = field(default_factory=list)
    tokens_per_forward_pass: list[float] = field(default_factory=list)
    tvd_per_token: list[float] = field(default_factory=list)
    scores: list[Likelihood] = field(default_factory=list)

    @property
    def method(self) -> MethodConfig:
        """What is run."""
        return self.plan.applied_to(self.entry.method)

    @property
    def speed_up(self) -> float:
        """Median over runs."""
        return statistics.median(self.speed_ups)


@dataclass(frozen=True)
class TuneResult:
    """What was chosen and all that was measured on the way, ready for a report; `path`: where the choice is kept."""

    choice: Choice
    situation: Situation
    costs: HostCosts
    entries: list[MethodStatistics]
    finalists: list[Finalist]
    untried: list[MethodConfig]
    path: str


def tune(calibration: Calibration, quality: Auto, minutes: float, say: Say) -> TuneResult:
    """Measure for about `minutes`, choose, store and return."""
    began, seconds, budget = time.monotonic(), 60 * minutes, budget_of(quality)
    pipeline, images = calibration.pipeline, calibration.images
    say("measuring passes")
    manifest, (target, drafter) = pipeline.bundle.manifest, pipeline.decoders()
    scale = calibration.sampling.get("cfg_scale")
    guided = (manifest.sampling.cfg_scale if scale is None else scale) != 1
    costs = measure_costs(manifest, target, drafter, images * (2 if guided else 1), 0.1 * seconds)
    situation = pipeline.situation(images, calibration.sampling.get("temperature"), budget.name)
    brought, tuning = bundle_statistics(pipeline.bundle), read_tuning(pipeline.bundle.digest)
    known = {
        drafting_aside(entry.method): entry.quality
        for entry in known_statistics(manifest, brought, tuning, situation.greedy)[0]
    }
    found = measure_methods(calibration, budget, costs, 0.6 * seconds, known, say)
    finalists = choose_finalists(found.entries, found.costs)
    left = max(0.2 * seconds, seconds - (time.monotonic() - began))
    plain_scores = compare(calibration, finalists, left, say)
    choice = choose(finalists, plain_scores, budget, known)
    entry = Entry(situation=situation, choice=choice, version=__version__, date=datetime.date.today().isoformat())
    tuning = read_tuning(pipeline.bundle.digest).with_statistics(tuple(found.entries)).with_entry(entry)
    path = write_tuning(tuning)
    return TuneResult(choice, situation, found.costs, found.entries, finalists, found.untried, str(path))


def choose_finalists(entries: Sequence[MethodStatistics], costs: HostCosts) -> list[Finalist]:
    """The most promising plans, one for each method."""
    finalists = [Finalist(entry, best_plan(entry.rates(), entry.window_tokens(), costs)) for entry in entries]
    drafting = [finalist for finalist in finalists if finalist.plan.drafts]
    return sorted(drafting, key=lambda finalist: -finalist.plan.rate)[:FINALISTS]


def compare(calibration: Calibration, finalists: Sequence[Finalist], seconds: float, say: Say) -> list[Likelihood]:
    """Run every finalist and plain decoding in turns for about `seconds`; plain decoding's likelihoods, by image."""
    plain_scores: list[Likelihood] = []
    if not finalists:
        return plain_scores
    began = time.monotonic()
    contenders = [calibration.contender(method) for method in (Ar(), *(finalist.method for finalist in finalists))]
    requests = (calibration.subjects.request(turn, calibration.images) for turn in itertools.count())
    for turn, (plain, *runs) in enumerate(take_turns(calibration.pipeline, contenders, requests, paint=False)):
        say(f"compared {len(finalists)} methods with plain decoding, turn {turn + 1}")
        plain_scores += plain.likelihoods
        for finalist, one in zip(finalists, runs, strict=True):
            finalist.speed_ups.append(plain.statistics.seconds / one.statistics.seconds)
            finalist.tokens_per_forward_pass.append(one.statistics.tokens_per_forward_pass)
            finalist.tvd_per_token.append(one.tvd_per_token)
            finalist.scores.extend(one.likelihoods)
        if turn + 1 >= FEWEST_TURNS and time.monotonic() - began > seconds:
            break
    return plain_scores


def choose(
    finalists: Sequence[Finalist],
    plain_scores: Sequence[Likelihood],
    budget: Budget,
    known: Mapping[MethodConfig, Quality],
) -> Choice:
    """The fastest finalist that keeps to the budget by whatever is known best, if it beats plain decoding."""
    best = Choice(method=Ar())
    for finalist in sorted(finalists, key=lambda finalist: finalist.speed_up):
        ratio, _ = likelihood_ratio(finalist.scores, plain_scores)
        tvd = statistics.mean(finalist.tvd_per_token)
        here, method = Quality(len(finalist.scores), tvd, ratio), finalist.entry.method
        before = known.get(drafting_aside(method), finalist.entry.quality)
        if finalist.speed_up > MARGIN and budget.allows(method, here, finalist.entry.quality, before):
            best = Choice(
                method=finalist.method,  # type: ignore[arg-type]  # checked by pydantic
                speed_up=finalist.speed_up,
                tokens_per_forward_pass=statistics.mean(finalist.tokens_per_forward_pass),
                tvd_per_token=tvd,
                nll_ratio=ratio,
            )
    return best
