"""Fair sharing of a service: which requests are accepted, which join next, which group runs next."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

from .errors import BusyError

_RETRY_SECONDS = 60.0  # seconds over which the retries of rejected requests are spread
_DECAY_IMAGES = 4.0  # images after which the weight of a measurement falls to 1 / e
_MIN_IMAGES = 0.5  # images to measure before the speed counts as known
_IDLE_SECONDS = 0.5  # time after its last image during which a caller still counts
_DEADLINE_SHARE = 0.85  # share of a deadline that estimates may use
T = TypeVar("T")


class ServiceCapacity:
    """Capacity of a service for running and queued images. The service calls it with its lock held.

    Args:
        max_images: maximum number of images per forward pass.
        max_queued_images: maximum number of images in the queue.

    Attributes:
        total: maximum number of running and queued images.
        num_images: number of running and queued images.
        images_by_caller: number of running and queued images of each caller that has any.
        seconds_per_image: recent time between finished images in seconds; 0 before it is known.
    """

    def __init__(self, max_images: int, max_queued_images: int) -> None:
        self.max_images = max_images
        self.total = max_images + max_queued_images
        self.num_images = 0
        self.images_by_caller = Counter[str]()
        self._recent_callers: dict[str, float] = {}  # other callers -> time of their last image
        self.seconds_per_image = 0.0
        self._sums = 0.0, 0.0  # seconds and images, exponentially decayed
        self._next_return = 0.0  # time at which the next rejected request should retry

    def add_images(self, caller: str, num_images: int) -> None:
        """Add a caller's images; negative removes."""
        self.num_images += num_images
        self.images_by_caller[caller] += num_images
        if not self.images_by_caller[caller]:
            del self.images_by_caller[caller]
            self._recent_callers[caller] = time.perf_counter()

    def count_active_callers(self) -> int:
        """Return the number of callers that have images, or had some within `_IDLE_SECONDS`."""
        since = time.perf_counter() - _IDLE_SECONDS
        self._recent_callers = {
            caller: last
            for caller, last in self._recent_callers.items()
            if last > since and caller not in self.images_by_caller
        }
        return len(self.images_by_caller) + len(self._recent_callers)

    def record_pass(self, seconds: float, num_images: float) -> None:
        """Record a forward pass for the estimate of `seconds_per_image`.

        Args:
            seconds: time since the previous forward pass.
            num_images: images that the pass generated, usually a fraction.
        """
        decay = math.exp(-num_images / _DECAY_IMAGES)
        self._sums = self._sums[0] * decay + seconds, self._sums[1] * decay + num_images
        if self._sums[1] >= _MIN_IMAGES:
            self.seconds_per_image = self._sums[0] / self._sums[1]

    def estimate_generation_seconds(self, num_images: int) -> float:
        """Return the time to generate images in full batches, in seconds, with a reserve."""
        batch = min(num_images, self.max_images)
        return math.ceil(num_images / batch) * batch * self.seconds_per_image / _DEADLINE_SHARE

    def check_capacity(self, caller: str, num_images: int, deadline: float) -> None:
        """Raise an error if the capacity is exceeded or a deadline would be missed.

        The estimate assumes that every other caller wants as many images as this caller. It may use its share even
        if others have filled the capacity. An idle service accepts any request.

        Args:
            num_images: number of images in its new request.
            deadline: time limit in seconds.

        Raises:
            BusyError: says when to retry.
        """
        callers = len({caller, *self.images_by_caller})
        fair = callers * (self.images_by_caller[caller] + num_images)
        excess_images = self.num_images + num_images - self.total if callers == 1 or fair > self.total else 0
        late = self.estimate_generation_seconds(fair) - deadline
        if self.num_images and (excess_images > 0 or late > 0):
            raise self.make_busy_error(max(excess_images, late / self.seconds_per_image if late > 0 else 0), num_images)

    def would_miss_deadline(self, num_images: int, deadline_time: float) -> bool:
        """Return whether images that begin now, beside others, would end after time `deadline_time`."""
        batch = max(num_images, min(self.max_images, self.num_images))
        return (
            self.num_images > num_images
            and time.perf_counter() + self.estimate_generation_seconds(batch) > deadline_time
        )

    def make_busy_error(self, excess_images: float, num_images: int) -> BusyError:
        """Return the error for a rejected request, which says when to retry.

        Every rejected request gets a later time than the one before, up to a minute; then the times start again, as
        not all requests come back.

        Args:
            excess_images: number of images to finish before the request fits.
            num_images: number of images in the request.
        """
        now = time.perf_counter()
        earliest = now + excess_images * self.seconds_per_image
        self._next_return = max(self._next_return, earliest)
        if self._next_return > earliest + _RETRY_SECONDS:
            self._next_return = earliest
        seconds = self._next_return - now
        self._next_return += num_images * self.seconds_per_image
        return BusyError(f"found {self.num_images} images before this one", max(1, math.ceil(seconds)))


def order_fairly(
    queued_items: Sequence[tuple[str, T]], running_images: Counter[str], max_caller_images: int
) -> list[T]:
    """Return queued items in a fair order: callers with the fewest running images first.

    Args:
        queued_items: caller and item of each queued image, oldest first.
        running_images: number of running images of each caller.
        max_caller_images: maximum number of images of a caller; further items are omitted.
    """
    counts = running_images.copy()
    order: list[tuple[int, int]] = []
    for number, (caller, _) in enumerate(queued_items):
        if counts[caller] < max_caller_images:
            order.append((counts[caller], number))
        counts[caller] += 1
    return [queued_items[number][1] for _, number in sorted(order)]


class FairScheduler:
    """Choice of the group that runs the next forward pass, so that every caller gets equal time."""

    def __init__(self) -> None:
        self._spent: dict[int, float] = {}  # group -> seconds per caller since the group became active

    def choose_next_group(self, callers_by_group: Mapping[int, set[str]]) -> int:
        """Return the active group with the least time per caller. callers_by_group: callers of each active group."""
        minimum = min((self._spent[group] for group in callers_by_group if group in self._spent), default=0.0)
        self._spent = {group: self._spent.get(group, minimum) for group in callers_by_group}
        return min(callers_by_group, key=self._spent.__getitem__)

    def record_group_time(self, group: int, seconds: float, callers_by_group: Mapping[int, set[str]]) -> None:
        """Record the time of a forward pass; a caller in n groups counts 1 / n in each.

        Args:
            seconds: time of the pass.
            callers_by_group: callers of each active group.
        """
        num_callers = sum(
            1 / sum(caller in callers for callers in callers_by_group.values()) for caller in callers_by_group[group]
        )
        self._spent[group] += seconds / num_callers
