"""What methods give and give away, from really decoding: acceptance rates, tokens of windows, likelihoods."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..bundle.manifest import Manifest
from ..methods import Ar, Eagle, LanternPlusPlus, MethodConfig, Sjd
from ..pipeline import Pipeline
from ..planning.acceptance_statistics import MethodStatistics, Quality, WindowTokens
from ..planning.budget import Budget
from ..planning.costs import HostCosts
from ..runner import Contender, Subjects, run, scored
from ..runtime.likelihood import Likelihood
from ..runtime.tree_names import tree_name
from .acceptance_counts import PROBE_DEPTH, PROBE_PATHS, AcceptanceCounts

Say = Callable[[str], None]
# Windows of sjd. A pass has one node more: these are sizes at which passes are timed, and two between them.
WINDOWS = (3, 5, 7, 11, 15, 31)
EXACT_SHARES = 3  # time for what is exact, against that for one relaxation
RELAXED_WINDOWS = 3  # windows that a relaxed `sjd` is measured with


@dataclass(frozen=True)
class Calibration:
    """What to decode while measuring: `images` subjects together, with this sampling."""

    pipeline: Pipeline
    subjects: Subjects
    images: int
    sampling: Mapping[str, Any]

    @property
    def greedy(self) -> bool:
        """Whether temperature is 0."""
        temperature = self.sampling.get("temperature")
        return (self.pipeline.bundle.manifest.sampling.temperature if temperature is None else temperature) == 0

    def contender(self, method: MethodConfig) -> Contender:
        """A method with this sampling."""
        return Contender(str(method), {**self.sampling, "method": method})


@dataclass(frozen=True)
class Found:
    """Methods within the budget, the costs with the work outside the engines, and what there was no time for."""

    entries: list[MethodStatistics]
    costs: HostCosts
    untried: list[MethodConfig]


def exact_methods(manifest: Manifest) -> list[MethodConfig]:
    """Methods that give nothing away; tree and window are still open."""
    return [Sjd(), *([Eagle()] if manifest.drafter else [])]


def ladders(manifest: Manifest) -> list[list[MethodConfig]]:
    """Relaxed methods, as ladders from careful to bold; what fails on one rung is not tried bolder."""
    table = manifest.neighbors
    few, many = min(10, table), min(100, table)
    omegas = (1.25, 1.5, 2.0, 3.0)
    rungs: list[list[MethodConfig]] = [[Sjd(omega=omega, anneal=0.5) for omega in omegas]]
    if table:
        rungs.append([Sjd(neighbors=few, lambda_=bound) for bound in (1.5, 2.0, 3.0, 5.0)])
        rungs.append([Sjd(neighbors=many, delta=bound) for bound in (0.01, 0.03, 0.1)])
    if manifest.drafter:
        rungs.append([LanternPlusPlus(neighbors=None, lambda_=None, omega=omega, anneal=0.5) for omega in omegas])
        for neighbors in sorted({few, many}) if table else ():
            rungs.append([LanternPlusPlus(neighbors=neighbors, lambda_=bound) for bound in (1.3, 1.7, 2.5, 4.0, 8.0)])
    return rungs


def measure_methods(
    calibration: Calibration,
    budget: Budget,
    costs: HostCosts,
    seconds: float,
    known: Mapping[MethodConfig, Quality],
    say: Say,
) -> Found:
    """Measure for about `seconds`: what is exact in any case, then relaxations, from careful to bold.

    known: what has been found before, perhaps of more images.
    """
    return _Measuring(calibration, budget, costs, seconds, known, say).run()


@dataclass
class _Drawn:
    """What a few decoded batches gave; `scores` are image by image."""

    counts: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    scores: list[Likelihood] = field(default_factory=list)
    tvd_per_token: list[float] = field(default_factory=list)
    host_seconds: float = 0.0
    passes: int = 0
    steps: int = 0
    tokens: int = 0

    @property
    def host_per_pass(self) -> float:
        """Seconds outside the engines, a target pass."""
        return self.host_seconds / self.passes

    @property
    def tokens_per_pass(self) -> float:
        """Tokens that a pass commits for an image, the prefill left out."""
        return self.tokens / self.steps


class _Measuring:
    """One measurement of all methods."""

    def __init__(
        self,
        calibration: Calibration,
        budget: Budget,
        costs: HostCosts,
        seconds: float,
        known: Mapping[MethodConfig, Quality],
        say: Say,
    ) -> None:
        manifest = calibration.pipeline.bundle.manifest
        self.calibration, self.budget, self.costs, self.known, self.say = calibration, budget, costs, known, say
        self.exact = exact_methods(manifest)
        self.ladders = [] if budget.exact else ladders(manifest)
        self.shares = 2 + EXACT_SHARES * len(self.exact) + sum(map(len, self.ladders))  # still to be given away
        self.deadline = time.monotonic() + seconds
        self.windows: tuple[int, ...] = WINDOWS
        self.plain = _Drawn()
        self.entries: list[MethodStatistics] = []

    def run(self) -> Found:
        self.say("decoding plainly, for comparison")
        self.plain = self._draw(Ar(), self._seconds(2))
        self.costs = replace(self.costs, step=self.plain.host_per_pass)
        for method in self.exact:
            self._try(method)
        untried: list[MethodConfig] = []
        climbing = self.ladders
        while climbing:
            still = []
            for method, *bolder in climbing:
                if time.monotonic() > self.deadline:
                    untried.append(method)
                elif not self._try(method):
                    self.shares -= len(bolder)
                elif bolder:
                    still.append(bolder)
            climbing = still
        if untried:
            self.say(f"no time for {', '.join(map(describe, untried))}, or bolder; give more --minutes")
        return Found(self.entries, self.costs, untried)

    def _seconds(self, shares: int) -> float:
        """How long to measure what takes so many shares of the time that is left."""
        seconds = max(0.0, self.deadline - time.monotonic()) * shares / self.shares
        self.shares -= shares
        return seconds

    def _try(self, method: MethodConfig) -> bool:
        """Measure a method and keep it if it is within the budget; whether it is."""
        self.say(f"trying {describe(method)}")
        seconds = self._seconds(EXACT_SHARES if method.exact else 1)
        found = self._window(method, seconds) if isinstance(method, Sjd) else self._tree(method, seconds)
        if not self.budget.allows(method, found.quality, self.known.get(method, found.quality)):
            return False
        self.entries.append(found)
        return True

    def _tree(self, method: MethodConfig, seconds: float) -> MethodStatistics:
        drawn = self._draw(method.model_copy(update={"tree": tree_name(PROBE_PATHS)}), seconds)
        level = max(0.0, drawn.host_per_pass - self.costs.step) / PROBE_DEPTH
        self.costs = replace(self.costs, level=level)
        tvd = statistics.mean(drawn.tvd_per_token)
        return self._entry(method, tvd, drawn.scores, rates=list(drawn.counts.rates()))

    def _window(self, method: Sjd, seconds: float) -> MethodStatistics:
        """Windows on the same prompts; the quality is the worst one's. Relaxed only those that suit this host."""
        each = seconds / len(self.windows)
        drawn = {window: self._draw(method.model_copy(update={"window": window}), each) for window in self.windows}
        tokens = {window: one.tokens_per_pass for window, one in drawn.items()}
        if method.exact:
            redraft = [(one.host_per_pass - self.costs.step) / window for window, one in drawn.items()]
            self.costs = replace(self.costs, redraft=max(0.0, statistics.median(redraft)))
            by_rate = sorted(WINDOWS, key=lambda window: -tokens[window] / self.costs.window_seconds(window))
            self.windows = tuple(sorted(by_rate[:RELAXED_WINDOWS]))
        by_image = zip(*(one.scores for one in drawn.values()), strict=False)
        scores = [mean_likelihood(of_windows) for of_windows in by_image]
        tvd = max(statistics.mean(one.tvd_per_token) for one in drawn.values())
        return self._entry(method, tvd, scores, windows=tokens)

    def _entry(
        self,
        method: MethodConfig,
        tvd: float,
        scores: Sequence[Likelihood],
        rates: Sequence[NDArray[np.float64]] = (),
        windows: Mapping[int, float] = MappingProxyType({}),
    ) -> MethodStatistics:
        """The record of a method; a likelihood that was compared on one image counts as 100 % unsure."""
        ratio, error = likelihood_ratio(scores, self.plain.scores)
        return MethodStatistics(
            method=method,  # type: ignore[arg-type]  # checked by pydantic
            greedy=self.calibration.greedy,
            images=len(scores),
            tvd_per_token=round(tvd, 5),
            nll_ratio=round(ratio, 5),
            nll_error=round(error, 5) if np.isfinite(error) else 1.0,
            acceptance_rates=tuple(tuple(round(float(rate), 4) for rate in row) for row in rates),
            windows=tuple(WindowTokens(window=w, tokens=round(n, 4)) for w, n in sorted(windows.items())),
        )

    def _draw(self, method: MethodConfig, seconds: float) -> _Drawn:
        """Decode batches until `seconds` have passed, at least one."""
        began, drawn, pipeline = time.monotonic(), _Drawn(), self.calibration.pipeline
        contender = self.calibration.contender(method)
        for index in itertools.count():
            request = self.calibration.subjects.request(index, self.calibration.images)
            one = scored(pipeline, run(pipeline, contender, request, paint=False, watch=drawn.counts.add), request)
            stats = one.statistics
            drawn.host_seconds += stats.host_seconds
            drawn.passes += stats.target_passes
            drawn.steps += sum(stats.accepted_lengths)
            drawn.tokens += sum((length + 1) * times for length, times in enumerate(stats.accepted_lengths))
            drawn.tvd_per_token.append(one.tvd_per_token)
            drawn.scores += one.likelihoods
            if time.monotonic() - began > seconds:
                break
        return drawn


def describe(method: MethodConfig) -> str:
    """The method string without tree and window, which are still open."""
    return ":".join(part for part in str(method).split(":") if not part.startswith(("tree=", "window=")))


def likelihood_ratio(scores: Sequence[Likelihood], plain: Sequence[Likelihood]) -> tuple[float, float]:
    """Negative log-likelihood against plain decoding's, and its standard error (infinite for one image).

    The expected value, the entropy, is subtracted from both: it varies from picture to picture far more than methods
    differ. Above 1 tokens are less likely than the target's own, below 1 more likely.
    """
    pairs = list(zip(scores, plain, strict=False))  # the same prompts and seeds, one list longer
    more = [(one.nats - one.entropy) - (other.nats - other.entropy) for one, other in pairs]
    scale = statistics.mean(other.nats for _, other in pairs)
    error = statistics.stdev(more) / len(more) ** 0.5 / scale if len(more) > 1 else float("inf")
    return 1 + statistics.mean(more) / scale, error


def mean_likelihood(scores: Sequence[Likelihood]) -> Likelihood:
    """Of several images, as of one."""
    return Likelihood(statistics.mean(one.nats for one in scores), statistics.mean(one.entropy for one in scores))
