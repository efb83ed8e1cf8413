"""How far passes of different shape move logits, and what settling ties costs (docs/sampling.md).

    python benchmarks/ties.py                      # the embedded model; minutes
    python benchmarks/ties.py --bundle bundles/llamagen-b --count 2

The first table: at the tokens that a pass accepted, by how much the difference of the two best codes (guided logits and
noise) is another one when the sequence is computed anew, over what guidance and temperature make of it. The second:
ties, and the seconds of settling them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from lantern_rt import Pipeline
from lantern_rt.compare.turns import subjects_of
from lantern_rt.runtime.likelihood import recompute_logits
from lantern_rt.runtime.scheduler import Scheduler
from lantern_rt.runtime.state import Request

METHODS, EVERY = ("ar", "sjd:window=7"), 4  # one accepted token in so many is computed anew


def moves(pipe: Pipeline, asked: dict[str, Any], method: str) -> list[float]:
    """Nats by which the lead of the best code differs, without what guidance and temperature do."""
    found, accept = [], Scheduler._accept

    def watch(own: Scheduler, request: Request, tree: Any, target: Any) -> Any:
        accepted, sampling = accept(own, request, tree, target), request.sampling
        for node in accepted.path[:: EVERY if len(accepted.path) > EVERY else 1]:
            tokens = np.array([*request.codes, *tree.tokens[tree.path_to(node)[1:]]], np.int64)
            if len(tokens) % EVERY:
                continue
            anew = recompute_logits(own.model, request.rows, tokens, len(tokens), sampling, own.target_clock)[0]
            passed, noise = target._guided(slice(node, node + 1))[0], request.noise.gumbel(len(tokens), 1, len(anew))[0]
            first, second = np.argsort(-(passed / (sampling.temperature or 1) + noise))[:2]
            scale = 2 * sampling.cfg_scale - 1 if sampling.guided else 1.0
            found.append(abs(float((anew[first] - anew[second]) - (passed[first] - passed[second]))) / scale)
        return accepted

    with_method(pipe, asked, method, "_accept", watch)
    return found


def with_method(pipe: Pipeline, asked: dict[str, Any], method: str, name: str, watch: Callable[..., Any]) -> Any:
    """Statistics of a request while a method of the scheduler is watched."""
    before = getattr(Scheduler, name)
    setattr(Scheduler, name, watch)
    try:
        return pipe(**asked, method=method).stats
    finally:
        setattr(Scheduler, name, before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", default="scenes")
    parser.add_argument("--count", type=int, default=10, help="images of each measurement, drawn together")
    given = parser.parse_args()
    pipe = Pipeline.from_bundle(given.bundle)
    subjects = subjects_of(pipe.bundle, None, given.count)
    asked = subjects.request(0, given.count)
    recompute = Scheduler._recompute
    for method in METHODS:
        found = moves(pipe, asked, method)
        print(f"{method:14} moves: {len(found)}, median {np.median(found):.1e}, largest {max(found):.1e} nats")
    for method in METHODS:
        seconds: list[float] = []

        def watch(*given: Any, seconds: list[float] = seconds) -> Any:
            began = time.perf_counter()
            logits = recompute(*given)
            seconds.append(time.perf_counter() - began)
            return logits

        stats = with_method(pipe, asked, method, "_recompute", watch)
        print(f"{method:14} ties: {len(seconds)} in {stats.images} images, {sum(seconds):.3f} of {stats.seconds:.2f} s")


if __name__ == "__main__":
    main()
