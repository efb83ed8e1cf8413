"""The batches of a service: which images share forward passes, and which batch runs next."""

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

MAX_NODES = 65  # maximum nodes of an image per forward pass; a pass pads all images to the same number
FEW_NODES = 2  # exact methods with more nodes per image slow down other callers that share the forward pass
_GROUPS = MAX_NODES.bit_length() + 1  # groups of images that share forward passes, by the logarithm of their nodes


class ScheduledPass(NamedTuple):
    """The batch that runs next."""

    batch: Batch
    batch_index: int  # number of the batch
    # sequences whose prefixes the pass runs; empty: a step of the active sequences
    joining_sequences: list[ImageSequence]
    callers_by_batch: dict[int, set[str]]  # callers of each batch that has images

    def run(self) -> list[SequenceStep]:
        """Run the pass, and return each sequence's part of it."""
        return self.batch.add(self.joining_sequences) if self.joining_sequences else self.batch.step()


class BatchScheduler:
    """Batches of a service. Several callers' images are apart where images would slow down or change each other.

    Args:
        model: engines and tables.
        max_images: maximum number of images per forward pass.
        max_rows: maximum number of batch rows per forward pass.
        find_caller: function from a sequence to its caller.

    Attributes:
        timers: clocks of the target and the drafter.
        waiting: sequences that have not joined a batch, in the order of their arrival.
    """

    def __init__(
        self, model: LoadedModel, max_images: int, max_rows: int, find_caller: Callable[[ImageSequence], str]
    ) -> None:
        self._model = model
        self._max_images = max_images
        self._max_rows = max_rows
        self._find_caller = find_caller
        self.timers = EngineTimer(), EngineTimer()
        self._turns = FairScheduler()
        self.clear()

    def clear(self) -> None:
        """Remove all sequences, and begin with new batches."""
        self.waiting: list[ImageSequence] = []
        self._batches = [Batch(self._model, timers=self.timers) for _ in range(_GROUPS)]

    @property
    def num_active_images(self) -> int:
        """Number of images that share forward passes now."""
        return sum(len(batch.active_sequences) for batch in self._batches)

    def check_node_limit(self, method: MethodConfig) -> None:
        """Raise RequestError if a pass of the method has too many nodes to be shared."""
        max_nodes = min(MAX_NODES, self._model.max_nodes)
        nodes = count_draft_nodes(method, max_nodes)
        if nodes > max_nodes:
            expected = f"at most {max_nodes} where passes are shared"
            raise RequestError(field="method", found=f"{nodes} nodes in a pass", expected=expected)

    def remove(self, sequences: Sequence[ImageSequence]) -> None:
        """Remove sequences, waiting or active."""
        self.waiting = [sequence for sequence in self.waiting if sequence not in sequences]
        for batch in self._batches:
            batch.remove(sequences)

    def choose_next_pass(self, num_callers: int, max_caller_images: int) -> ScheduledPass | None:
        """Choose the batch that runs next, and the sequences that join it; None if there are no sequences.

        Args:
            num_callers: number of callers with recent requests.
            max_caller_images: maximum number of images of a single caller.
        """
        queued = self._select_waiting_by_batch(num_callers, max_caller_images)
        free = self._max_images - self.num_active_images
        callers: dict[int, set[str]] = {}
        joining: dict[int, list[ImageSequence]] = {}
        for group, batch in enumerate(self._batches):
            waiting = queued.get(group, [])
            joining[group] = select_next_sequences(batch, waiting, free + len(batch.active_sequences), self._max_rows)
            if batch.active_sequences or joining[group]:
                callers[group] = {self._find_caller(sequence) for sequence in (*batch.active_sequences, *waiting)}
        if not callers:
            return None
        group = self._turns.choose_next_group(callers)
        return ScheduledPass(self._batches[group], group, joining[group], callers)

    def record_pass_time(self, finished_pass: ScheduledPass, start_time: float) -> None:
        """Record the time of a forward pass that ends now; images that joined in it do not wait any more.

        Args:
            start_time: time at its begin, by `time.perf_counter`.
        """
        self._turns.record_group_time(
            finished_pass.batch_index, time.perf_counter() - start_time, finished_pass.callers_by_batch
        )
        if finished_pass.joining_sequences:
            self.waiting = [sequence for sequence in self.waiting if not sequence.codes]

    def _select_waiting_by_batch(self, num_callers: int, max_caller_images: int) -> dict[int, list[ImageSequence]]:
        """Return the queued sequences of each group, in the order in which they join its batch."""
        active = [sequence for batch in self._batches for sequence in batch.active_sequences]
        held = Counter(map(self._find_caller, active))
        share = max(1, self._max_images // num_callers) if num_callers > 1 else max_caller_images
        order = order_fairly([(self._find_caller(sequence), sequence) for sequence in self.waiting], held, share)
        groups = [self._assign_batch(sequence, num_callers) for sequence in order]
        used = {group for group, batch in enumerate(self._batches) if batch.active_sequences}
        # `select_next_sequences` limits the images of one group; this limits them over all groups.
        if len(used.union(groups)) > 1:
            order = order[: self._max_images - len(active)]
        waiting: dict[int, list[ImageSequence]] = {}
        for sequence, group in zip(order, groups, strict=False):
            waiting.setdefault(group, []).append(sequence)
        return waiting

    def _assign_batch(self, sequence: ImageSequence, num_callers: int) -> int:
        """Return the number of the batch that an image joins.

        Batch 0 is for all callers. With several callers, images are decoded in other batches, by number of nodes, if
        their large passes would delay other callers, or if other callers' images would change theirs.
        """
        method = sequence.method
        if num_callers < 2 or (
            method.exact and (sequence.max_nodes <= FEW_NODES or isinstance(method, SpeculativeJacobi))
        ):
            return 0
        return sequence.max_nodes.bit_length()
