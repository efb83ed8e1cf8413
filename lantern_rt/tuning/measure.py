"""What candidates give and cost in quality, from really decoding calibration prompts.

Does not know costs of passes other than what it finds outside the engines, and does not choose.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from ..pipeline import Pipeline
from ..requests import Options
from ..results import StreamStep
from ..runtime.published_trees import tree_name
from .candidates import WINDOWS, Budget, Measured, exact_candidates, ladders
from .costs import HostCosts
from .rates import PROBE, AcceptanceCounts
from .records import Candidate

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
    say: Say,
) -> Found:
    """Measure for about `seconds`: what is exact in any case, then relaxations, from careful to bold."""
    return _Measuring(pipeline, calibration, budget, costs, seconds, sampling, say).run()


@dataclass
class _Drawn:
    """What a few decoded batches gave; `scores` are nats per code, image by image."""

    counts: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    scores: list[float] = field(default_factory=list)
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
        say: Say,
    ) -> None:
        manifest = pipeline.bundle.manifest
        self.pipeline, self.calibration, self.budget = pipeline, calibration, budget
        self.costs, self.sampling, self.say = costs, sampling, say
        temperature = sampling.get("temperature")
        greedy = (manifest.sampling.temperature if temperature is None else temperature) == 0
        self.exact = exact_candidates(manifest, greedy)
        self.ladders = [] if budget.exact else ladders(manifest)
        self.share = seconds / (1 + len(self.exact) + sum(map(len, self.ladders)))
        self.deadline = time.monotonic() + seconds
        self.plain = _Drawn()
        self.measured: list[Measured] = []

    def run(self) -> Found:
        self.say("decoding plainly, for comparison")
        self.plain = self._draw({"method": "ar"}, self.share)
        self.costs = replace(self.costs, step=self.plain.host_per_pass)
        for candidate in self.exact:
            self._try(candidate)
        untried: list[Candidate] = []
        climbing = self.ladders
        for rung in range(max(map(len, climbing), default=0)):
            still = []
            for ladder in climbing:
                if len(ladder) <= rung:
                    continue
                if time.monotonic() > self.deadline:
                    untried.append(ladder[rung])
                elif self._try(ladder[rung]):
                    still.append(ladder)
            climbing = still
        if untried:
            self.say(
                f"no time for {'; '.join(candidate.label for candidate in untried)}, or bolder; give more --minutes"
            )
        return Found(self.measured, self.costs, untried)

    def _try(self, candidate: Candidate) -> bool:
        """Measure a candidate and keep it if it is within the budget; whether it is."""
        self.say(f"trying {candidate.label}")
        found = self._windows(candidate) if candidate.method == "sjd" else self._tree(candidate)
        if not self.budget.allows(candidate, found.tvd_per_code, found.nll_ratio, found.nll_error):
            return False
        self.measured.append(found)
        return True

    def _tree(self, candidate: Candidate) -> Measured:
        drawn = self._draw({**parameters(candidate), "tree": tree_name(PROBE.paths)}, self.share)
        level = max(0.0, drawn.host_per_pass - self.costs.step) / PROBE.depth
        self.costs = replace(self.costs, level=level)
        ratio, error = _paired_ratio(drawn.scores, self.plain.scores)
        return Measured(candidate, drawn.tvd_per_code, ratio, error, len(drawn.scores), rates=drawn.counts.rates())

    def _windows(self, candidate: Candidate) -> Measured:
        """Every window on the same prompts; the quality is the worst window's."""
        share = self.share / len(WINDOWS)
        windows = {window: self._draw({**parameters(candidate), "window": window}, share) for window in WINDOWS}
        if candidate.exact:
            redraft = [(drawn.host_per_pass - self.costs.step) / window for window, drawn in windows.items()]
            self.costs = replace(self.costs, redraft=max(0.0, statistics.median(redraft)))
        fewest = min(len(drawn.scores) for drawn in windows.values())
        means = [statistics.mean(scores) for scores in zip(*(d.scores[:fewest] for d in windows.values()), strict=True)]
        ratio, error = _paired_ratio(means, self.plain.scores)
        return Measured(
            candidate,
            max(drawn.tvd_per_code for drawn in windows.values()),
            ratio,
            error,
            fewest,
            windows={window: drawn.codes_per_pass for window, drawn in windows.items()},
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
            drawn.scores += self.pipeline.negative_log_likelihoods(last.codes, **request, **asked)
            if time.monotonic() - began > seconds:
                break
        drawn.tvd_per_code /= index + 1
        return drawn


def parameters(candidate: Candidate) -> Options:
    """The request parameters of a candidate, without a tree or a window."""
    return cast(Options, {"method": candidate.method, **candidate.relaxing()})


def _paired_ratio(scores: Sequence[float], plain: Sequence[float]) -> tuple[float, float]:
    """Ratio of the sums over the images that both have, and its standard error (infinite for one image)."""
    pairs = list(zip(scores, plain, strict=False))  # the same prompts and seeds, one list longer
    own, other = (sum(column) for column in zip(*pairs, strict=True))
    ratio = own / other
    if len(pairs) < 2:
        return ratio, float("inf")
    spread = statistics.stdev(a - ratio * b for a, b in pairs)
    return ratio, spread * len(pairs) ** 0.5 / other
