"""`lantern-rt tune`: measure this host and this model, and choose how to decode.

Costs of passes, then acceptance and quality of every relaxation within the budget, then the best tree for each, then
the most promising ones against plain decoding, in pairs of runs with the same prompts and seeds. What wins is stored;
plain decoding wins where nothing is faster.

Does not know the command line.
"""

from __future__ import annotations

import datetime
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import __version__
from ..errors import RequestError
from ..pipeline import Pipeline
from ..requests import Options
from ..results import StreamStep
from ..runtime.published_trees import tree_name
from .candidates import Budget, Candidate, Measured, ladders
from .costs import HostCosts
from .probe import measure_costs
from .rates import PROBE, AcceptanceCounts
from .store import Choice, Entry, Situation, read_tuning, write_tuning
from .tree_search import Plan, best_plan

FINALISTS = 3
MARGIN = 1.02  # a finalist must beat plain decoding by this much, or plain decoding is chosen

Say = Callable[[str], None]


@dataclass(frozen=True)
class Calibration:
    """What to draw while measuring: prompts or class ids, one image each; `images` at a time."""

    prompts: Sequence[str] | None
    class_ids: Sequence[int] | None
    images: int

    def batch(self, index: int) -> dict[str, Any]:
        """Arguments of a pipeline call for batch `index`, and its seeds."""
        subjects: Sequence[Any] = self.prompts if self.prompts is not None else (self.class_ids or [])
        chosen = [subjects[(index * self.images + i) % len(subjects)] for i in range(self.images)]
        name = "prompts" if self.prompts is not None else "class_ids"
        return {name: chosen, "seed": [10_000 + index * self.images + i for i in range(self.images)]}


@dataclass(frozen=True)
class Finalist:
    """A plan with the candidate it is for, and its measured speed against plain decoding, run by run."""

    measured: Measured
    plan: Plan
    speeds: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class TuneResult:
    """What was chosen and all that was measured on the way, ready for a report."""

    choice: Choice
    situation: Situation
    costs: HostCosts
    measured: list[Measured]
    finalists: list[Finalist]
    images: int
    path: str


def tune(
    pipeline: Pipeline, calibration: Calibration, budget: Budget, minutes: float, sampling: Options, say: Say
) -> TuneResult:
    """Measure for about `minutes`, choose, store and return. `sampling` holds temperature, filters and guidance."""
    if pipeline.bundle.manifest.drafter is None:
        raise RequestError(f"bundle {pipeline.bundle.manifest.name} has no drafter, so there is nothing to tune")
    began, seconds = time.monotonic(), 60 * minutes
    say("measuring passes")
    manifest, (target, drafter) = pipeline.bundle.manifest, pipeline.decoders()
    assert drafter is not None
    scale = sampling.get("cfg_scale")
    rows = calibration.images * (1 if (manifest.sampling.cfg_scale if scale is None else scale) == 1 else 2)
    costs = measure_costs(manifest, target, drafter, rows, 0.1 * seconds)
    measured, costs, images = measure_candidates(pipeline, calibration, budget, costs, 0.55 * seconds, sampling, say)
    plans = [(one, best_plan(one.rates, costs)) for one in measured]
    plans = sorted((pair for pair in plans if pair[1].paths), key=lambda pair: -pair[1].rate)
    finalists = [Finalist(one, plan) for one, plan in plans[:FINALISTS]]
    left = max(0.2 * seconds, seconds - (time.monotonic() - began))
    compare(pipeline, calibration, finalists, left, sampling, say)
    best = max(finalists, key=lambda finalist: statistics.median(finalist.speeds), default=None)
    situation = pipeline.situation(calibration.images, sampling.get("temperature"), budget.name)
    choice = Choice(method="ar")
    if best is not None and statistics.median(best.speeds) > MARGIN:
        choice = as_choice(best)
    tuning = read_tuning(pipeline.bundle.digest)
    date = datetime.date.today().isoformat()
    path = write_tuning(tuning.with_entry(Entry(situation=situation, choice=choice, version=__version__, date=date)))
    return TuneResult(choice, situation, costs, measured, finalists, images, str(path))


