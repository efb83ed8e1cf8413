"""Decoding of a batch: requests that start together, step by step.

`decode` yields after every step, so progress, streaming and cancelling cost nothing.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from ..methods import MethodConfig, Sampling
from .scheduler import RequestStep, Scheduler
from .state import Model, Prompt, Request
from .statistics import RequestStatistics, Statistics, summarise


class Step(NamedTuple):
    """One step of the batch; finished requests have no part in it. `statistics` comes with the last step."""

    parts: list[RequestStep]
    done: int
    total: int
    statistics: Statistics | None = None


def decode(
    model: Model,
    prompts: Iterable[Prompt],
    seeds: Sequence[int],
    sampling: Sampling,
    method: MethodConfig,
    others: Sequence[MethodConfig] = (),
    together: int = 1 << 16,
) -> Generator[Step, MethodConfig | None, None]:
    """Decode one image's tokens for every prompt; yields a `Step` after every prefill and every pass.

    `send` the generator one of `others`, or the method again, to go on with it: exact methods give the same tokens.

    prompts: taken when there is room for another. seeds: one per prompt, 0 .. 2^64 - 1. A seed gives the same tokens
    under every exact method, and under any method whatever else is in the batch. together: most images that share
    passes; as one is done, the next begins.
    """
    scheduler, methods, records = Scheduler(model), (method, *others), list[RequestStatistics]()
    waiting, done = iter(enumerate(zip(prompts, seeds, strict=True))), 0
    statistics = None
    while statistics is None:
        for i, (prompt, seed) in islice(waiting, together - len(scheduler.active)):
            request = Request(i, model.raster, prompt.rows(sampling), sampling, methods, seed)
            request.use(method)
            scheduler.submit(request)
            records.append(request.statistics)
        parts = scheduler.step()
        done += sum(part.committed if part.placed is None else len(part.placed.codes) for part in parts)
        if not scheduler.busy and len(records) == len(seeds):
            clocks = scheduler.target_clock, scheduler.drafter_clock
            statistics = summarise(method.method, model.codes, *clocks, records)
        following = yield Step(parts, done, model.codes * len(seeds), statistics)
        if following is not None and following is not method:
            method = following
            for request in scheduler.active:
                request.use(method)
