"""`lantern-rt tune`: measure this host and this model, and choose how to decode.

Costs of passes, then what every method within the budget gives, then the best tree or window for each, then the most
promising ones against plain decoding, in turns with the same prompts and seeds. What surely wins is stored; plain
decoding wins where nothing is faster, and nothing does where the host was too busy to say. So is found what the image
decoder runs on.
"""

from __future__ import annotations

import datetime
import itertools
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..compare.turns import Run, take_turns
from ..methods import Ar, MethodConfig
from ..planning.acceptance_statistics import MethodStatistics, Quality, drafting_aside, merge
from ..planning.budget import Budget
from ..planning.costs import HostCosts, pass_seconds
from ..planning.intervals import BELIEVED, FEWEST, WANTED, median_interval, spread
from ..planning.store import Choice, read_tuning, write_tuning
from ..planning.tree_search import Plan, best_plan
from ..runtime.likelihood import NODES
from .measure import Measurement, likelihood_ratio, likelihoods, mean_tvd
from .pictures import Decoders, compare_decoders

FINALISTS = 4
TURNS = 8  # that there should be time for: of so many, one may be disturbed
MARGIN = 1.02  # a finalist must beat plain decoding by this much, or plain decoding is chosen


class Finalist(NamedTuple):
    """A method with its tree or window: the statistics it was planned by, and what was found comparing.

    speed_ups: of whole images over plain decoding, turn by turn. step_costs: seconds of a step over those of a plain
    one, turn by turn; they are the host's and hardly depend on the picture. report: what was expected of it, and what
    was found run by run and image by image, ready for JSON.
    """

    entry: MethodStatistics
    choice: Choice
    images: int
    nll_error: float
    speed_ups: list[float]
    step_costs: list[float]
    report: dict[str, Any]

    @property
    def surely_faster(self) -> bool:
        """Whether it beats plain decoding wherever the median speed-up may lie, on a host that was steady."""
        return spread(self.step_costs) <= BELIEVED and median_interval(self.speed_ups)[0] > MARGIN

    @property
    def doubtful(self) -> bool:
        """Whether it may well be faster, but that is not sure."""
        unclear = spread(self.step_costs) > BELIEVED or self.choice.speed_up > MARGIN
        return unclear and not self.surely_faster and median_interval(self.speed_ups)[1] > MARGIN


class Tuned(NamedTuple):
    """choice: None where measuring left doubts, which `doubt` says. decoders: None if they were not to be compared.
    path: where what was found is kept."""

    choice: Choice | None
    doubt: str
    finalists: list[Finalist]
    decoders: Decoders | None
    path: Path


def tune(measured: Measurement, minutes: float, pictures: bool = True) -> Tuned:
    """Measure for `minutes`, and a pass more at most; choose, and store what is sure.

    pictures: whether to find out, too, what the image decoder is to run on.
    """
    seconds = 60 * minutes
    deadline, digest = time.monotonic() + seconds, measured.pipeline.bundle.digest
    measured.run(0.7 * seconds)
    decoders = None
    if pictures:
        measured.say("comparing image decoders")
        codes = [one for drawn in measured.plain for one in drawn.codes]
        decoders = compare_decoders(measured.pipeline, codes, seconds / 10, deadline)
    plans = choose_finalists(measured.entries, measured.costs)
    finalists = compare(measured, plans, deadline)
    choice = choose(finalists, measured.budget, measured.known)
    doubt = doubts(measured, plans, finalists) if isinstance(choice.method, Ar) else ""
    tuning = read_tuning(digest)
    choices = {} if doubt else {str(measured.situation): choice}
    found: dict[str, Any] = {"choices": {**tuning.choices, **choices}}
    found["statistics"] = merge(measured.entries, tuning.statistics)
    if decoders is not None and decoders.choice is not None:
        found["picture"] = decoders.choice
    path = write_tuning(tuning.model_copy(update=found))
    return Tuned(None if doubt else choice, doubt, finalists, decoders, path)


def choose_finalists(entries: Sequence[MethodStatistics], costs: HostCosts) -> list[tuple[MethodStatistics, Plan]]:
    """The most promising plans, one for each method."""
    plans = [(entry, best_plan(entry, costs)) for entry in entries]
    drafting = [(entry, plan) for entry, plan in plans if plan.nodes > 1]
    return sorted(drafting, key=lambda planned: -planned[1].rate)[:FINALISTS]


