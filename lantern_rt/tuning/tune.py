"""`lantern-rt tune`: measure this host and this model, and choose how to decode.

Costs of passes, then what every candidate within the budget gives, then the best tree or window for each, then the
most promising ones against plain decoding, in turns with the same prompts and seeds. What wins is stored; plain
decoding wins where nothing is faster.

Does not know the command line.
"""

from __future__ import annotations

import datetime
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from .. import __version__
from ..bundle.files import Bundle
from ..pipeline import Pipeline
from ..planning.auto import known_rates
from ..planning.candidates import Budget, Measured, Quality
from ..planning.costs import HostCosts
from ..planning.probe import measure_costs
from ..planning.rates_file import as_entries, brought_rates
from ..planning.records import Candidate
from ..planning.store import Choice, Entry, Situation, read_tuning, write_tuning
from ..planning.tree_search import Plan, best_plan
from ..requests import Options
from ..runtime.likelihood import Likelihood
from .measure import Calibration, Say, likelihood_ratio, measure_candidates, parameters

FINALISTS = 4
MARGIN = 1.02  # a finalist must beat plain decoding by this much, or plain decoding is chosen
STOPS = (0.1, 0.3)  # early stops that the best tree is also run with


@dataclass(frozen=True)
class Finalist:
    """A plan with the candidate it is for, and what the comparison found of it.

    speeds (against plain decoding), tokens (per target pass) and tvd (given away per code): run by run. scores: image
    by image.
    """

    measured: Measured
    plan: Plan
    stop: float | None = None
    speeds: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    tvd: list[float] = field(default_factory=list)
    scores: list[Likelihood] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """Median of the speeds against plain decoding."""
        return statistics.median(self.speeds)

    @property
    def label(self) -> str:
        """The candidate, and when it stops."""
        return self.measured.candidate.label + ("" if self.stop is None else f", stop {self.stop:g}")

    def options(self) -> Options:
        """The request parameters that carry it out."""
        own = parameters(self.measured.candidate)
        if self.plan.window is not None:
            own["window"] = self.plan.window
        else:
            own["tree"] = self.plan.name
        if self.stop is not None:
            own["stop"] = self.stop
        return own


@dataclass(frozen=True)
class TuneResult:
    """What was chosen and all that was measured on the way, ready for a report; `path`: where the choice is kept."""

    choice: Choice
    situation: Situation
    costs: HostCosts
    measured: list[Measured]
    finalists: list[Finalist]
    untried: list[Candidate]
    path: str


def tune(
    pipeline: Pipeline, calibration: Calibration, budget: Budget, minutes: float, sampling: Options, say: Say
) -> TuneResult:
    """Measure for about `minutes`, choose, store and return. `sampling` holds temperature, filters and guidance."""
    began, seconds = time.monotonic(), 60 * minutes
    say("measuring passes")
    manifest, (target, drafter) = pipeline.bundle.manifest, pipeline.decoders()
    scale = sampling.get("cfg_scale")
    rows = calibration.images * (1 if (manifest.sampling.cfg_scale if scale is None else scale) == 1 else 2)
    costs = measure_costs(manifest, target, drafter, rows, 0.1 * seconds)
    situation = pipeline.situation(calibration.images, sampling.get("temperature"), budget.name)
    known = _known(pipeline.bundle, situation.greedy)
    found = measure_candidates(pipeline, calibration, budget, costs, 0.6 * seconds, sampling, known, say)
    finalists = choose_finalists(found.measured, found.costs)
    left = max(0.2 * seconds, seconds - (time.monotonic() - began))
    plain_scores = compare(pipeline, calibration, finalists, left, sampling, say)
    choice = choose(finalists, plain_scores, budget, known)
    date = datetime.date.today().isoformat()
    tuning = read_tuning(pipeline.bundle.digest).with_rates(as_entries(found.measured, situation.greedy))
    path = write_tuning(tuning.with_entry(Entry(situation=situation, choice=choice, version=__version__, date=date)))
    return TuneResult(choice, situation, found.costs, found.measured, finalists, found.untried, str(path))


