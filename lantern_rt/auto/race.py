"""What is fastest, raced on the pictures themselves: all methods of a race draw the same ones.

Nothing is spent on measuring: every pass belongs to a picture. Methods take turns. A turn is a few passes of a picture
that is decoded alone, or a whole batch: images of a batch end at different times under some methods, and that counts.
Larger windows and trees have turns only while they gain on smaller ones; those near the front run in turns, so that no
passing disturbance of the host decides, until each has been seen often enough. The best one draws the rest, and all
later images of the kind. Whose turn it is follows from what was timed alone, so that a race can pause after any turn.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

from pydantic import Field

from ..methods import Config, Method, MethodConfig
from .presets import Ladder

WARM_UP_PASSES = 2  # of a turn that are not timed: windows fill in them
TURN_PASSES = 12  # timed passes of a turn within a picture
ENOUGH_PASSES = 72  # timed passes of each method near the front
ENOUGH_TURNS = 3
HOPELESS = 1.5  # no second turn for what is this much slower than the best
SPREAD = 0.7  # a turn's tokens per second vary by this over the root of its passes (measured on scenes)
MARGIN = 1.05  # the baseline is left for this much only
DISTURBED = 1.5  # times as long as another turn's passes, those of a turn take if the host was busy
MIN_SECONDS = 1e-9  # less than any clock tells

Positive = Annotated[float, Field(gt=0, le=1e9)]


class Turn(Config):
    """Timed passes of one method in a row.

    tokens: that an image got, the mean of those that shared the passes. seconds: what the passes took, disturbances of
    the host left out within a picture.
    """

    tokens: Positive
    seconds: Positive
    passes: Annotated[int, Field(ge=1, le=1_000_000)]


class Record(Config):
    """The turns of one method, as they are stored."""

    method: Method
    turns: tuple[Turn, ...] = ()


class Race:
    """Turns of methods that draw the same pictures.

    Args:
        baseline: what is taken unless another is clearly faster.
        ladders: rivals, each ladder from the smallest pass to the largest.
        records: what an earlier race of these methods found.
        whole: turns are whole batches, which `end_turn` ends, instead of `TURN_PASSES` passes.
    """

    def __init__(
        self,
        baseline: MethodConfig,
        ladders: Sequence[Ladder] = (),
        records: Sequence[Record] = (),
        whole: bool = False,
    ) -> None:
        self.baseline = baseline
        self.ladders = ladders
        self.methods: list[MethodConfig] = [baseline, *(method for ladder in ladders for method in ladder)]
        earlier: dict[MethodConfig, tuple[Turn, ...]] = {record.method: record.turns for record in records}
        self.turns: dict[MethodConfig, list[Turn]] = {one: list(earlier.get(one, ())) for one in self.methods}
        self.whole = whole
        self._begin_turn()

    @property
    def speed_up(self) -> float:
        """Of the method whose turn it is, over the baseline; 1 where they were not both timed."""
        baseline = self._rate(self.baseline)
        return self._rate(self.method) / baseline if baseline and self.turns[self.method] else 1.0

    @property
    def disturbed(self) -> bool:
        """Whether passes of one method took much longer in one turn than in another: the host was busy meanwhile."""
        paces = [[turn.seconds / turn.passes for turn in turns] for turns in self.turns.values() if turns]
        return any(max(pace) > DISTURBED * min(pace) for pace in paces)

    @property
    def records(self) -> tuple[Record, ...]:
        """What was timed, to be stored."""
        return tuple(Record.model_validate({"method": m, "turns": tuple(t)}) for m, t in self.turns.items() if t)

    @property
    def leader(self) -> MethodConfig:
        """The fastest so far."""
        return max(self.methods, key=self._rate)

    def settle(self, method: MethodConfig) -> None:
        """Draw by one of the methods from now on, and time nothing."""
        self.method = next(one for one in self.methods if one == method)
        self.decided = True

    def record_pass(self, tokens: float, seconds: float) -> None:
        """Count a pass of `method`.

        Args:
            tokens: that the pass gave an image, on average.
            seconds: that it took.
        """
        if self.decided:
            return
        if self._warm_up:
            self._warm_up -= 1
            return
        self._tokens += tokens
        self._seconds.append(seconds)
        if len(self._seconds) == TURN_PASSES and not self.whole:
            self.end_turn()

    def end_turn(self) -> None:
        """Count the passes since the turn began, and see whose turn is next."""
        passes = len(self._seconds)
        if self.decided or not passes:
            return
        # Passes of one picture are alike, so that those which the host disturbed are told by their median.
        seconds = sum(self._seconds) if self.whole else passes * statistics.median(self._seconds)
        turn = Turn(tokens=self._tokens, seconds=max(seconds, MIN_SECONDS), passes=passes)
        self.turns[self.method].append(turn)
        self._begin_turn()

    def _begin_turn(self) -> None:
        self._warm_up = 0 if self.whole else WARM_UP_PASSES
        self._tokens = 0.0
        self._seconds: list[float] = []
        self.method, self.decided = self._next()

    def _next(self) -> tuple[MethodConfig, bool]:
        if len(self.methods) == 1:
            return self.baseline, True
        if not self.turns[self.baseline]:
            return self.baseline, False
        for ladder in self.ladders:
            climbed = [method for method in ladder if self.turns[method]]
            gains = all(self._rate(above, 1) >= self._rate(below, -1) for below, above in pairwise(climbed[-2:]))
            if len(climbed) < len(ladder) and gains and not any(map(self._hopeless, climbed[-1:])):
                return ladder[len(climbed)], False
        leader = self.leader
        near = [one for one in self.methods if self.turns[one] and self._rate(one, 1) >= self._rate(leader, -1)]
        unseen = [one for one in near if not self._seen_enough(one)]
        if len(near) > 1 and unseen:
            return min(unseen, key=self._count), False
        clearly = self._rate(leader) > MARGIN * self._rate(self.baseline)
        return (leader if clearly else self.baseline), True

    def _seen_enough(self, method: MethodConfig) -> bool:
        return self._count(method) >= ENOUGH_PASSES and len(self.turns[method]) >= ENOUGH_TURNS

    def _hopeless(self, method: MethodConfig) -> bool:
        return self._rate(method) * HOPELESS < self._rate(self.leader)

    def _count(self, method: MethodConfig) -> int:
        return sum(turn.passes for turn in self.turns[method])

    def _rate(self, method: MethodConfig, errors: int = 0) -> float:
        """Tokens of an image per second, the median of turns, and so many standard errors more; 0 if never timed."""
        turns = self.turns[method]
        if not turns:
            return 0.0
        rate = statistics.median(turn.tokens / turn.seconds for turn in turns)
        return rate * (1 + errors * SPREAD / math.sqrt(self._count(method)))
