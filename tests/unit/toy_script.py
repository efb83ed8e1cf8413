"""Replaces random streams in a run, and runs every combination of random choices with its probability."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lantern_rt.runtime.sampling import Probabilities


@dataclass
class Script:
    """Makes every random choice of a run by plan; `runs` goes through all plans.

    Choices made before `armed` is set come from `seed`, the same in every run.

    Attributes:
        seed: seed of the choices made before `armed`.
        plan: number of the option that each choice takes, in order; later choices take option 0.
    """

    seed: int
    plan: list[int] = field(default_factory=list)

    def runs(self) -> Iterator[Script]:
        """Yield this script once for each plan; `weight` is then the probability of the run."""
        while True:
            self.rng = np.random.default_rng(self.seed)
            self.armed = False
            self.weight: float = 1.0
            self.num_choices: int = 0
            self.option_counts: list[int] = []
            self.bounds: dict[int, tuple[float, float]] = {}  # of the uniform number of each position
            yield self
            plan = [*self.plan, *[0] * (self.num_choices - len(self.plan))]
            while plan and plan[-1] + 1 == self.option_counts[len(plan) - 1]:
                plan.pop()
            if not plan:
                return
            self.plan = [*plan[:-1], plan[-1] + 1]

    def choose(self, weights: NDArray[np.float64]) -> int:
        """Choose an option with positive weight, by plan."""
        possible = np.flatnonzero(weights > 0)
        probabilities = weights[possible] / weights.sum()
        if not self.armed:
            return int(possible[self.rng.choice(len(possible), p=probabilities)])
        option = self.plan[self.num_choices] if self.num_choices < len(self.plan) else 0
        self.option_counts.append(len(possible))
        self.num_choices += 1
        self.weight *= probabilities[option]
        return int(possible[option])

    def below(self, position: int, threshold: float) -> bool:
        """Choose whether the uniform number of a position is below `threshold`, consistently with earlier choices."""
        low, high = self.bounds.get(position, (0.0, 1.0))
        middle = min(max(threshold, low), high)
        is_below = self.choose(np.array([middle - low, high - middle])) == 0
        self.bounds[position] = (low, middle) if is_below else (middle, high)
        return is_below

    def at(self, position: int) -> PositionStream:
        """Return a stream whose every number is the uniform number of `position`."""
        return PositionStream(self, position)

    def random(self) -> LazyUniform:
        """Stand in for `Generator.random`."""
        return LazyUniform(self)

    def draw(self, distribution: Probabilities, rng: object) -> int:
        """Stand in for `runtime.sampling.sample`."""
        return self.choose(distribution)


@dataclass(frozen=True)
class LazyUniform:
    """A uniform number that is not drawn yet: a comparison chooses on which side of the threshold it lies."""

    script: Script
    position: int | None = None  # position that the number belongs to; None: a new number for each comparison

    def __le__(self, threshold: float) -> bool:
        if self.position is not None:
            return self.script.below(self.position, threshold)
        return self.script.choose(np.array([threshold, 1 - threshold])) == 0

    __lt__ = __le__


@dataclass(frozen=True)
class PositionStream:
    """A random stream that repeats the uniform number of one position."""

    script: Script
    position: int

    def random(self) -> LazyUniform:
        return LazyUniform(self.script, self.position)
