"""Batches of a service, and the choices which images share forward passes and which batch runs next."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from .errors import RequestError
from .methods import MethodConfig
from .runtime.batch import Batch
from .runtime.decode import select_next_sequences
from .runtime.drafters import count_draft_nodes
from .runtime.state import ImageSequence, LoadedModel
from .runtime.statistics import EngineTimer
from .service_request import ServiceRequest

MAX_NODES = 65  # maximum number of nodes per image; a pass pads all images to the largest number, which costs time
FEW_NODES = 2  # number of nodes per image above which an image slows down other callers' images in the same pass
_NUM_BATCHES = MAX_NODES.bit_length() + 1  # batch 0, and one for each bit length of the number of nodes


class ScheduledPass(NamedTuple):
    batch: Batch  # batch that runs the pass
    batch_index: int
    # sequences whose prefixes the pass computes; empty: the pass is a step of the batch's active sequences
    joining_sequences: list[ImageSequence]
    callers_by_batch: dict[int, set[str]]  # callers of each batch that has images


class BatchScheduler:
    """Batches of a service, and the choice of the batch that runs next.

    With several callers, images that would slow down or change other callers' images run in separate batches.
    `requests` are the requests by the indices of their sequences; the service changes them.
    """

    def __init__(
        self, model: LoadedModel, max_images: int, max_rows: int, requests: Mapping[int, ServiceRequest]
    ) -> None:
        self._model = model
        self._max_images = max_images
        self._max_rows = max_rows
        self._requests = requests
        self.timers = EngineTimer(), EngineTimer()  # of target and drafter, over all batches
        self._spent: dict[int, float] = {}  # index of a batch with images -> seconds per caller since it has images
        self.clear()

    def clear(self) -> None:
        self.waiting: list[ImageSequence] = []  # sequences that have not joined a batch, in order of arrival
        self._batches = [Batch(self._model, timers=self.timers) for _ in range(_NUM_BATCHES)]

    @property
    def num_active_images(self) -> int:
        return sum(len(batch.active_sequences) for batch in self._batches)

    def check_node_limit(self, method: MethodConfig) -> None:
        """Raise RequestError if a method has too many nodes per image for a shared forward pass."""
        max_nodes = min(MAX_NODES, self._model.max_nodes)
        nodes = count_draft_nodes(method, max_nodes)
        if nodes > max_nodes:
            expected = f"at most {max_nodes}, because requests share passes"
            raise RequestError(field="method", found=f"{nodes} nodes per image in a forward pass", expected=expected)

    def remove(self, sequences: Sequence[ImageSequence]) -> None:
        self.waiting = [sequence for sequence in self.waiting if sequence not in sequences]
        for batch in self._batches:
            batch.remove(sequences)

    def choose_next_pass(self, num_callers: int, max_caller_images: int) -> ScheduledPass | None:
        """Choose the batch that runs next, and the sequences that join it; None if there are none.

        Args:
            num_callers: number of callers with recent requests.
            max_caller_images: maximum number of images of a caller if there are no other callers.
        """
        active = [sequence for batch in self._batches for sequence in batch.active_sequences]
        free = self._max_images - len(active)
        queued = self._waiting_by_batch(active, num_callers, max_caller_images)
        callers: dict[int, set[str]] = {}
        joining: dict[int, list[ImageSequence]] = {}
        for i, batch in enumerate(self._batches):
            waiting = queued.get(i, [])
            # `max_images` holds for all batches together: this batch keeps its images and may add `free` images.
            max_images = free + len(batch.active_sequences)
            joining[i] = select_next_sequences(batch, waiting, max_images, self._max_rows) if waiting else []
            if batch.active_sequences or joining[i]:
                callers[i] = {self._requests[sequence.index].caller for sequence in (*batch.active_sequences, *waiting)}
        if not callers:
            return None
        # A new batch starts at the minimum: from 0 it would run alone until it had caught up with older batches.
        minimum = min((self._spent[i] for i in callers if i in self._spent), default=0.0)
        self._spent = {i: self._spent.get(i, minimum) for i in callers}
        i = min(callers, key=self._spent.__getitem__)
        return ScheduledPass(self._batches[i], i, joining[i], callers)

    def record_pass_time(self, finished_pass: ScheduledPass, start_time: float) -> None:
        callers = finished_pass.callers_by_batch
        batch_index = finished_pass.batch_index
        # A caller with images in n batches counts as 1 / n caller in each batch.
        num_callers = sum(1 / sum(caller in each for each in callers.values()) for caller in callers[batch_index])
        self._spent[batch_index] += (time.perf_counter() - start_time) / num_callers
        if finished_pass.joining_sequences:
            # A sequence that has joined has its first token.
            self.waiting = [sequence for sequence in self.waiting if not sequence.codes]

    def _waiting_by_batch(
        self, active: Sequence[ImageSequence], num_callers: int, max_caller_images: int
    ) -> dict[int, list[ImageSequence]]:
        """Return, by batch index, the waiting sequences in the order in which they join.

        Sequences of the callers with the fewest images come first. Each waiting image counts for later images of its
        caller, so callers alternate.
        """
        # With several callers, each may have an equal share of the running images, so that later callers need not wait.
        share = max(1, self._max_images // num_callers) if num_callers > 1 else max_caller_images
        counts = Counter([self._requests[sequence.index].caller for sequence in active])
        ranked: list[tuple[int, ImageSequence]] = []  # images that the caller has before this one, and the image
        for sequence in self.waiting:
            caller = self._requests[sequence.index].caller
            if counts[caller] < share:
                ranked.append((counts[caller], sequence))
            counts[caller] += 1
        order = [sequence for _, sequence in sorted(ranked, key=itemgetter(0))]
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
        method = sequence.plan.method
        few_nodes = sequence.max_nodes <= FEW_NODES or method.has_flexible_window
        if num_callers < 2 or (method.exact and few_nodes):
            return 0
        return sequence.max_nodes.bit_length()
