"""What methods give and give away, from really decoding: acceptance rates, tokens of windows, likelihoods."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..bundle.manifest import Manifest
from ..compare.turns import Contender, Run, Subjects
from ..methods import Ar, Auto, Eagle, LanternPlusPlus, MethodConfig, RowParallel, Sjd
from ..pipeline import Pipeline
from ..planning.acceptance_statistics import (
    Fronts,
    Judged,
    MethodStatistics,
    Quality,
    bundle_statistics,
    drafting_aside,
)
from ..planning.auto import known_statistics
from ..planning.budget import budget_of
from ..planning.costs import early_pass, measure_costs, with_overhead
from ..planning.store import read_tuning
from ..requests import Settings
from ..results import Ints
from ..runtime.grid import Raster, row_batch_sizes
from ..runtime.likelihood import Likelihood
from ..runtime.scheduler import RequestStep
from ..runtime.tree_names import tree_name
from .acceptance_counts import PROBE_DEPTH, PROBE_PATHS, AcceptanceCounts

Say = Callable[[str], None]
Watch = Callable[[RequestStep], None]
# Windows of sjd. A pass has one node more: these are sizes at which passes are timed, and two between them.
WINDOWS = (3, 5, 7, 11, 15, 31)
EXACT_SHARES = 3  # time for what is exact, against that for one relaxation
ROW_WINDOWS = (8, 6, 5, 4, 3)  # of `rows`, in sixteenths of the grid's columns
ROW_DRAFTS = (1, 2, 3)  # of every row
RELAXED_WINDOWS = 3  # windows that a relaxed `sjd` is measured with
LEAST_PASSES = 32  # of what is exact, if that is less than an image: fewer say little of tokens per pass


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
    windows = dict.fromkeys(max(1, manifest.grid_columns * share // 16) for share in ROW_WINDOWS)
    rungs.append([RowParallel(window=window) for window in windows])
    return rungs


@dataclass(frozen=True)
class Drawn:
    """The images of one call, or as much of them as there was time for.

    codes: per image. tokens: that steps gave an image, the prefill left out; none for `ar`. fronts: nodes and tokens of
    an image's passes, for `rows`. host_seconds: outside the engines, a target pass; None if the call was cut off.
    likelihoods: per image, if they were computed.
    """

    codes: list[Ints]
    tokens: list[int]
    fronts: list[tuple[int, int]]
    tvd_per_token: float
    host_seconds: float | None
    likelihoods: list[Likelihood] = field(default_factory=list)


@dataclass
class Measurement:
    """What passes cost, and what methods within the budget give: decoding `images` subjects together.

    settings: sampling, and method `auto` with its quality. judged: what is known of images. entries: methods within the
    budget. untried: those there was no time for. costs: with the work outside the engines. deadline: of `run`, an
    instant of `time.monotonic`.
    """

    pipeline: Pipeline
    subjects: Subjects
    images: int
    settings: Settings
    say: Say
    judged: Mapping[MethodConfig, Judged] = field(default_factory=dict)
    entries: list[MethodStatistics] = field(default_factory=list)
    untried: list[MethodConfig] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert isinstance(self.settings.method, Auto)
        bundle, quality = self.pipeline.bundle, self.settings.method
        self.budget = budget_of(quality)
        self.situation = self.pipeline.situation(self.images, self.settings.sampling.temperature, quality.quality)
        brought, tuning = bundle_statistics(bundle), read_tuning(bundle.digest)
        before = known_statistics(bundle.manifest, brought, tuning, self.situation.greedy)
        self.known: dict[MethodConfig, Quality] = {drafting_aside(entry.method): entry for entry in before}
        self.windows: Sequence[int] = WINDOWS

    def contender(self, method: MethodConfig) -> Contender:
        """A method with this sampling."""
        return Contender(str(method), {"method": method, "temperature": self.settings.sampling.temperature})

    def run(self, seconds: float) -> None:
        """Measure for `seconds`: passes, what is exact, then relaxations, from careful to bold.

        A pass that is under way then is waited for, and the likelihoods of what was drawn.
        """
        self.deadline = time.monotonic() + seconds
        manifest = self.pipeline.bundle.manifest
        self.say("measuring passes")
        rows = self.images * (2 if self.settings.sampling.guided else 1)
        target, drafter = self.pipeline.decoders()
        self.costs = measure_costs(manifest, target, drafter, rows, seconds / 9, self.deadline)
        plain = early_pass(manifest, target, rows)
        self.costs = with_overhead(self.costs, plain, self._steps, seconds / 18, self.deadline)
        exact, climbing = exact_methods(manifest), [] if self.budget.exact else self._ladders()
        self.shares = 2 + EXACT_SHARES * len(exact) + sum(map(len, climbing))  # still to be given away
        self.say("decoding plainly, for comparison")
        self.plain = self._draw(Ar(), self._seconds(2))
        self.costs = replace(self.costs, step=_host_per_pass(self.plain, self.costs.step))
        for method in exact:
            self._try(method)
        while climbing:
            still = []
            for method, *bolder in climbing:
                if time.monotonic() > self.deadline:
                    self.untried.append(method)
                elif not self._try(method):
                    self.shares -= len(bolder)
                elif bolder:
                    still.append(bolder)
            climbing = still
        if self.untried:
            self.say(f"no time for {', '.join(map(describe, self.untried))}, or bolder; give more --minutes")

    def _ladders(self) -> list[list[MethodConfig]]:
        """Relaxed methods; those that were judged each alone, as it is known what they give away."""
        rungs = [[one for one in rung if one not in self.judged] for rung in ladders(self.pipeline.bundle.manifest)]
        return [*([method] for method in self.judged), *filter(None, rungs)]

    def _seconds(self, shares: int) -> float:
        """How long to measure what takes so many shares of the time that is left."""
        seconds = max(0.0, self.deadline - time.monotonic()) * shares / self.shares
        self.shares -= shares
        return seconds

    def _try(self, method: MethodConfig) -> bool:
        """Measure a method and keep it if it is within the budget; whether there was time, and it is."""
        self.say(f"trying {describe(method)}")
        seconds = self._seconds(EXACT_SHARES if method.exact else 1)
        if isinstance(method, Sjd):
            found = self._window(method, seconds)
        elif isinstance(method, RowParallel):
            found = self._rows(method, seconds)
        else:
            found = self._tree(method, seconds)
        if found is None:
            self.untried.append(method)
            return False
        if allowed := self.budget.allows(method, found, self.known.get(method, found)):
            self.entries.append(found)
        return allowed

    def _tree(self, method: MethodConfig, seconds: float) -> MethodStatistics | None:
        """What was found of a method with a drafter; None without time."""
        counts, costs = AcceptanceCounts(), self.costs
        named = method.model_copy(update={"tree": tree_name(PROBE_PATHS)})
        drawn = self._draw(named, seconds, counts.add)
        if not drawn:
            return None
        host = _host_per_pass(drawn, costs.step + PROBE_DEPTH * costs.level)
        self.costs = replace(costs, level=max(0.0, host - costs.step) / PROBE_DEPTH)
        rates = [[round(rate, 4) for rate in row] for row in counts.rates().tolist()]
        return self._entry(method, mean_tvd(drawn), likelihoods(drawn), acceptance_rates=rates)

    def _window(self, method: Sjd, seconds: float) -> MethodStatistics | None:
        """Windows on the same prompts; the quality is the worst one's. Relaxed only those that suit this host.

        None without time for all of them.
        """
        each, costs = seconds / len(self.windows), self.costs
        drawn = {window: self._draw(method.model_copy(update={"window": window}), each) for window in self.windows}
        if not all(drawn.values()):
            return None
        tokens = {window: statistics.mean(n for one in runs for n in one.tokens) for window, runs in drawn.items()}
        if method.exact:
            hosts = {w: _host_per_pass(runs, costs.step + w * costs.redraft) for w, runs in drawn.items()}
            redraft = statistics.median((host - costs.step) / window for window, host in hosts.items())
            self.costs = replace(costs, redraft=max(0.0, redraft))
            by_rate = sorted(WINDOWS, key=lambda window: -tokens[window] / self.costs.window_seconds(window))
            self.windows = sorted(by_rate[:RELAXED_WINDOWS])
        scores = [
            Likelihood(statistics.mean(one.nats for one in image), statistics.mean(one.entropy for one in image))
            for image in zip(*map(likelihoods, drawn.values()), strict=False)
        ]
        windows = [{"window": window, "tokens": round(mean, 4)} for window, mean in tokens.items()]
        return self._entry(method, max(map(mean_tvd, drawn.values())), scores, windows=windows)

    def _rows(self, method: RowParallel, seconds: float) -> MethodStatistics | None:
        """What rows at this distance give away, and how many passes they take; without drafts that needs no measuring.

        None without time.
        """
        each, manifest = seconds / len(ROW_DRAFTS), self.pipeline.bundle.manifest
        drawn = {drafts: self._draw(method.model_copy(update={"drafts": drafts}), each) for drafts in ROW_DRAFTS}
        if not all(drawn.values()):
            return None
        raster = Raster(manifest.codes_per_image, manifest.grid_columns, manifest.row_end)
        fronts = [_fronts(0, manifest.codes_per_image - 1, row_batch_sizes(raster, method.window))]
        for drafts, runs in drawn.items():
            nodes, tokens = zip(
                *(pair for one in runs if one.host_seconds is not None for pair in one.fronts), strict=True
            )
            fronts.append(_fronts(drafts, sum(tokens), nodes))
        most = max(drawn.values(), key=len)  # the pictures are the same
        return self._entry(method, 0.0, likelihoods(most), fronts=fronts)

    def _entry(self, method: MethodConfig, tvd: float, scores: Sequence[Likelihood], **gives: Any) -> MethodStatistics:
        """The record of a method; a likelihood that was compared on one image counts as 100 % unsure."""
        ratio, error = likelihood_ratio(scores, likelihoods(self.plain))
        quality = {"tvd_per_token": tvd, "nll_ratio": ratio, "nll_error": error if math.isfinite(error) else 1.0}
        fields = {name: round(value, 5) for name, value in quality.items()}
        found = {"method": method, "greedy": self.situation.greedy, "images": len(scores)}
        found["judged"] = self.judged.get(drafting_aside(method))
        return MethodStatistics.model_validate({**found, **fields, **gives})

    def _draw(self, method: MethodConfig, seconds: float, watch: Watch | None = None) -> list[Drawn]:
        """Decode batches until `seconds` have passed, the last one cut off; `watch` sees every part of every step.

        The first batch takes what it needs, `LEAST_PASSES`, or all of it where likelihoods are compared: those of a few
        codes say too little. Empty if there was no time for it.
        """
        compared = not method.exact or (isinstance(method, Ar) and not self.budget.exact)
        least, drawn = math.inf if compared else LEAST_PASSES, list[Drawn]()
        end = time.monotonic() + seconds
        while time.monotonic() < (end if drawn else self.deadline):
            request = self.subjects.request(len(drawn), self.images)
            one = self._decode(method, request, end, 0 if drawn else least, watch)
            if one is None:
                break
            if one.host_seconds is not None or not drawn:
                plain = self.contender(Ar()).options
                one = replace(one, likelihoods=self.pipeline.likelihoods(one.codes, **request, **plain))
            drawn.append(one)
        return drawn

    def _decode(
        self, method: MethodConfig, request: Mapping[str, Any], end: float, least: float, watch: Watch | None
    ) -> Drawn | None:
        """One call, cut off at the instant `end` after at least so many passes, and at the deadline in any case.

        None: that came too soon.
        """
        tokens, fronts, tvd = list[int](), list[tuple[int, int]](), 0.0
        for passes, step in enumerate(self.pipeline.stream(**request, **self.contender(method).options)):
            for part in step.step.parts:
                if watch is not None:
                    watch(part)
                if part.acceptance is not None:
                    tokens.append(len(part.codes))
                    tvd += part.acceptance.realised_tvd
                if part.placed is not None:
                    fronts.append((part.nodes, len(part.placed.codes)))
            now = time.monotonic()
            if step.stats is None and (now > self.deadline or (now > end and passes >= least)):
                if passes < least:
                    return None
                break
        host = None if step.stats is None else step.stats.host_seconds / step.stats.target_passes
        return Drawn(step.codes, tokens, fronts, tvd / sum(map(len, step.codes)), host)

    def _steps(self, method: MethodConfig) -> Iterator[object]:
        """The first subjects, step by step."""
        return self.pipeline.stream(**self.subjects.request(0, self.images), **self.contender(method).options)


def _fronts(drafts: int, tokens: int, nodes: Iterable[int]) -> Fronts:
    """The record of passes over so many nodes each."""
    return Fronts(drafts=drafts, tokens=tokens, passes=dict(sorted(Counter(nodes).items())))


def likelihoods(runs: Sequence[Run | Drawn]) -> list[Likelihood]:
    """Image by image."""
    return [score for one in runs for score in one.likelihoods]


def mean_tvd(runs: Sequence[Run | Drawn]) -> float:
    """Total variation given away per token."""
    return statistics.fmean((one.tvd_per_token for one in runs), [sum(map(len, one.codes)) for one in runs])


def _host_per_pass(drawn: Sequence[Drawn], otherwise: float) -> float:
    """Seconds outside the engines, a target pass: the median of finished calls; `otherwise` where none is."""
    return statistics.median([one.host_seconds for one in drawn if one.host_seconds is not None] or [otherwise])


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
