"""A process that draws images, serves requests, or makes and drops pipelines, and prints what it holds meanwhile.

`python growth.py images BUNDLE COUNT`, or `pipelines`, or `service`: JSON lines of `Held`.
"""

from __future__ import annotations

import gc
import json
import queue
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from lantern_rt import Pipeline
from lantern_rt.service import Service

METHODS = ("ar", "sjd", "eagle", "lantern", "lantern++", None, "sjd:window=3", "eagle:tree=mc-25", "sjd:lambda=2")
BATCHES = (1, 4, 2, 8, 3)
SAMPLES = 20


@dataclass(frozen=True)
class Held:
    """After `count` images or pipelines: kilobytes of memory, open files, threads, and objects of Python.

    kilobytes: without files that are mapped, which the system takes back when it likes, and with what it swapped out.
    """

    count: int
    kilobytes: int
    descriptors: int
    threads: int
    objects: int

    @classmethod
    def now(cls, count: int) -> Held:
        gc.collect()
        process = psutil.Process()
        kilobytes = re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
        return cls(count, sum(map(int, kilobytes)), process.num_fds(), process.num_threads(), len(gc.get_objects()))


def images(bundle: str) -> Iterator[int]:
    """Batches of every size with every method; how many images so far."""
    pipe = Pipeline.from_bundle(bundle, threads=2)
    count = 0
    batch = 0
    while True:
        size = BATCHES[batch % len(BATCHES)]
        pipe("red sphere", num_images=size, seed=batch, method=METHODS[batch % len(METHODS)])
        batch = batch + 1
        count = count + size
        yield count


def pipelines(bundle: str) -> Iterator[int]:
    """Pipelines that draw with and without a drafter, and are dropped; how many so far."""
    count = 0
    while True:
        pipe = Pipeline.from_bundle(bundle, threads=2)
        for method in ("lantern", "sjd"):
            pipe("red sphere", method=method)
        del pipe
        count += 1
        yield count


def service(bundle: str) -> Iterator[int]:
    """Requests of a service, eight at a time, by every method; one in four leaves early. How many images so far.

    Every image is compared with the one that its request gives alone.
    """
    pipe = Pipeline.from_bundle(bundle, threads=2)
    rng = random.Random(0)
    count = 0
    number = 0
    asked = [(method, seed) for method in METHODS for seed in range(3)]
    alone = {key: pipe("red sphere", num_images=2, seed=key[1], method=key[0]).codes for key in asked}
    news: queue.Queue[tuple[int, Any]] = queue.Queue()
    tickets: dict[int, tuple[Any, tuple[str, int], int]] = {}  # what was asked, and after which step it leaves
    with Service(pipe, together=6, waiting=60) as drawn:
        while True:
            while len(tickets) < 8:
                key = rng.choice(asked)
                number = number + 1
                leaves = rng.randrange(12) if rng.random() < 0.25 else 1 << 30
                hear = partial(lambda own, step: news.put((own, step)), number)
                request = {"num_images": 2, "seed": key[1], "method": key[0]}
                tickets[number] = drawn.submit(hear, "red sphere", **request), key, leaves
            own, step = news.get(timeout=60)
            if own not in tickets:
                continue  # it has left
            assert not isinstance(step, BaseException), step
            ticket, key, leaves = tickets.pop(own)
            if step.stats is not None:
                assert all(np.array_equal(one, other) for one, other in zip(step.codes, alone[key], strict=True)), key
            elif leaves == 0:
                ticket.cancel()
            else:
                tickets[own] = ticket, key, leaves - 1
                continue
            count += 2
            yield count


def main(what: str, bundle: str, last: int) -> None:
    """A line about every twentieth of the way."""
    following = 0
    for count in {"images": images, "pipelines": pipelines, "service": service}[what](bundle):
        if count >= following:
            print(json.dumps(asdict(Held.now(count))), flush=True)
            following += last // SAMPLES
        if count >= last:
            return


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
