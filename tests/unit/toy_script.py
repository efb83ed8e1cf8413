"""Stands in for random streams, and takes every branch of a run in turn, each with its probability."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lantern_rt.runtime.sampling import Probabilities


@dataclass
class Script:
    """Makes every random choice of a run by plan, and steps through all plans in turn.

    Choices made before `armed` are drawn once and for all from a seed. A plan is a list of option numbers.
    """

    seed: int
    plan: list[int] = field(default_factory=list)

    def runs(self) -> Iterator[Script]:
        while True:
            self.rng = np.random.default_rng(self.seed)
            self.armed = False
            self.weight = 1.0  # type: ignore[var-annotated]
            self.made = 0
            self.options = []
            self.numbers: dict[int, tuple[float, float]] = {}
            yield self
            plan = [*self.plan, *[0] * (self.made - len(self.plan))]
            while plan and plan[-1] + 1 == self.options[len(plan) - 1]:
                plan.pop()
            if not plan:
                return
            self.plan = [*plan[:-1], plan[-1] + 1]

    def choose(self, weights: NDArray[np.float64]) -> int:
        """One of the options with positive weight."""
        possible = np.flatnonzero(weights > 0)
        share = weights[possible] / weights.sum()
        if not self.armed:
            return int(possible[self.rng.choice(len(possible), p=share)])
        number = self.plan[self.made] if self.made < len(self.plan) else 0
        self.options.append(len(possible))
        self.made += 1
        self.weight *= share[number]
        return int(possible[number])

    def below(self, position: int, threshold: float) -> bool:
        """Whether the uniform number of a position lies below a threshold; each answer narrows the number down."""
        low, high = self.numbers.get(position, (0.0, 1.0))
        middle = min(max(threshold, low), high)
        first = self.choose(np.array([middle - low, high - middle])) == 0
        self.numbers[position] = (low, middle) if first else (middle, high)
        return first

    def at(self, position: int) -> Numbers:
        """A stream whose every number is that of a position."""
        return Numbers(self, position)

    # what stands in for generators and draws

    def random(self) -> Coin:
        return Coin(self)

    def draw(self, distribution: Probabilities, rng: object) -> int:
        return self.choose(distribution)


@dataclass(frozen=True)
class Coin:
    """A uniform number that has not been drawn yet: comparing it chooses on which side it lies."""

    script: Script
    position: int | None = None  # whose number it is; None: its own

    def __le__(self, threshold: float) -> bool:
        if self.position is not None:
            return self.script.below(self.position, threshold)
        return self.script.choose(np.array([threshold, 1 - threshold])) == 0

    __lt__ = __le__


@dataclass(frozen=True)
class Numbers:
    """Gives the number of one position over and over."""

    script: Script
    position: int

    def random(self) -> Coin:
        return Coin(self.script, self.position)
