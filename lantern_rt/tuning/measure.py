"""What candidates give and cost in quality, from really decoding calibration prompts.

Does not know costs of passes other than what it finds outside the engines, and does not choose.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from ..pipeline import Pipeline
from ..planning.candidates import WINDOWS, Budget, Measured, Quality, exact_candidates, ladders
from ..planning.costs import HostCosts
from ..planning.rates import PROBE, AcceptanceCounts
from ..planning.records import Candidate
from ..requests import Options
from ..results import StreamStep
from ..runtime.likelihood import Likelihood
from ..runtime.tree_names import tree_name

Say = Callable[[str], None]
EXACT_SHARES = 3  # time for what is exact, against that for one relaxation
RELAXED_WINDOWS = 3  # windows that a relaxed `sjd` is measured with


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
class Found:
    """Candidates within the budget, the costs with the work outside the engines, and what there was no time for."""

    measured: list[Measured]
    costs: HostCosts
    untried: list[Candidate]


def measure_candidates(
    pipeline: Pipeline,
    calibration: Calibration,
    budget: Budget,
    costs: HostCosts,
    seconds: float,
    sampling: Options,
    known: Mapping[Candidate, Quality],
    say: Say,
) -> Found:
    """Measure for about `seconds`: what is exact in any case, then relaxations, from careful to bold.

    known: what has been found before, perhaps of more images.
    """
    return _Measuring(pipeline, calibration, budget, costs, seconds, sampling, known, say).run()


@dataclass
class _Drawn:
    """What a few decoded batches gave; `scores` are image by image."""

    counts: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    scores: list[Likelihood] = field(default_factory=list)
    tvd_per_code: float = 0.0
    host_seconds: float = 0.0
    passes: int = 0
    steps: int = 0
    codes: int = 0

    @property
    def host_per_pass(self) -> float:
        """Seconds outside the engines, a target pass."""
        return self.host_seconds / self.passes

    @property
    def codes_per_pass(self) -> float:
        """Codes that a pass commits for an image, the prefill left out."""
        return self.codes / self.steps


class _Measuring:
    """One measurement of all candidates."""

    def __init__(
        self,
        pipeline: Pipeline,
        calibration: Calibration,
        budget: Budget,
        costs: HostCosts,
        seconds: float,
        sampling: Options,
        known: Mapping[Candidate, Quality],
        say: Say,
    ) -> None:
        manifest = pipeline.bundle.manifest
        self.pipeline, self.calibration, self.budget = pipeline, calibration, budget
        self.costs, self.sampling, self.known, self.say = costs, sampling, known, say
        temperature = sampling.get("temperature")
        greedy = (manifest.sampling.temperature if temperature is None else temperature) == 0
        self.exact = exact_candidates(manifest, greedy)
        self.ladders = [] if budget.exact else ladders(manifest)
        self.shares = 2 + EXACT_SHARES * len(self.exact) + sum(map(len, self.ladders))  # still to be given away
        self.deadline = time.monotonic() + seconds
        self.windows: tuple[int, ...] = WINDOWS
        self.plain = _Drawn()
        self.measured: list[Measured] = []

    def run(self) -> Found:
        self.say("decoding plainly, for comparison")
        self.plain = self._draw({"method": "ar"}, self._seconds(2))
        self.costs = replace(self.costs, step=self.plain.host_per_pass)
        for candidate in self.exact:
            self._try(candidate)
        untried: list[Candidate] = []
        climbing = self.ladders
        while climbing:
            still = []
            for candidate, *bolder in climbing:
                if time.monotonic() > self.deadline:
                    untried.append(candidate)
                elif not self._try(candidate):
                    self.shares -= len(bolder)
                elif bolder:
                    still.append(bolder)
            climbing = still
        if untried:
            self.say(
                f"no time for {'; '.join(candidate.label for candidate in untried)}, or bolder; give more --minutes"
            )
        return Found(self.measured, self.costs, untried)

    def _seconds(self, shares: int) -> float:
        """How long to measure what takes so many shares of the time that is left."""
        seconds = max(0.0, self.deadline - time.monotonic()) * shares / self.shares
        self.shares -= shares
        return seconds

    def _try(self, candidate: Candidate) -> bool:
        """Measure a candidate and keep it if it is within the budget; whether it is."""
        self.say(f"trying {candidate.label}")
        seconds = self._seconds(EXACT_SHARES if candidate.exact else 1)
        found = self._window(candidate, seconds) if candidate.method == "sjd" else self._tree(candidate, seconds)
        if not self.budget.allows(candidate, found.quality, self.known.get(candidate, found.quality)):
            return False
        self.measured.append(found)
        return True

    def _tree(self, candidate: Candidate, seconds: float) -> Measured:
        drawn = self._draw({**parameters(candidate), "tree": tree_name(PROBE.paths)}, seconds)
        level = max(0.0, drawn.host_per_pass - self.costs.step) / PROBE.depth
        self.costs = replace(self.costs, level=level)
        ratio, error = likelihood_ratio(drawn.scores, self.plain.scores)
        return Measured(candidate, drawn.tvd_per_code, ratio, error, len(drawn.scores), rates=drawn.counts.rates())

    def _window(self, candidate: Candidate, seconds: float) -> Measured:
        """Windows on the same prompts; the quality is the worst one's. Relaxed only those that suit this host."""
        each = seconds / len(self.windows)
        drawn = {window: self._draw({**parameters(candidate), "window": window}, each) for window in self.windows}
        codes = {window: one.codes_per_pass for window, one in drawn.items()}
        if candidate.exact:
            redraft = [(one.host_per_pass - self.costs.step) / window for window, one in drawn.items()]
            self.costs = replace(self.costs, redraft=max(0.0, statistics.median(redraft)))
            by_rate = sorted(WINDOWS, key=lambda window: -codes[window] / self.costs.window_seconds(window))
            self.windows = tuple(sorted(by_rate[:RELAXED_WINDOWS]))
        fewest = min(len(one.scores) for one in drawn.values())
        means = [
            mean_likelihood(scores) for scores in zip(*(one.scores[:fewest] for one in drawn.values()), strict=True)
        ]
        ratio, error = likelihood_ratio(means, self.plain.scores)
        return Measured(
            candidate,
            max(one.tvd_per_code for one in drawn.values()),
            ratio,
            error,
            fewest,
            windows=codes,
        )

    def _draw(self, options: Options, seconds: float) -> _Drawn:
        """Decode batches until `seconds` have passed, at least one."""
        began = time.monotonic()
        drawn = _Drawn()
        asked = cast(Options, {**self.sampling, **options})
        for index in itertools.count():
            last: StreamStep | None = None
            request = self.calibration.batch(index)
            for last in self.pipeline.stream(**request, **asked):
                for part in last.step.parts:
                    drawn.counts.add(part)
            assert last is not None
            assert last.stats is not None
            stats = last.stats
            drawn.host_seconds += stats.host_seconds
            drawn.passes += stats.target_passes
            drawn.steps += sum(stats.accepted_lengths)
            drawn.codes += sum((length + 1) * times for length, times in enumerate(stats.accepted_lengths))
            drawn.tvd_per_code += stats.realised_tvd / len(last.codes[0])
            drawn.scores += self.pipeline.likelihoods(last.codes, **request, **asked)
            if time.monotonic() - began > seconds:
                break
        drawn.tvd_per_code /= index + 1
        return drawn


def parameters(candidate: Candidate) -> Options:
    """The request parameters of a candidate, without a tree or a window."""
    return cast(Options, {"method": candidate.method, **candidate.relaxing()})


def likelihood_ratio(scores: Sequence[Likelihood], plain: Sequence[Likelihood]) -> tuple[float, float]:
    """Negative log-likelihood against plain decoding's, and its standard error (infinite for one image).

    What was to be expected, the entropy, is taken off both: it varies from picture to picture far more than methods
    differ. Above 1 codes are less likely than the target's own, below 1 likelier.
    """
    pairs = list(zip(scores, plain, strict=False))  # the same prompts and seeds, one list longer
    more = [(one.nats - one.entropy) - (other.nats - other.entropy) for one, other in pairs]
    scale = statistics.mean(other.nats for _, other in pairs)
    error = statistics.stdev(more) / len(more) ** 0.5 / scale if len(more) > 1 else float("inf")
    return 1 + statistics.mean(more) / scale, error


def mean_likelihood(scores: Sequence[Likelihood]) -> Likelihood:
    """Of several images, as of one."""
    return Likelihood(statistics.mean(one.nats for one in scores), statistics.mean(one.entropy for one in scores))
