"""Decoding of images in the order in which they were asked for, step by step.

`decode` yields after every step, so progress, streaming and cancelling cost nothing. `joining` says who of those who
wait joins a batch now.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from ..methods import MethodConfig, Sampling
from .batch import Batch
from .drafting import Drafter, SequenceStep
from .state import ImageSequence, Model, Prompt
from .statistics import SequenceStatistics, Statistics, summarise

UNLIMITED = 1 << 30
IDLE = 0.25  # share of the tokens of all images in a pass that may stand idle, so that images begin together


@dataclass(frozen=True)
class Step:
    """One step of the batch; finished sequences have no part in it."""

    parts: list[SequenceStep]  # of the sequences that took part
    done: int  # codes that are drawn, of all images
    total: int  # codes of all images
    stats: Statistics | None  # of the whole decode, with the last step


def decode(
    model: Model,
    prompts: Iterable[Prompt],
    seeds: Sequence[int],
    sampling: Sampling,
    method: MethodConfig,
    max_images: int = 1 << 16,
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
        max_images: maximum number of images per forward pass; when one is done, the next joins.
        listener: that hears of every pass what it committed.
        adaptive: whether an exact window narrows as `windows.py` has it.

    Yields:
        A step after every prefill and every pass.
    """
    batch = Batch(model, listener)
    records: list[SequenceStatistics] = []
    coming = iter(enumerate(zip(prompts, seeds, strict=True)))
    waiting: list[ImageSequence] = []
    done = 0
    stats = None
    while stats is None:
        for i, (prompt, seed) in islice(coming, max_images - len(batch.active) - len(waiting)):
            rows = prompt.rows(sampling)
            waiting.append(ImageSequence(i, model.raster, rows, sampling, method, seed, prompt.preserved, adaptive))
        if new := joining(batch, waiting, max_images):
            del waiting[: len(new)]
            records += [sequence.statistics for sequence in new]
            parts = batch.join(new)
        else:
            parts = batch.step()
        done += sum(part.num_codes for part in parts)
        if not batch.active and len(records) == len(seeds):
            stats = summarise(method.method, model.codes, batch.target_clock, batch.drafter_clock, records)
        yield Step(parts, done, model.codes * len(seeds), stats)


def joining(
    batch: Batch, waiting: Sequence[ImageSequence], max_images: int, max_rows: int = UNLIMITED
) -> list[ImageSequence]:
    """Return the first of those who wait, as far as a batch has room for them.

    If they fill all places, they wait to begin together, unless too much stands idle until the last of those before
    them is done: a pass reads as many columns of every row as the longest has, so rows of one length cost less.

    Args:
        batch: that they join.
        waiting: sequences, in the order in which they join.
        max_images: maximum number of images that share a pass.
        max_rows: maximum number of rows of a pass.
    """
    if batch.active and len(waiting) >= max_images:
        idle = (max_images - len(batch.active)) * max(sequence.remaining for sequence in batch.active)
        if idle <= IDLE * max_images * max(sequence.raster.codes for sequence in batch.active):
            return []
    rows = max_rows - batch.rows
    new: list[ImageSequence] = []
    for sequence in waiting[: max(0, max_images - len(batch.active))]:
        rows -= len(sequence.rows)
        if rows < 0:
            break
        new.append(sequence)
    return new
