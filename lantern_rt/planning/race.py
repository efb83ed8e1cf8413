"""What is fastest, found while images are drawn: exact methods take turns, as they all give the same codes.

Nothing is spent on measuring: every pass belongs to a picture. Each method has a few passes in a row; larger windows
and trees have theirs only while they gain on smaller ones, and what is far behind gives up its turn. Those near the
front then run in turns, so that no passing disturbance of the host decides, until each has been seen often enough. The
best one draws the rest, and all later images of the kind. Whose turn it is follows from what was timed alone, so a race
can be laid aside after any image.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Annotated

from pydantic import Field

from ..methods import Ar, Eagle, MethodConfig, Sjd
from ..runtime.tree_names import named_tree
from .acceptance_statistics import Record

UNTIMED, TIMED = 2, 8  # passes of a turn; windows fill in the first ones
ENOUGH = 48  # timed passes of each method near the front
HOPELESS = 1.5  # a turn ends after three timed passes if even this much more would not do
SPREAD = 0.5  # tokens of a pass vary by half their mean, and seconds, too
MARGIN = 1.05  # plain decoding is left for this much only

WINDOWS = (3, 7, 15, 31)
TREES = ("chain-3", "dynamic-8-4-2", "dynamic-16-6-4", "dynamic-32-6-6")

Exact = Ar | Eagle | Sjd
LEAST = 1e-9  # seconds: less than any clock tells
Tokens = Annotated[float, Field(gt=0, le=1e6)]
Seconds = Annotated[float, Field(ge=LEAST, le=1e6)]


class Timed(Record):
    """A method's timed passes: tokens that an image got from each, and seconds."""

    method: Annotated[Exact, Field(discriminator="method")]
    tokens: tuple[Tokens, ...] = ()
    seconds: tuple[Seconds, ...] = ()


class Race:
    """Between plain decoding, windows, and trees if there is a drafter; of at most `most_nodes` nodes a pass.

    before: what an earlier race found. known: tokens that a pass gives an image on average, by statistics of whole
    images; here passes of one method may fall on the sky, and of another on the ground below it.
    """

    def __init__(
        self,
        drafter: bool,
        most_nodes: int,
        before: Sequence[Timed] = (),
        known: Mapping[Exact, float] = MappingProxyType({}),
    ) -> None:
        windows: list[Exact] = [Sjd(window=window) for window in WINDOWS if window < most_nodes]
        trees: list[Exact] = [Eagle(tree=tree) for tree in TREES if drafter and named_tree(tree).nodes <= most_nodes]
        self.ladders, self.methods = (windows, trees), [Ar(), *windows, *trees]
        found = {one.method: one for one in before if len(one.tokens) == len(one.seconds)}
        self.timed: dict[Exact, Timed] = {one: found.get(one, Timed(method=one)) for one in self.methods}
        self._known = {Ar(): 1.0, **known}
        self._passes = 0
        self.method, self.decided = self._next()
        self.settled = False  # by what is known, not by what was timed
        self._described: tuple[Exact | None, bool, str] = (None, False, "")

    @property
    def speed_up(self) -> float:
        """Of the method that runs, over plain decoding."""
        plain = self._rate(Ar())
        return self._rate(self.method) / plain if plain else 1.0

    @property
    def tokens(self) -> float:
        """Per pass of the method that runs; 1 where it has no rival and was never timed."""
        return self._tokens(self.method)

    def settle(self, method: MethodConfig) -> None:
        """Draw by one of the methods from now on."""
        self.method, self.decided, self.settled = next(one for one in self.methods if one == method), True, True

    def describe(self) -> str:
        """One line that says what runs and why; asked after every pass."""
        if self._described[:2] != (self.method, self.decided):
            self._described = self.method, self.decided, self._describe()
        return self._described[2]

    def _describe(self) -> str:
        if not self.decided:
            return f"auto: {self.method} at last, still finding out while drawing what is fastest here"
        if not (self.timed[Ar()].tokens and self.timed[self.method].tokens):
            return f"auto: {self.method}, found to be the fastest here before"
        if isinstance(self.method, Ar):
            return "auto: ar, as nothing was faster here while drawing"
        return f"auto: {self.method}, speed-up {self.speed_up:.2f} here while drawing"

    def record(self, tokens: float, seconds: float) -> None:
        """A pass of `method`: tokens that it gave an image on average, and what it took."""
        if self.decided:
            return
        self._passes += 1
        if self._passes > UNTIMED:
            old = self.timed[self.method]
            timed = {"tokens": (*old.tokens, tokens), "seconds": (*old.seconds, max(seconds, LEAST))}
            self.timed[self.method] = old.model_copy(update=timed)
        hopeless = self._passes >= UNTIMED + 3 and self._hopeless(self.method)
        if hopeless or self._passes >= UNTIMED + TIMED:
            self._passes = 0
            self.method, self.decided = self._next()

    def _next(self) -> tuple[Exact, bool]:
        """Whose turn it is; and whether that is for good."""
        timed = {method: one for method, one in self.timed.items() if one.tokens}
        if Ar() not in timed:
            return self.methods[0], len(self.methods) == 1
        for ladder in self.ladders:
            climbed = [method for method in ladder if method in timed]
            gains = all(self._rate(above, 1) >= self._rate(below, -1) for below, above in pairwise(climbed[-2:]))
            if len(climbed) < len(ladder) and gains and not any(map(self._hopeless, climbed[-1:])):
                return ladder[len(climbed)], False
        best = max(timed, key=self._rate)
        near = [method for method in timed if self._rate(method, 1) >= self._rate(best, -1)]
        least = min(near, key=lambda method: len(timed[method].tokens))
        if len(near) > 1 and len(timed[least].tokens) < ENOUGH:
            return least, False
        return (best if self._rate(best) > MARGIN * self._rate(Ar()) else Ar()), True

    def _hopeless(self, method: Exact) -> bool:
        return self._rate(method) * HOPELESS < max(map(self._rate, self.methods))

    def _tokens(self, method: Exact) -> float:
        return self._known.get(method) or statistics.mean(self.timed[method].tokens or (1.0,))

    def _rate(self, method: Exact, errors: int = 0) -> float:
        """Tokens of an image per second, and so many standard errors more; 0 if nothing was timed.

        Of the seconds the lower quartile counts: what else a host does only adds to them.
        """
        if not (seconds := sorted(self.timed[method].seconds)):
            return 0.0
        error = SPREAD * math.sqrt((1 if method in self._known else 2) / len(seconds))
        return self._tokens(method) / seconds[len(seconds) // 4] * (1 + errors * error)
