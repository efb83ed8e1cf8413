"""Scripted random choices: tests run a function once for every combination of choices, and know the probability."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lantern_rt.runtime.sampling import Probabilities


@dataclass
class Script:
    """Replacement of a random generator, which makes every choice by a plan. `follow_all_plans` goes through all plans.

    Choices before `follows_plan` is set are random with a fixed seed, and so the same in every run.
    """

    seed: int
    plan: list[int] = field(default_factory=list)

    def follow_all_plans(self) -> Iterator[Script]:
        """Yield this script once for each plan. After the caller's choices, `weight` is the probability of the plan."""
        while True:
            self.rng = np.random.default_rng(self.seed)
            self.follows_plan = False
            self.weight: float = 1.0
            self.num_choices: int = 0
            self.option_counts: list[int] = []
            # interval that contains the uniform number of each position, by the comparisons so far
            self.bounds: dict[int, tuple[float, float]] = {}
            yield self
            plan = [*self.plan, *[0] * (self.num_choices - len(self.plan))]
            while plan and plan[-1] + 1 == self.option_counts[len(plan) - 1]:
                plan.pop()
            if not plan:
                return
            self.plan = [*plan[:-1], plan[-1] + 1]

    def choose(self, weights: NDArray[np.float64]) -> int:
        """Return the index of an option with positive weight: the option of the plan, or a random option."""
        possible = np.flatnonzero(weights > 0)
        probabilities = weights[possible] / weights.sum()
        if not self.follows_plan:
            return int(possible[self.rng.choice(len(possible), p=probabilities)])
        option = self.plan[self.num_choices] if self.num_choices < len(self.plan) else 0
        self.option_counts.append(len(possible))
        self.num_choices += 1
        self.weight *= probabilities[option]
        return int(possible[option])

    def choose_below(self, position: int, threshold: float) -> bool:
        """Choose whether the uniform number of a position is below `threshold`.

        The choice does not contradict earlier comparisons of the same number.
        """
        low, high = self.bounds.get(position, (0.0, 1.0))
        middle = min(max(threshold, low), high)
        is_below = self.choose(np.array([middle - low, high - middle])) == 0
        self.bounds[position] = (low, middle) if is_below else (middle, high)
        return is_below

    def open_stream(self, position: int) -> PositionStream:
        return PositionStream(self, position)

    def random(self) -> LazyUniform:
        """Replace `Generator.random`: return a number that is chosen when it is compared."""
        return LazyUniform(self)

    def sample_code(self, distribution: Probabilities, rng: object) -> int:
        """Replace `runtime.sampling.sample_code`: return a token of `distribution`, chosen by the plan."""
        return self.choose(distribution)


@dataclass(frozen=True)
class LazyUniform:
    """A uniform number whose value is not chosen yet. A comparison chooses whether it is below the threshold."""

    script: Script
    position: int | None = None  # position of the number in the sequence; None: a new number for each comparison

    def __le__(self, threshold: float) -> bool:
        if self.position is not None:
            return self.script.choose_below(self.position, threshold)
        return self.script.choose(np.array([threshold, 1 - threshold])) == 0

    __lt__ = __le__


@dataclass(frozen=True)
class PositionStream:
    """A random stream that returns the uniform number of one position at each call."""

    script: Script
    position: int

    def random(self) -> LazyUniform:
        return LazyUniform(self.script, self.position)
