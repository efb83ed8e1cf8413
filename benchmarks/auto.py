"""Whether `auto` pays in every situation: threads 1 and 2, images 1, 4 and 8 together, sampling and greedy.

    python benchmarks/auto.py                    # `scenes`, seven turns; a quarter of an hour
    python benchmarks/auto.py --bundle bundles/llamagen-b --turns 3

In each situation races run to their end in a cache of their own. Then `ar` and every quality of the bundle draw the
same prompts in turns, each turn beginning with another one. Printed are the median speed-up over `ar`, the lowest turn,
what `auto` chose, and after how many requests.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from itertools import product
from typing import Any

from lantern_rt import Pipeline
from lantern_rt.compare.turns import read_bundle_prompts

RACE_CALLS = 150


def situation(pipeline: Pipeline, images: int, options: dict[str, Any], turns: int) -> None:
    """Print what every quality gives in one situation."""
    prompts = read_bundle_prompts(pipeline.bundle)

    def seconds(call: int, method: str) -> tuple[float, Any]:
        began = time.perf_counter()
        result = pipeline(**prompts.request(call, images), method=method, **options)
        return time.perf_counter() - began, result

    qualities = ["strict", *pipeline.bundle.manifest.presets]
    requests = dict.fromkeys(qualities, 0)
    for quality in qualities:
        choice = "for now"
        while "for now" in choice and requests[quality] < RACE_CALLS:
            choice = seconds(1000 + requests[quality], f"auto:quality={quality}")[1].settings.choice
            requests[quality] += 1
    methods = ["ar", *(f"auto:quality={quality}" for quality in qualities)]
    ratios: dict[str, list[float]] = {quality: [] for quality in qualities}
    for turn in range(turns):
        first = turn % len(methods)
        timed = {method: seconds(turn, method) for method in (*methods[first:], *methods[:first])}
        for quality, method in zip(qualities, methods[1:], strict=True):
            ratios[quality].append(timed["ar"][0] / timed[method][0])
    for quality, method in zip(qualities, methods[1:], strict=True):
        own, chosen = ratios[quality], timed[method][1].settings.method
        figures = f"{statistics.median(own):.2f} (lowest {min(own):.2f})"
        print(f"  {quality}: {figures}, {chosen} after {requests[quality]} requests", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", default="scenes")
    parser.add_argument("--turns", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["LANTERN_RT_CACHE"] = cache
        for threads in (1, 2):
            with Pipeline.from_bundle(arguments.bundle, threads=threads) as pipeline:
                for images, options in product((1, 4, 8), ({}, {"temperature": 0})):
                    print(f"{threads} threads, {images} images, {'greedy' if options else 'sampling'}", flush=True)
                    situation(pipeline, images, options, arguments.turns)


if __name__ == "__main__":
    main()
