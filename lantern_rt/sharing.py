"""How the callers of a service share it: who is taken, who is next, whose pass is next."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

from .errors import BusyError

_RETURNING = 60.0  # seconds over which refused requests are spread
_MEMORY = 4.0  # images after which what was measured counts for a third
_ENOUGH = 0.5  # of an image, before what was measured counts
_LINGER = 0.5  # seconds in which a caller who had an image is expected to ask for the next one
_IN_TIME = 0.85  # of a deadline that may be planned with
T = TypeVar("T")


class Room:
    """Room for images that share passes, and that wait for them. A service calls it with its lock held."""

    def __init__(self, max_images: int, waiting: int) -> None:
        self.max_images = max_images
        self.total = max_images + waiting
        self.images = 0  # that were taken and have not ended
        self.held = Counter[str]()  # the same of each caller who has any
        self._left: dict[str, float] = {}  # when others had their last image
        self.seconds = 0.0  # between one image and the next, lately; 0 before that is known
        self._sums = 0.0, 0.0  # seconds and images, of which the latest count most
        self._next_return = 0.0  # when the next request that is refused is to come again

    def count(self, caller: str, images: int) -> None:
        """Take images of a caller, or fewer than none of those that were taken."""
        self.images += images
        self.held[caller] += images
        if not self.held[caller]:
            del self.held[caller]
            self._left[caller] = time.perf_counter()

    def callers(self) -> int:
        """Callers who have something to do, or had just now."""
        since = time.perf_counter() - _LINGER
        self._left = {one: left for one, left in self._left.items() if left > since and one not in self.held}
        return len(self.held) + len(self._left)

    def measure(self, seconds: float, images: float) -> None:
        """Count a pass: seconds since the one before it, and the images that it drew, mostly a small part of one."""
        fade = math.exp(-images / _MEMORY)
        self._sums = self._sums[0] * fade + seconds, self._sums[1] * fade + images
        if self._sums[1] >= _ENOUGH:
            self.seconds = self._sums[0] / self._sums[1]

    def needed(self, images: int) -> float:
        """Seconds until so many images are done, of which as many share passes as can; the last may begin anew."""
        batch = min(images, self.max_images)
        return math.ceil(images / batch) * batch * self.seconds / _IN_TIME

    def check(self, caller: str, images: int, deadline: float) -> None:
        """Refuse images for which there is no room, or that cannot be done in so many seconds.

        Others are taken to want as many as the caller, who may have its share of the room even if they left none. Where
        nothing is to do, anything may be tried.

        Raises:
            BusyError: says when to come again.
        """
        callers = len({caller, *self.held})
        fair = callers * (self.held[caller] + images)
        excess = self.images + images - self.total if callers == 1 or fair > self.total else 0
        late = self.needed(fair) - deadline
        if self.images and (excess > 0 or late > 0):
            raise self.busy(max(excess, late / self.seconds if late > 0 else 0), images)

    def is_late(self, images: int, end: float) -> bool:
        """Whether images that begin now, beside others, are not done by then."""
        batch = max(images, min(self.max_images, self.images))
        return self.images > images and time.perf_counter() + self.needed(batch) > end

    def busy(self, excess: float, images: int) -> BusyError:
        """What a refused request is told: when it may find room, each after the one refused before it.

        Beyond a minute they begin anew, as not all come back. excess: images that have to be done until then.
        """
        now = time.perf_counter()
        room = now + excess * self.seconds
        self._next_return = max(self._next_return, room)
        if self._next_return > room + _RETURNING:
            self._next_return = room
        seconds = self._next_return - now
        self._next_return += images * self.seconds
        return BusyError(f"found {self.images} images before this one", max(1, math.ceil(seconds)))


def fair_order(waiting: Sequence[tuple[str, T]], held: Counter[str], share: int) -> list[T]:
    """Those who wait, in the order in which they get places: callers who hold the fewest first, none more than a share.

    waiting: callers and what they want drawn, in the order in which they came.
    """
    places = held.copy()
    order: list[tuple[int, int]] = []
    for number, (caller, _) in enumerate(waiting):
        if places[caller] < share:
            order.append((places[caller], number))
        places[caller] += 1
    return [waiting[number][1] for _, number in sorted(order)]


class Turns:
    """Whose pass is next: groups of callers whose images share passes have time by how many they are."""

    def __init__(self) -> None:
        self._spent: dict[int, float] = {}  # seconds for each caller of a group, since it had something to do

    def next(self, groups: Mapping[int, set[str]]) -> int:
        """The group that had least time. groups: callers of those that have something to do."""
        least = min((self._spent[group] for group in groups if group in self._spent), default=0.0)
        self._spent = {group: self._spent.get(group, least) for group in groups}
        return min(groups, key=self._spent.__getitem__)

    def spend(self, group: int, seconds: float, groups: Mapping[int, set[str]]) -> None:
        """Count a pass of a group; a caller in several groups is a part of one in each."""
        self._spent[group] += seconds / sum(1 / sum(one in them for them in groups.values()) for one in groups[group])
