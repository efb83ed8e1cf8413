"""Decoding of a batch: requests that start together, step by step.

`decode` yields after every step, so progress, streaming and cancelling cost nothing.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from ..methods import MethodConfig, Sampling
from .drafting import Drafter
from .scheduler import RequestStep, Scheduler
from .state import Model, Prompt, Request
from .statistics import RequestStatistics, Statistics, summarise


@dataclass(frozen=True)
class Step:
    """One step of the batch; finished requests have no part in it."""

    parts: list[RequestStep]  # of the requests that took part
    done: int  # codes that are drawn, of all images
    total: int  # codes of all images
    stats: Statistics | None  # of the whole decode, with the last step


def decode(
    model: Model,
    prompts: Iterable[Prompt],
    seeds: Sequence[int],
    sampling: Sampling,
    method: MethodConfig,
    together: int = 1 << 16,
    listener: Drafter | None = None,
    adaptive: bool = False,
) -> Generator[Step, None, None]:
    """Decode one image's tokens for every prompt. Under any method they are the same whatever else is in the batch.

    Args:
        model: engines and sizes.
        prompts: taken when there is room for another.
        seeds: one a prompt, 0 .. 2^64 - 1.
        sampling: how distributions are made of logits.
        method: how tokens are drafted and accepted.
        together: images that share passes at most; as one is done, the next begins.
        listener: that hears of every pass what it committed.
        adaptive: whether an exact window narrows as `windows.py` has it.

    Yields:
        A step after every prefill and every pass.
    """
    scheduler = Scheduler(model, listener=listener)
    records: list[RequestStatistics] = []
    waiting = iter(enumerate(zip(prompts, seeds, strict=True)))
    done = 0
    stats = None
    while stats is None:
        for i, (prompt, seed) in islice(waiting, together - len(scheduler.active)):
            rows = prompt.rows(sampling)
            request = Request(i, model.raster, rows, sampling, method, seed, prompt.kept, adaptive)
            scheduler.submit(request)
            records.append(request.statistics)
        parts = scheduler.step()
        done += sum(len(part.codes if part.placed is None else part.placed.codes) for part in parts)
        if not scheduler.busy and len(records) == len(seeds):
            clocks = scheduler.target_clock, scheduler.drafter_clock
            stats = summarise(method.method, model.codes, *clocks, records)
        yield Step(parts, done, model.codes * len(seeds), stats)
