"""Requests of many callers through a service, against one after the other.

    python benchmarks/service.py                      # the embedded model; minutes
    python benchmarks/service.py --json service.json

Every caller asks for the next image as soon as it has the last one (method `auto`). Beside that, in the same run: plain
decoding one image at a time, `auto` one image at a time, and `auto` on batches of as many images as there are callers.
Codes only: pictures are decoded beside. Before anything is timed, all draw long enough for their races to be decided.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from lantern_rt import Pipeline
from lantern_rt.runner import Subjects, subjects_of
from lantern_rt.service import Service
from lantern_rt.tuning.callers import measure_callers


def callers(service: Service, subjects: Subjects, count: int, images: int) -> dict[str, float]:
    """Images a second, and seconds per image, of `count` callers who get `images` together."""
    found = measure_callers(service, count, images, subjects, {}, paint=False)
    return {name: found[name] for name in ("images_per_second", "median_seconds", "p95_seconds")}


def batches(pipe: Pipeline, prompts: list[str], size: int, images: int, method: str) -> dict[str, float]:
    """The same of the pipeline alone, `size` images at a time."""
    seconds = []
    for start in range(0, images, size):
        began = time.perf_counter()
        asked = [prompts[i % len(prompts)] for i in range(start, min(images, start + size))]
        for _ in pipe.stream(asked, seed=list(range(start, start + len(asked))), method=method):
            pass
        seconds.append(time.perf_counter() - began)
    return {"images_per_second": images / sum(seconds), "median_seconds": statistics.median(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", default="scenes")
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--images", type=int, default=24, help="per measurement")
    parser.add_argument("--warm-up", type=int, default=24, help="images drawn before each")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    pipe = Pipeline.from_bundle(given.bundle, threads=given.threads)
    subjects = subjects_of(pipe.bundle, None)
    prompts = list(subjects.items)
    rows: dict[str, dict[str, float]] = {}

    def measure(name: str, run: Callable[[int], dict[str, float]]) -> None:
        run(given.warm_up)
        rows[name] = run(given.images)
        print(f"{name:28}" + "".join(f"  {key} {value:.3f}" for key, value in rows[name].items()), flush=True)

    measure("ar, one at a time", lambda images: batches(pipe, prompts, 1, images, "ar"))
    measure("auto, one at a time", lambda images: batches(pipe, prompts, 1, images, "auto"))
    for count in given.callers:
        measure(f"auto, batches of {count}", lambda images, count=count: batches(pipe, prompts, count, images, "auto"))
        with Service(pipe, together=max(given.callers)) as service:
            measure(f"service, callers: {count}", lambda images, count=count: callers(service, subjects, count, images))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
