"""Batches of a service, and the choices which images share forward passes and which batch runs next."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .errors import RequestError
from .methods import MethodConfig, SpeculativeJacobi
from .runtime.batch import Batch
from .runtime.decode import select_next_sequences
from .runtime.drafters import count_draft_nodes
from .runtime.drafting import SequenceStep
from .runtime.state import ImageSequence, LoadedModel
from .runtime.statistics import EngineTimer
from .sharing import FairScheduler, order_fairly

MAX_NODES = 65  # maximum number of nodes per image; a pass pads all images to the largest number, which costs time
FEW_NODES = 2  # number of nodes per image above which an image slows down other callers' images in the same pass
_NUM_BATCHES = (
    MAX_NODES.bit_length() + 1
)  # number of batches: batch 0, and one for each bit length of the number of nodes


class ScheduledPass(NamedTuple):
    """Next forward pass of a service, as `BatchScheduler.choose_next_pass` chose it."""

    batch: Batch  # batch that runs the pass
    batch_index: int
    # sequences whose prefixes the pass computes; empty: the pass is a step of the batch's active sequences
    joining_sequences: list[ImageSequence]
    callers_by_batch: dict[int, set[str]]  # callers of each batch that has images

    def run(self) -> list[SequenceStep]:
        """Run the forward pass, and return the result for each sequence in the pass."""
        return self.batch.add(self.joining_sequences) if self.joining_sequences else self.batch.step()


class BatchScheduler:
    """Batches of a service, and the choice of the batch that runs next.

    With several callers, images that would slow down or change other callers' images run in separate batches.

    Args:
        model: engines and tables of the model.
        max_images: maximum number of images per forward pass.
        max_rows: maximum number of batch rows per forward pass.
        find_caller: function that takes a sequence (image) and returns the name of its caller.

    Attributes:
        timers: timers of the forward passes of target and drafter, over all batches.
        waiting: sequences that have not joined a batch yet, in order of arrival.
    """

    def __init__(
        self, model: LoadedModel, max_images: int, max_rows: int, find_caller: Callable[[ImageSequence], str]
    ) -> None:
        self._model = model
        self._max_images = max_images
        self._max_rows = max_rows
        self._find_caller = find_caller
        self.timers = EngineTimer(), EngineTimer()
        self._scheduler = FairScheduler()
        self.clear()

    def clear(self) -> None:
        """Remove all sequences, and replace the batches by empty batches."""
        self.waiting: list[ImageSequence] = []
        self._batches = [Batch(self._model, timers=self.timers) for _ in range(_NUM_BATCHES)]

    @property
    def num_active_images(self) -> int:
        """Number of images that share forward passes now."""
        return sum(len(batch.active_sequences) for batch in self._batches)

    def check_node_limit(self, method: MethodConfig) -> None:
        """Raise RequestError if a method has too many nodes per image for a shared forward pass."""
        max_nodes = min(MAX_NODES, self._model.max_nodes)
        nodes = count_draft_nodes(method, max_nodes)
        if nodes > max_nodes:
            expected = f"at most {max_nodes}, because requests share passes"
            raise RequestError(field="method", found=f"{nodes} nodes per image in a forward pass", expected=expected)

    def remove(self, sequences: Sequence[ImageSequence]) -> None:
        """Remove sequences from `waiting` and from all batches."""
        self.waiting = [sequence for sequence in self.waiting if sequence not in sequences]
        for batch in self._batches:
            batch.remove(sequences)

    def choose_next_pass(self, num_callers: int, max_caller_images: int) -> ScheduledPass | None:
        """Choose the batch that runs next, and the sequences that join the batch.

        Args:
            num_callers: number of callers with recent requests.
            max_caller_images: maximum number of images of a caller if there are no other callers.

        Returns:
            The pass; None if no sequence is waiting or active.
        """
        queued = self._select_waiting_sequences_by_batch(num_callers, max_caller_images)
        free = self._max_images - self.num_active_images
        callers: dict[int, set[str]] = {}
        joining: dict[int, list[ImageSequence]] = {}
        for i, batch in enumerate(self._batches):
            waiting = queued.get(i, [])
            # `max_images` holds for all batches together: this batch keeps its images and may add `free` images.
            joining[i] = select_next_sequences(batch, waiting, free + len(batch.active_sequences), self._max_rows)
            if batch.active_sequences or joining[i]:
                callers[i] = {self._find_caller(sequence) for sequence in (*batch.active_sequences, *waiting)}
        if not callers:
            return None
        i = self._scheduler.choose_next_batch(callers)
        return ScheduledPass(self._batches[i], i, joining[i], callers)

    def record_pass_time(self, finished_pass: ScheduledPass, start_time: float) -> None:
        """Record the time of a forward pass that has just ended, and remove joined sequences from `waiting`.

        Args:
            finished_pass: pass that `choose_next_pass` returned.
            start_time: value of `time.perf_counter` before the pass.
        """
        self._scheduler.record_batch_time(
            finished_pass.batch_index, time.perf_counter() - start_time, finished_pass.callers_by_batch
        )
        if finished_pass.joining_sequences:
            # A sequence that has joined has its first token.
            self.waiting = [sequence for sequence in self.waiting if not sequence.codes]

    def _select_waiting_sequences_by_batch(
        self, num_callers: int, max_caller_images: int
    ) -> dict[int, list[ImageSequence]]:
        """Return, by batch index, the waiting sequences of each batch in the order in which the sequences join."""
        active = [sequence for batch in self._batches for sequence in batch.active_sequences]
        running = Counter(map(self._find_caller, active))
        # With several callers, each may have an equal share of the running images, so that later callers need not wait.
        share = max(1, self._max_images // num_callers) if num_callers > 1 else max_caller_images
        order = order_fairly([(self._find_caller(sequence), sequence) for sequence in self.waiting], running, share)
        batch_indices = [self._assign_batch(sequence, num_callers) for sequence in order]
        used = {i for i, batch in enumerate(self._batches) if batch.active_sequences}
        # `select_next_sequences` limits the images of one batch. This slice limits the images of all batches together.
        if len(used.union(batch_indices)) > 1:
            order = order[: self._max_images - len(active)]
        waiting: dict[int, list[ImageSequence]] = {}
        for sequence, batch_index in zip(order, batch_indices, strict=False):  # `order` may have become shorter
            waiting.setdefault(batch_index, []).append(sequence)
        return waiting

    def _assign_batch(self, sequence: ImageSequence, num_callers: int) -> int:
        """Return the index of the batch that an image joins.

        With one caller, all images join batch 0. With several callers, batch 0 is for exact methods with few nodes per
        image, and for exact `sjd`, whose window narrows when images share passes. Other images join a batch by their
        number of nodes, because large passes would delay other callers. Images of relaxed methods then never join
        batch 0, because their tokens depend on the draft tokens.
        """
        method = sequence.method
        if num_callers < 2 or (
            method.exact and (sequence.max_nodes <= FEW_NODES or isinstance(method, SpeculativeJacobi))
        ):
            return 0
        return sequence.max_nodes.bit_length()