def compare(measured: Measurement, plans: Sequence[tuple[MethodStatistics, Plan]], deadline: float) -> list[Finalist]:
    """Run plans and plain decoding in turns until their speed-ups are known, or to the instant `deadline`.

    Only as many plans, the best ones first, as there is time for `TURNS`; none if not a single turn was done in time.
    """
    codes, costs = measured.pipeline.bundle.manifest.codes_per_image, measured.costs
    scoring = (1 + math.ceil(codes / NODES)) * pass_seconds(costs.target, NODES)  # of a method's turn, about
    drawing = itertools.accumulate(codes / plan.rate for _, plan in plans)
    a_turn = (deadline - time.monotonic()) / TURNS - codes * costs.plain_seconds - scoring
    affordable = sum(spent + scoring * number <= a_turn for number, spent in enumerate(drawing, 1))
    plans = plans[: max(1, affordable)]
    if not plans:
        return []
    methods = (entry.method.model_copy(update=plan.drafting) for entry, plan in plans)
    contenders = [measured.contender(method) for method in (Ar(), *methods)]
    requests = (measured.subjects.request(turn, measured.images) for turn in itertools.count())
    finalists: list[Finalist] = []
    turns: list[list[Run]] = []
    end = deadline - scoring * len(contenders)
    for runs in take_turns(measured.pipeline, contenders, requests, paint=False, deadline=end):
        turns.append(runs)
        measured.say(f"compared {len(plans)} methods with plain decoding, turn {len(turns)}")
        plain, *others = map(list, zip(*turns, strict=True))
        finalists = [_finalist(*planned, one, plain) for planned, one in zip(plans, others, strict=True)]
        if time.monotonic() > end or all(spread(one.speed_ups) <= WANTED for one in finalists):
            break
    return finalists


def _finalist(entry: MethodStatistics, plan: Plan, runs: list[Run], plain: list[Run]) -> Finalist:
    method = entry.method.model_copy(update=plan.drafting)
    stats, scores = [one.statistics for one in runs], likelihoods(runs)
    pairs = [(one, ar.statistics) for one, ar in zip(stats, plain, strict=True)]
    speed_ups = [ar.seconds / one.seconds for one, ar in pairs]
    step_costs = [one.seconds / one.target_passes / (ar.seconds / ar.target_passes) for one, ar in pairs]
    ratio, error = likelihood_ratio(scores, likelihoods(plain))
    choice = Choice(
        method=method,
        speed_up=statistics.median(speed_ups),
        tokens_per_forward_pass=statistics.mean(one.tokens_per_forward_pass for one in stats),
        tvd_per_token=mean_tvd(runs),
        nll_ratio=ratio,
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
    return Finalist(entry, choice, len(scores), min(error, 1.0), speed_ups, step_costs, report)


def choose(finalists: Sequence[Finalist], budget: Budget, known: Mapping[MethodConfig, Quality]) -> Choice:
    """The fastest finalist that keeps to the budget by whatever is known best, if it surely beats plain decoding."""
    for finalist in sorted(finalists, key=lambda finalist: -finalist.choice.speed_up):
        choice, entry = finalist.choice, finalist.entry
        tvd, ratio, error = choice.tvd_per_token, choice.nll_ratio, finalist.nll_error
        here = Quality(images=finalist.images, tvd_per_token=tvd, nll_ratio=ratio, nll_error=error)
        before = known.get(drafting_aside(entry.method), entry)
        if finalist.surely_faster and budget.allows(choice.method, here, entry, before):
            return choice
    return Choice(method=Ar(), date=datetime.date.today().isoformat())


def doubts(measured: Measurement, plans: Sequence[tuple[MethodStatistics, Plan]], finalists: Sequence[Finalist]) -> str:
    """Why it cannot be said that nothing is faster than plain decoding; empty where it can."""
    turns, remedy = len(finalists[0].speed_ups) if finalists else 0, "run nothing else, or give more --minutes"
    if any(method.exact for method in measured.untried) or (plans and turns < FEWEST):
        return f"there was time to compare {turns} times, expected {FEWEST} or more; {remedy}"
    if not measured.costs.steady or any(finalist.doubtful for finalist in finalists):
        return f"this host is too busy to measure in this time; {remedy}"
    return ""
