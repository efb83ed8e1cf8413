"""Capacity of a service: which requests it accepts, so that every caller gets an equal share."""

from __future__ import annotations

import math
import time
from collections import Counter

from .errors import BusyError

_RETRY_SECONDS = 60.0  # seconds over which the retries of rejected requests are spread
_DECAY_IMAGES = 4.0  # number of images after which the weight of a measured time falls to 1 / e
_MIN_IMAGES = 0.5  # number of images to measure before `seconds_per_image` is known
_IDLE_SECONDS = 0.5  # time after its last image during which a caller still counts as active
_DEADLINE_SHARE = 0.85  # estimated time / deadline, at most; the rest is a margin for errors of the estimate


class ServiceCapacity:
    """Capacity of a service for running and queued images.

    The methods are not thread-safe: a `Service` calls them while it holds its lock.

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
        """Add to the caller's running and queued images; a negative number removes images."""
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
        """Update `seconds_per_image` after a forward pass, which usually generates a fraction of an image."""
        decay = math.exp(-num_images / _DECAY_IMAGES)
        self._sums = self._sums[0] * decay + seconds, self._sums[1] * decay + num_images
        if self._sums[1] >= _MIN_IMAGES:
            self.seconds_per_image = self._sums[0] / self._sums[1]

    def estimate_generation_seconds(self, num_images: int) -> float:
        batch = min(num_images, self.max_images)
        # The last batch may be partly empty, but takes as long as a full batch.
        return math.ceil(num_images / batch) * batch * self.seconds_per_image / _DEADLINE_SHARE

    def check_capacity(self, caller: str, num_images: int, deadline: float) -> None:
        """Raise BusyError if a request exceeds the capacity, or would miss its deadline (in seconds).

        The estimate assumes that every other caller wants as many images as this caller. A caller may use an equal
        share of the capacity even if other callers have filled the capacity. An idle service accepts any request.
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
        """Return whether images that begin now, while other images run, would end after `deadline_time`."""
        batch = max(num_images, min(self.max_images, self.num_images))
        return (
            self.num_images > num_images
            and time.perf_counter() + self.estimate_generation_seconds(batch) > deadline_time
        )

    def make_busy_error(self, excess_images: float, num_images: int) -> BusyError:
        """Return the error for a rejected request, which says when to retry.

        Args:
            excess_images: number of images that must finish before the service can accept the request.
        """
        now = time.perf_counter()
        earliest = now + excess_images * self.seconds_per_image
        self._next_return = max(self._next_return, earliest)
        if self._next_return > earliest + _RETRY_SECONDS:
            self._next_return = earliest
        seconds = self._next_return - now
        self._next_return += num_images * self.seconds_per_image
        return BusyError(f"found {self.num_images} images before this one", max(1, math.ceil(seconds)))