def measure_candidates(
    pipeline: Pipeline,
    calibration: Calibration,
    budget: Budget,
    costs: HostCosts,
    seconds: float,
    sampling: Options,
    say: Say,
) -> tuple[list[Measured], HostCosts, int]:
    """Candidates within the budget, the costs with the work outside the engines, and images compared at least."""
    rungs = ladders(pipeline.bundle.manifest, budget)
    share = seconds / (1 + sum(map(len, rungs)))
    say("decoding plainly, for comparison")
    plain = _sample(pipeline, calibration, {**sampling, "method": "ar"}, share)
    per_step = plain.host_seconds / plain.steps
    measured, fewest = [], len(plain.scores)
    for rung in rungs:
        for candidate in rung:
            say(f"trying {candidate.label}")
            options: Options = {**sampling, **_parameters(candidate, tree_name(PROBE.paths))}
            drawn = _sample(pipeline, calibration, options, share)
            level = max(0.0, drawn.host_seconds / drawn.steps - per_step) / PROBE.depth
            costs = HostCosts(costs.target, costs.drafter, per_step, level)
            fewest = min(fewest, len(drawn.scores))
            ratio, error = _paired_ratio(drawn.scores, plain.scores)
            found = Measured(candidate, drawn.counts.rates(), drawn.tvd_per_code, ratio, error)
            if candidate.method != "eagle" and not budget.allows(found):
                break
            measured.append(found)
    return measured, costs, fewest


@dataclass
class _Drawn:
    """What a few decoded batches gave; `scores` are nats per code, image by image."""

    counts: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    scores: list[float] = field(default_factory=list)
    tvd_per_code: float = 0.0
    host_seconds: float = 0.0
    steps: int = 0


def _sample(pipeline: Pipeline, calibration: Calibration, options: Options, seconds: float) -> _Drawn:
    """Decode batches until `seconds` have passed, at least one."""
    began = time.monotonic()
    drawn = _Drawn()
    for index in itertools.count():
        last: StreamStep | None = None
        request = calibration.batch(index)
        for last in pipeline.stream(**request, **options):
            for part in last.step.parts:
                drawn.counts.add(part)
        assert last is not None
        assert last.stats is not None
        drawn.host_seconds += last.stats.host_seconds
        drawn.steps += last.stats.target_passes
        drawn.tvd_per_code += last.stats.realised_tvd / len(last.codes[0])
        drawn.scores += pipeline.negative_log_likelihoods(last.codes, **request, **options)
        if time.monotonic() - began > seconds:
            break
    drawn.tvd_per_code /= index + 1
    return drawn


def _paired_ratio(scores: Sequence[float], plain: Sequence[float]) -> tuple[float, float]:
    """Ratio of the sums over the images that both have, and its standard error (infinite for one image)."""
    pairs = list(zip(scores, plain, strict=False))  # the same prompts and seeds, one list longer
    own, other = (sum(column) for column in zip(*pairs, strict=True))
    ratio = own / other
    if len(pairs) < 2:
        return ratio, float("inf")
    spread = statistics.stdev(a - ratio * b for a, b in pairs)
    return ratio, spread * len(pairs) ** 0.5 / other


def compare(
    pipeline: Pipeline,
    calibration: Calibration,
    finalists: Sequence[Finalist],
    seconds: float,
    sampling: Options,
    say: Say,
) -> None:
    """Run every finalist and plain decoding in turns on the same prompts and seeds; at least three turns."""
    if not finalists:
        return
    began = time.monotonic()
    for turn in itertools.count():
        if turn >= 3 and time.monotonic() - began > seconds:
            return
        say(f"comparing {len(finalists)} ways with plain decoding, turn {turn + 1}")
        options: Options = {**sampling, "method": "ar"}
        plain = pipeline(**calibration.batch(turn), **options).stats.seconds
        for finalist in finalists:
            result = pipeline(**calibration.batch(turn), **options_of(finalist, sampling))
            finalist.speeds.append(plain / result.stats.seconds)
            finalist.tokens.append(result.stats.tokens_per_target_pass)


def options_of(finalist: Finalist, sampling: Options) -> Options:
    """A request's parameters for a finalist."""
    return {**sampling, **_parameters(finalist.measured.candidate, tree_name(finalist.plan.paths))}


def as_choice(finalist: Finalist) -> Choice:
    """What to store of the winner."""
    candidate = finalist.measured.candidate
    return Choice(
        method=candidate.method,
        tree=tree_name(finalist.plan.paths),
        neighbors=candidate.neighbors,
        delta=candidate.delta,
        lambda_=candidate.lambda_,
        speed_against_ar=statistics.median(finalist.speeds),
        tokens_per_target_pass=statistics.mean(finalist.tokens),
        tvd_per_code=finalist.measured.tvd_per_code,
        nll_ratio=finalist.measured.nll_ratio,
    )


def _parameters(candidate: Candidate, tree: str) -> Options:
    """The request parameters of a candidate with a tree."""
    parameters = Options(method=candidate.method, tree=tree)
    if candidate.neighbors is not None:
        parameters["neighbors"] = candidate.neighbors
    if candidate.delta is not None:
        parameters["delta"] = candidate.delta
    if candidate.lambda_ is not None:
        parameters["lambda_"] = candidate.lambda_
    return parameters
