"""Callers at the same time: how many images a second a service gives them, and how long each waits for one.

Every caller asks for the next image as soon as it has the last one.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import Lock
from typing import Any

from ..compare.turns import Subjects
from ..results import StreamStep
from ..service import Service

MOST_CALLERS = 256
FEWEST_IMAGES = 3  # that each caller gets


def measure_callers(
    service: Service,
    count: int,
    images: int,
    subjects: Subjects,
    options: Mapping[str, Any],
    paint: bool,
    show: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Images a second and seconds of an image, of `count` callers who get `images` together, ready for JSON.

    options: of every request. paint: decode pictures, one at a time as a server does. show: takes images done, of how
    many. drawn_by: the method that drew most of them.
    """
    painting = Lock()

    def draw(i: int) -> tuple[float, str]:
        heard, began = SimpleQueue[StreamStep | BaseException](), time.perf_counter()
        service.submit(heard.put, **subjects.request(i, 1), **options, steps=False)
        last = heard.get()
        if isinstance(last, BaseException):
            raise last
        if paint:
            with painting:
                last.image(0)
        return time.perf_counter() - began, str(last.settings.method)

    found, began = list[tuple[float, str]](), time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        for one in pool.map(draw, range(images)):
            found.append(one)
            if show is not None:
                show(len(found), images)
    seconds = sorted(one for one, _ in found)
    return {
        "callers": count,
        "images": images,
        "images_per_second": images / (time.perf_counter() - began),
        "median_seconds": statistics.median(seconds),
        "p95_seconds": seconds[round(0.95 * (images - 1))],
        "drawn_by": Counter(method for _, method in found).most_common(1)[0][0],
    }
