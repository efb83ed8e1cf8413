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
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from .. import __version__
from ..methods import Ar, Auto, Method, MethodConfig
from ..planning.acceptance_statistics import MethodStatistics, Quality, Record, bundle_statistics, drafting_aside
from ..planning.auto import known_statistics
from ..planning.budget import Budget, budget_of
from ..planning.costs import HostCosts, measure_costs
from ..planning.store import Choice, Entry, Situation, read_tuning, write_tuning
from ..planning.tree_search import Plan, best_plan
from ..runner import Run, take_turns
from .measure import Calibration, Measurement, Say, likelihood_ratio, likelihoods

FINALISTS = 4
FEWEST_TURNS = 3
MARGIN = 1.02  # a finalist must beat plain decoding by this much, or plain decoding is chosen


class Finalist(Record):
    """A method with its tree or window, what was expected of it, and what the comparison found of it.

    entry: the statistics it was planned by. speed_ups, tokens_per_forward_pass and tvd_per_token: run by run.
    nll_per_token and entropy_per_token: image by image.
    """

    entry: Annotated[MethodStatistics, Field(exclude=True)]
    method: Method
    predicted_tokens_per_forward_pass: float
    predicted_seconds_per_step: float
    speed_ups: list[float]
    tokens_per_forward_pass: list[float]
    tvd_per_token: list[float]
    nll_per_token: list[float]
    entropy_per_token: list[float]
    nll_ratio: float

    @property
    def speed_up(self) -> float:
        """Median over runs."""
        return statistics.median(self.speed_ups)

    @property
    def quality(self) -> Quality:
        """What the runs gave away."""
        images, tvd = len(self.nll_per_token), statistics.mean(self.tvd_per_token)
        return Quality(images=images, tvd_per_token=tvd, nll_ratio=self.nll_ratio)


@dataclass(frozen=True)
class TuneResult:
    """What was chosen and all that was measured on the way, ready for a report; `path`: where the choice is kept."""

    choice: Choice
    situation: Situation
    found: Measurement
    finalists: list[Finalist]
    path: str


def tune(calibration: Calibration, quality: Auto, minutes: float, say: Say) -> TuneResult:
    """Measure for about `minutes`, choose, store and return."""
    began, seconds, budget = time.monotonic(), 60 * minutes, budget_of(quality)
    pipeline, images = calibration.pipeline, calibration.images
    say("measuring passes")
    manifest, digest = pipeline.bundle.manifest, pipeline.bundle.digest
    scale = calibration.sampling.get("cfg_scale")
    guided = (manifest.sampling.cfg_scale if scale is None else scale) != 1
    costs = measure_costs(manifest, *pipeline.decoders(), images * (2 if guided else 1), 0.1 * seconds)
    situation = pipeline.situation(images, calibration.sampling.get("temperature"), quality.quality)
    brought = bundle_statistics(pipeline.bundle)
    entries, _ = known_statistics(manifest, brought, read_tuning(digest), situation.greedy)
    known: dict[MethodConfig, Quality] = {drafting_aside(entry.method): entry for entry in entries}
    found = Measurement(calibration, budget, costs, 0.6 * seconds, known, say)
    found.run()
    plans = choose_finalists(found.entries, found.costs)
    finalists = compare(calibration, plans, max(0.2 * seconds, seconds - (time.monotonic() - began)), say)
    choice = choose(finalists, budget, known)
    entry = Entry(situation=situation, choice=choice, version=__version__, date=datetime.date.today().isoformat())
    path = write_tuning(read_tuning(digest).with_entry(entry, found.entries))
    return TuneResult(choice, situation, found, finalists, str(path))


def choose_finalists(entries: Sequence[MethodStatistics], costs: HostCosts) -> list[tuple[MethodStatistics, Plan]]:
    """The most promising plans, one for each method."""
    plans = [(entry, best_plan(entry, costs)) for entry in entries]
    drafting = [(entry, plan) for entry, plan in plans if plan.nodes > 1]
    return sorted(drafting, key=lambda planned: -planned[1].rate)[:FINALISTS]


def compare(
    calibration: Calibration, plans: Sequence[tuple[MethodStatistics, Plan]], seconds: float, say: Say
) -> list[Finalist]:
    """Run every plan and plain decoding in turns for about `seconds`."""
    if not plans:
        return []
    began = time.monotonic()
    methods = [entry.method.model_copy(update=plan.drafting) for entry, plan in plans]
    contenders = [calibration.contender(method) for method in (Ar(), *methods)]
    requests = (calibration.subjects.request(turn, calibration.images) for turn in itertools.count())
    turns: list[list[Run]] = []
    for runs in take_turns(calibration.pipeline, contenders, requests, paint=False):
        turns.append(runs)
        say(f"compared {len(plans)} methods with plain decoding, turn {len(turns)}")
        if len(turns) >= FEWEST_TURNS and time.monotonic() - began > seconds:
            break
    plain, *others = zip(*turns, strict=True)
    return [
        Finalist(
            entry=entry,
            method=method,
            predicted_tokens_per_forward_pass=plan.tokens,
            predicted_seconds_per_step=plan.seconds,
            speed_ups=[ar.statistics.seconds / one.statistics.seconds for ar, one in zip(plain, runs, strict=True)],
            tokens_per_forward_pass=[one.statistics.tokens_per_forward_pass for one in runs],
            tvd_per_token=[one.tvd_per_token for one in runs],
            nll_per_token=[score.nats for score in likelihoods(runs)],
            entropy_per_token=[score.entropy for score in likelihoods(runs)],
            nll_ratio=likelihood_ratio(likelihoods(runs), likelihoods(plain))[0],
        )
        for (entry, plan), method, runs in zip(plans, methods, others, strict=True)
    ]


def choose(finalists: Sequence[Finalist], budget: Budget, known: Mapping[MethodConfig, Quality]) -> Choice:
    """The fastest finalist that keeps to the budget by whatever is known best, if it beats plain decoding."""
    best = Choice(method=Ar())
    for finalist in sorted(finalists, key=lambda finalist: finalist.speed_up):
        here, entry = finalist.quality, finalist.entry
        before = known.get(drafting_aside(entry.method), entry)
        if finalist.speed_up > MARGIN and budget.allows(entry.method, here, entry, before):
            best = Choice(
                method=finalist.method,
                speed_up=finalist.speed_up,
                tokens_per_forward_pass=statistics.mean(finalist.tokens_per_forward_pass),
                tvd_per_token=here.tvd_per_token,
                nll_ratio=here.nll_ratio,
            )
    return best
