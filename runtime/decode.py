"""Step-by-step decoding of images in the order of their prompts.

`decode` is a generator that yields after every step, so that callers can report progress, stream codes and cancel.
`select_next_sequences` selects the waiting sequences that join a batch.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from .batch import Batch
from .drafting import CommitCallback, SequenceStep
from .state import ImageSequence, LoadedModel, Plan, Prompt
from .statistics import SequenceStatistics, Statistics, summarize_decode

UNLIMITED = 1 << 30  # value of a limit that is never reached
# Maximum idle fraction of a batch's capacity, in tokens, while a full batch of waiting images waits to join together.
MAX_IDLE_SHARE = 0.25


@dataclass(frozen=True)
class DecodeStep:
    """Result of one step of the batch, with the number of codes decoded so far."""

    parts: list[SequenceStep]  # step of each sequence in the forward pass
    done: int  # number of codes so far, over all images
    total: int  # number of codes of all images
    stats: Statistics | None  # statistics of the decode in the last step, else None


def decode(
    model: LoadedModel,
    plan: Plan,
    prompts: Iterable[Prompt],
    seeds: Sequence[int],
    max_images: int = 1 << 16,
    on_commit: CommitCallback | None = None,
) -> Generator[DecodeStep, None, None]:
    """Decode the tokens of one image for every prompt, and yield a step after every prefill and verification pass.

    The tokens of an image do not depend on the other images in the batch, whatever the method.

    Args:
        prompts: prompts; the next prompt is read when the batch has capacity for another image.
        seeds: one seed for each prompt, 0 .. 2^64 - 1.
        max_images: maximum number of images in a forward pass; further images wait.
        on_commit: callback that gets the committed tokens after every forward pass.

    Raises:
        EngineError: a graph gave NaN or infinity.
    """
    batch = Batch(model, on_commit)
    num_codes = plan.layout.num_codes
    records: list[SequenceStatistics] = []
    coming = iter(enumerate(zip(prompts, seeds, strict=True)))
    waiting: list[ImageSequence] = []
    done = 0
    stats = None
    while stats is None:
        for i, (prompt, seed) in islice(coming, max_images - len(batch.active_sequences) - len(waiting)):
            waiting.append(ImageSequence(i, plan, prompt, seed))
        new = select_next_sequences(batch, waiting, max_images) if waiting else []
        if new:
            del waiting[: len(new)]
            records += [sequence.statistics for sequence in new]
            parts = batch.add(new)
        else:
            parts = batch.step()
        for sequence in batch.failed_sequences:
            assert sequence.error is not None
            raise sequence.error
        done += sum(part.num_codes for part in parts)
        if not batch.active_sequences and len(records) == len(seeds):
            stats = summarize_decode(plan.method.method, num_codes, batch.target_timer, batch.drafter_timer, records)
        yield DecodeStep(parts, done, num_codes * len(seeds), stats)


def select_next_sequences(
    batch: Batch, waiting_sequences: Sequence[ImageSequence], max_images: int, max_rows: int = UNLIMITED
) -> list[ImageSequence]:
    """Return the first waiting sequences that fit into a batch of `max_images` images and `max_rows` batch rows.

    For every row, a pass reads as many cache columns as the longest row has. So rows of equal length cost less. If the
    waiting sequences fill a whole batch, they wait until the active sequences finish, and then join together. They join
    earlier if waiting would leave more than `MAX_IDLE_SHARE` of the batch's capacity unused.
    """
    if batch.active_sequences and len(waiting_sequences) >= max_images:
        # tokens that the unused capacity of the batch could generate until the active sequences finish
        idle = (max_images - len(batch.active_sequences)) * max(
            sequence.num_remaining_codes for sequence in batch.active_sequences
        )
        num_codes = max(sequence.plan.layout.num_codes for sequence in batch.active_sequences)
        if idle <= MAX_IDLE_SHARE * max_images * num_codes:
            return []
    rows = max_rows - batch.num_rows
    new: list[ImageSequence] = []
    for sequence in waiting_sequences[: max(0, max_images - len(batch.active_sequences))]:
        rows -= len(sequence.rows)
        if rows < 0:
            break
        new.append(sequence)
    return new
