"""What is fastest, found while an image is drawn: exact methods take turns, as they all give the same codes.

Nothing is spent on measuring: every pass belongs to the picture. Each method has a few passes in a row; larger windows
and trees have theirs only while they gain on smaller ones, and what is far behind gives up its turn. Those near the
front run a second time, later, so that no passing disturbance of the host decides. The best one draws the rest, and
every later image of the kind.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..methods import Ar, Eagle, Sjd
from ..runtime.tree_names import named_tree

Exact = Ar | Eagle | Sjd

UNTIMED, TIMED = 2, 6  # passes of a turn; windows fill in the first ones
HOPELESS = 1.5  # a turn ends after two timed passes if even this much more would not do
NEAR = 0.8  # of the best rate: runs again
MARGIN = 1.05  # plain decoding is left for this much only

WINDOWS = (3, 7, 15, 31)
TREES = ("chain-3", "dynamic-8-4-2", "dynamic-16-6-4", "dynamic-32-6-6")


@dataclass
class Runner:
    """A method, and its timed passes: tokens that an image got, and seconds."""

    method: Exact
    tokens: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens of an image per second; 0 if nothing was timed."""
        return statistics.mean(self.tokens) / statistics.median(self.seconds) if self.tokens else 0.0


class Race:
    """Between plain decoding, windows, and trees if there is a drafter; of at most `most_nodes` nodes a pass."""

    def __init__(self, drafter: bool, most_nodes: int) -> None:
        windows: list[Exact] = [Sjd(window=window) for window in WINDOWS if window < most_nodes]
        trees: list[Exact] = [Eagle(tree=tree) for tree in TREES if drafter and named_tree(tree).nodes <= most_nodes]
        self.plain, self.ladders = Runner(Ar()), [[Runner(one) for one in ladder] for ladder in (windows, trees)]
        self._turns, self._passes = self._order(), 0
        self.running = next(self._turns)
        self.decided = False

    @property
    def methods(self) -> list[Exact]:
        """All that may run, plain decoding first."""
        return [one.method for one in self._runners()]

    @property
    def method(self) -> Exact:
        """What the next pass should be made with."""
        return self.running.method

    @property
    def speed_up(self) -> float:
        """Of the method that runs, over plain decoding."""
        return self.running.rate / self.plain.rate if self.plain.rate else 1.0

    @property
    def tokens(self) -> float:
        """Tokens per forward pass of the method that runs."""
        return statistics.mean(self.running.tokens) if self.running.tokens else 1.0

    def describe(self) -> str:
        """One line that says what runs and why."""
        if not self.decided:
            return f"auto: {self.method} at last, still finding out while drawing what is fastest here"
        if self.running is self.plain:
            return "auto: ar, as nothing was faster here while drawing"
        return f"auto: {self.method}, speed-up {self.speed_up:.2f} here while drawing"

    def begin(self) -> None:
        """A new image: its first passes with a method count as untimed again."""
        self._passes = 0

    def record(self, tokens: float, seconds: float) -> None:
        """A pass of the running method: tokens that it gave an image on average, and what it took."""
        if self.decided:
            return
        self._passes += 1
        if self._passes > UNTIMED:
            self.running.tokens.append(tokens)
            self.running.seconds.append(seconds)
        hopeless = self._passes >= UNTIMED + 2 and self.running.rate * HOPELESS < self._best().rate
        if hopeless or self._passes >= UNTIMED + TIMED:
            self.running, self._passes = next(self._turns), 0

    def _order(self) -> Iterator[Runner]:
        """Who runs, turn by turn; at last the winner."""
        yield self.plain
        for ladder in self.ladders:
            before = 0.0
            for runner in ladder:
                yield runner
                if runner.rate <= before:
                    break
                before = runner.rate
        near = [one for one in self._runners() if one.rate >= NEAR * self._best().rate]
        yield from near if len(near) > 1 else ()
        best = self._best()
        self.decided = True
        yield best if best.rate > MARGIN * self.plain.rate else self.plain

    def _best(self) -> Runner:
        return max(self._runners(), key=lambda one: one.rate)

    def _runners(self) -> list[Runner]:
        return [self.plain, *(one for ladder in self.ladders for one in ladder)]
