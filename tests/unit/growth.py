"""A process that draws images, or makes and drops pipelines, and prints what it holds as it goes along.

`python growth.py images BUNDLE COUNT`, `python growth.py pipelines BUNDLE COUNT`: JSON lines of `Held`.
"""

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from lantern_rt import Pipeline

METHODS = ("ar", "sjd", "eagle", "lantern", "lantern++", "auto", "sjd:window=3", "eagle:tree=mc-25", "sjd:lambda=2")
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
    pipe, count, batch = Pipeline.from_bundle(bundle, threads=2), 0, 0
    while True:
        size = BATCHES[batch % len(BATCHES)]
        pipe("red sphere", num_images=size, seed=batch, method=METHODS[batch % len(METHODS)])
        batch, count = batch + 1, count + size
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


def main(what: str, bundle: str, last: int) -> None:
    """A line about every twentieth of the way."""
    following = 0
    for count in {"images": images, "pipelines": pipelines}[what](bundle):
        if count >= following:
            print(json.dumps(asdict(Held.now(count))), flush=True)
            following += last // SAMPLES
        if count >= last:
            return


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
