"""Program that generates images, opens pipelines or serves requests, and prints the resources of its process.

Usage: `python growth.py images|pipelines|service BUNDLE COUNT`. Each output line is a JSON object of `Resources`.
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
SAMPLES = 20  # lines that the program prints


@dataclass(frozen=True)
class Resources:
    count: int
    kilobytes: int
    descriptors: int
    threads: int
    objects: int

    @classmethod
    def measure(cls, count: int) -> Resources:
        gc.collect()
        process = psutil.Process()
        kilobytes = re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
        return cls(count, sum(map(int, kilobytes)), process.num_fds(), process.num_threads(), len(gc.get_objects()))


def generate_images(bundle: str) -> Iterator[int]:
    """Generate batches of all sizes with all methods; yield the number of images so far."""
    pipe = Pipeline.from_bundle(bundle, threads=2)
    count = 0
    batch = 0
    while True:
        size = BATCHES[batch % len(BATCHES)]
        pipe("red sphere", num_images=size, seed=batch, method=METHODS[batch % len(METHODS)])
        batch = batch + 1
        count = count + size
        yield count


def open_pipelines(bundle: str) -> Iterator[int]:
    """Repeatedly open a pipeline, generate two images and delete the pipeline; yield the number of pipelines."""
    count = 0
    while True:
        pipe = Pipeline.from_bundle(bundle, threads=2)
        for method in ("lantern", "sjd"):
            pipe("red sphere", method=method)
        del pipe
        count += 1
        yield count


def serve_requests(bundle: str) -> Iterator[int]:
    """Serve eight requests at a time and cancel a quarter; every other image is compared with the pipeline's."""
    pipe = Pipeline.from_bundle(bundle, threads=2)
    rng = random.Random(0)
    count = 0
    number = 0
    request_keys = [(method, seed) for method in METHODS for seed in range(3)]
    expected_codes = {key: pipe("red sphere", num_images=2, seed=key[1], method=key[0]).codes for key in request_keys}
    updates: queue.Queue[tuple[int, Any]] = queue.Queue()
    requests: dict[int, tuple[Any, tuple[str, int], int]] = {}  # handle, method and seed, steps before the cancellation
    with Service(pipe, max_images_per_pass=6, max_queued_images=60) as running_service:
        while True:
            while len(requests) < 8:
                key = rng.choice(request_keys)
                number = number + 1
                steps_before_cancel = rng.randrange(12) if rng.random() < 0.25 else 1 << 30
                listener = partial(lambda request_number, step: updates.put((request_number, step)), number)
                options = {"num_images": 2, "seed": key[1], "method": key[0]}
                requests[number] = running_service.submit(listener, "red sphere", **options), key, steps_before_cancel
            request_number, step = updates.get(timeout=60)
            if request_number not in requests:
                continue  # the request was cancelled
            assert not isinstance(step, BaseException), step
            handle, key, steps_before_cancel = requests.pop(request_number)
            if step.stats is not None:
                assert all(np.array_equal(*pair) for pair in zip(step.codes, expected_codes[key], strict=True)), key
            elif steps_before_cancel == 0:
                handle.cancel()
            else:
                requests[request_number] = handle, key, steps_before_cancel - 1
                continue
            count += 2
            yield count


def main(work: str, bundle: str, last: int) -> None:
    next_sample_count = 0
    for count in {"images": generate_images, "pipelines": open_pipelines, "service": serve_requests}[work](bundle):
        if count >= next_sample_count:
            print(json.dumps(asdict(Resources.measure(count))), flush=True)
            next_sample_count += last // SAMPLES
        if count >= last:
            return


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