def choose_finalists(measured: Sequence[Measured], costs: HostCosts) -> list[Finalist]:
    """The most promising plans, one for each candidate; the best tree also with early stops, if it is deep."""
    plans = [(one, best_plan(one.rates, one.windows, costs)) for one in measured]
    plans = sorted((pair for pair in plans if pair[1].drafts), key=lambda pair: -pair[1].rate)[:FINALISTS]
    finalists = [Finalist(one, plan) for one, plan in plans]
    deep = next((one for one in finalists if max(map(len, one.plan.paths), default=0) > 1), None)
    return finalists + ([] if deep is None else [Finalist(deep.measured, deep.plan, stop) for stop in STOPS])


def compare(
    pipeline: Pipeline,
    calibration: Calibration,
    finalists: Sequence[Finalist],
    seconds: float,
    sampling: Options,
    say: Say,
) -> list[Likelihood]:
    """Run every finalist and plain decoding in turns on the same prompts and seeds; at least three turns.

    Returns plain decoding's likelihoods, image by image. They are computed at the end of a turn.
    """
    plain_scores: list[Likelihood] = []
    if not finalists:
        return plain_scores
    began = time.monotonic()
    plainly = cast(Options, {**sampling, "method": "ar"})
    for turn in itertools.count():
        if turn >= 3 and time.monotonic() - began > seconds:
            break
        say(f"comparing {len(finalists)} ways with plain decoding, turn {turn + 1}")
        request = calibration.batch(turn)
        plain = pipeline(**request, **plainly)
        drawn = []
        for finalist in finalists:
            result = pipeline(**request, **cast(Options, {**sampling, **finalist.options()}))
            finalist.speeds.append(plain.stats.seconds / result.stats.seconds)
            finalist.tokens.append(result.stats.tokens_per_target_pass)
            finalist.tvd.append(result.stats.realised_tvd / len(result.codes[0]))
            drawn.append(result.codes)
        plain_scores += pipeline.likelihoods(plain.codes, **request, **plainly)
        for finalist, codes in zip(finalists, drawn, strict=True):
            finalist.scores.extend(pipeline.likelihoods(codes, **request, **plainly))
    return plain_scores


def _known(bundle: Bundle, greedy: bool) -> dict[Candidate, Quality]:
    """What the bundle and earlier measurements say of candidates."""
    entries, _ = known_rates(bundle.manifest, brought_rates(bundle), read_tuning(bundle.digest), greedy)
    return {entry.candidate: entry.quality for entry in entries}


def choose(
    finalists: Sequence[Finalist],
    plain_scores: Sequence[Likelihood],
    budget: Budget,
    known: Mapping[Candidate, Quality],
) -> Choice:
    """The fastest finalist that keeps to the budget by whatever is known best, if it beats plain decoding."""
    best = Choice(method="ar")
    for finalist in sorted(finalists, key=lambda finalist: finalist.speed):
        ratio, _ = likelihood_ratio(finalist.scores, plain_scores)
        measured = finalist.measured
        here = Quality(len(finalist.scores), statistics.mean(finalist.tvd), ratio)
        before = known.get(measured.candidate, measured.quality)
        if finalist.speed > MARGIN and budget.allows(measured.candidate, here, measured.quality, before):
            best = as_choice(finalist, ratio)
    return best


def as_choice(finalist: Finalist, nll_ratio: float) -> Choice:
    """What to store of the winner; its quality is what the comparison found."""
    plan = finalist.plan
    return Choice(
        **finalist.measured.candidate.model_dump(),
        tree=plan.name if plan.paths else None,
        stop=finalist.stop,
        window=plan.window,
        speed_against_ar=finalist.speed,
        tokens_per_target_pass=statistics.mean(finalist.tokens),
        tvd_per_code=statistics.mean(finalist.tvd),
        nll_ratio=nll_ratio,
    )
