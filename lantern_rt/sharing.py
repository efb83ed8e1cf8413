"""Fair sharing of a service: choice of the accepted requests, of the next images, and of the next batch."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

from .errors import BusyError

_RETRY_SECONDS = 60.0  # seconds over which the retries of rejected requests are spread
_DECAY_IMAGES = 4.0  # number of images after which the weight of a measured time falls to 1 / e
_MIN_IMAGES = 0.5  # number of images to measure before `seconds_per_image` is known
_IDLE_SECONDS = 0.5  # time after its last image during which a caller still counts as active
_DEADLINE_SHARE = 0.85  # estimated time / deadline, at most; the rest is a margin for errors of the estimate
T = TypeVar("T")


class ServiceCapacity:
    """Capacity of a service for running and queued images.

    The methods are not thread-safe: a `Service` calls them while it holds its lock.

    Args:
        max_images: maximum number of images per forward pass.
        max_queued_images: maximum number of images in the queue.

    Attributes:
        total: maximum number of running and queued images.
        num_images: number of running and queued images.
        images_by_caller: number of running and queued images of each caller that has images.
        seconds_per_image: recent time between finished images in seconds; 0 before this time is known.
    """

    def __init__(self, max_images: int, max_queued_images: int) -> None:
        self.max_images = max_images
        self.total = max_images + max_queued_images
        self.num_images = 0
        self.images_by_caller = Counter[str]()
        self._recent_callers: dict[str, float] = {}  # callers without images -> time of their last image
        self.seconds_per_image = 0.0
        self._sums = 0.0, 0.0  # seconds and number of images, both exponentially decayed
        self._next_return = 0.0  # time at which the next rejected request should retry

    def add_images(self, caller: str, num_images: int) -> None:
        """Add `num_images` to the caller's running and queued images; a negative number removes images."""
        self.num_images += num_images
        self.images_by_caller[caller] += num_images
        if not self.images_by_caller[caller]:
            del self.images_by_caller[caller]
            self._recent_callers[caller] = time.perf_counter()

    def count_active_callers(self) -> int:
        """Return the number of callers that have images now or had images within the last `_IDLE_SECONDS`."""
        since = time.perf_counter() - _IDLE_SECONDS
        self._recent_callers = {
            caller: last
            for caller, last in self._recent_callers.items()
            if last > since and caller not in self.images_by_caller
        }
        return len(self.images_by_caller) + len(self._recent_callers)

    def record_pass(self, seconds: float, num_images: float) -> None:
        """Update the estimate `seconds_per_image` after a forward pass.

        Args:
            seconds: time since the previous forward pass.
            num_images: number of images that the pass generated, usually a fraction of an image.
        """
        decay = math.exp(-num_images / _DECAY_IMAGES)
        self._sums = self._sums[0] * decay + seconds, self._sums[1] * decay + num_images
        if self._sums[1] >= _MIN_IMAGES:
            self.seconds_per_image = self._sums[0] / self._sums[1]

    def estimate_generation_seconds(self, num_images: int) -> float:
        """Estimate the time to generate `num_images` images, in seconds, with a margin for errors of the estimate."""
        batch = min(num_images, self.max_images)
        # The last batch may be partly empty, but takes as long as a full batch.
        return math.ceil(num_images / batch) * batch * self.seconds_per_image / _DEADLINE_SHARE

    def check_capacity(self, caller: str, num_images: int, deadline: float) -> None:
        """Raise an error if a request exceeds the capacity or would miss its deadline.

        The estimate assumes that every other caller wants as many images as this caller. A caller may use an equal
        share of the capacity even if other callers have filled the capacity. An idle service accepts any request.

        Args:
            caller: name of the caller.
            num_images: number of images in the caller's new request.
            deadline: time limit of the request in seconds.

        Raises:
            BusyError: the request is rejected; the error says when to retry.
        """
        callers = len({caller, *self.images_by_caller})
        # number of images in the service if every caller had as many images as this caller would have
        fair = callers * (self.images_by_caller[caller] + num_images)
        excess_images = self.num_images + num_images - self.total if callers == 1 or fair > self.total else 0
        late_seconds = self.estimate_generation_seconds(fair) - deadline
        if self.num_images and (excess_images > 0 or late_seconds > 0):
            late_images = late_seconds / self.seconds_per_image if late_seconds > 0 else 0
            raise self.make_busy_error(max(excess_images, late_images), num_images)

    def would_miss_deadline(self, num_images: int, deadline_time: float) -> bool:
        """Return whether images that begin now, while other images run, would end after their deadline.

        Args:
            num_images: number of images that would begin.
            deadline_time: value of `time.perf_counter` at the deadline.
        """
        batch = max(num_images, min(self.max_images, self.num_images))
        return (
            self.num_images > num_images
            and time.perf_counter() + self.estimate_generation_seconds(batch) > deadline_time
        )

    def make_busy_error(self, excess_images: float, num_images: int) -> BusyError:
        """Return the error for a rejected request. The error says when to retry.

        Each rejected request gets a later time than the previous rejected request, so that not all clients retry at
        once. A time that is more than a minute after the earliest time is replaced by the earliest time, because some
        clients never retry.

        Args:
            excess_images: number of images that must finish before the service can accept the request.
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
    """Sort queued items in a fair order: items of the callers with the fewest images come first.

    Each queued item also counts as an image for later items of its caller, so callers alternate.

    Args:
        queued_items: pairs of caller and item (image), the oldest first.
        running_images: number of running images of each caller.
        max_caller_images: maximum number of running and queued images of a caller; further items are omitted.

    Returns:
        The items, without their callers.
    """
    counts = running_images.copy()
    order: list[tuple[int, int]] = []
    for number, (caller, _) in enumerate(queued_items):
        if counts[caller] < max_caller_images:
            order.append((counts[caller], number))
        counts[caller] += 1
    return [queued_items[number][1] for _, number in sorted(order)]


class FairScheduler:
    """Choice of the batch that runs the next forward pass, so that every caller gets equal time.

    A batch is active while it has running or joining images.
    """

    def __init__(self) -> None:
        self._spent: dict[int, float] = {}  # index of a batch -> seconds per caller since the batch became active

    def choose_next_batch(self, callers_by_batch: Mapping[int, set[str]]) -> int:
        """Choose the batch that runs next: the active batch that has used the least time per caller.

        Args:
            callers_by_batch: callers of each active batch.

        Returns:
            Index of the batch.
        """
        # A new batch starts at the minimum: from 0 it would run alone until it had caught up with older batches.
        minimum = min((self._spent[batch] for batch in callers_by_batch if batch in self._spent), default=0.0)
        self._spent = {batch: self._spent.get(batch, minimum) for batch in callers_by_batch}
        return min(callers_by_batch, key=self._spent.__getitem__)

    def record_batch_time(self, batch_index: int, seconds: float, callers_by_batch: Mapping[int, set[str]]) -> None:
        """Record the time of a forward pass. A caller with images in n batches counts as 1 / n caller in each batch.

        Args:
            batch_index: index of the batch that ran the pass.
            seconds: time of the pass.
            callers_by_batch: callers of each active batch.
        """
        num_callers = sum(
            1 / sum(caller in callers for callers in callers_by_batch.values())
            for caller in callers_by_batch[batch_index]
        )
        self._spent[batch_index] += seconds / num_callers
