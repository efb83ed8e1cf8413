"""Decoding of a batch: requests that start together, step by step.

`decode` yields after every step, so progress, streaming and cancelling cost nothing.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from ..methods import MethodConfig, Sampling
from .drafts import Model, Prompt, Request
from .scheduler import RequestStep, Scheduler
from .statistics import Statistics, summarise


@dataclass(frozen=True)
class Step:
    """One step of the batch; finished requests have no part in it. `statistics` comes with the last step."""

    parts: list[RequestStep]
    done: int
    total: int
    statistics: Statistics | None = None


def decode(
    model: Model,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    sampling: Sampling,
    method: MethodConfig,
    others: Sequence[MethodConfig] = (),
) -> Generator[Step, MethodConfig | None, None]:
    """Decode one image's tokens for every prompt; yields a `Step` after the prefill and after every pass.

    `send` the generator one of `others`, or the method again, to go on with it: exact methods give the same tokens.

    seeds: one per prompt, 0 .. 2^64 - 1. A seed gives the same tokens under every exact method, and under any method
    whatever else is in the batch.
    """
    scheduler, methods = Scheduler(model), (method, *others)
    requests = [
        Request(i, model.codes, prompt.rows(sampling), sampling, methods, seed)
        for i, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
    ]
    for request in requests:
        scheduler.submit(request)
    statistics = None
    while statistics is None:
        parts = scheduler.step()
        done = sum(request.length - request.missing for request in requests)
        if not scheduler.busy:
            clocks, records = (scheduler.target_clock, scheduler.drafter_clock), [one.statistics for one in requests]
            statistics = summarise(requests[0].method.method, model.codes, *clocks, records)
        following = yield Step(parts, done, model.codes * len(requests), statistics)
        if following is not None:
            for request in requests:
                request.use(following)
