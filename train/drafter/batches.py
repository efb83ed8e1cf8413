"""Pictures as batches of rows: tokens and hidden states that the drafter reads, and where its predictions begin."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import CheckpointError
from ...pipeline import Pipeline
from .data import prompts_of, states_of
from .shards import Data, Pictures


class Batch(NamedTuple):
    """Rows of pictures, sides of one picture together.

    tokens int64 `[rows, slots]`. states float32 `[rows, slots + 1, width]`: the target's, of all positions. first int64
    `[rows]`: the slot that reads the first code; the next one is the first whose prediction counts deeper in a draft.
    Rows are padded on the right, behind everything that counts.
    """

    tokens: Tensor
    states: Tensor
    first: Tensor
    sides: int
    cells: int

    def predicted(self, hidden: Tensor, depth: int) -> Tensor:
        """Those of codes, `[pictures, sides, cells - 1 - depth, width]`, among `[rows, slots, width]` at a depth."""
        return self._taken(hidden, depth)

    def wanted(self, depth: int) -> Tensor:
        """The target's hidden states that these predict, of the same shape."""
        return self._taken(self.states[:, 1:], depth)

    def _taken(self, hidden: Tensor, depth: int) -> Tensor:
        rows = torch.arange(len(hidden), device=hidden.device)[:, None]
        slots = self.first[:, None] + torch.arange(depth, self.cells - 1, device=hidden.device)
        found = hidden[rows, slots]
        return found.reshape(-1, self.sides, *found.shape[1:])


class Batches:
    """Makes batches of numbered pictures; hidden states that are not in the data come from the pipeline's engine."""

    def __init__(self, data: Data, code_offset: int, sides: int, device: str, pipeline: Pipeline | None) -> None:
        if pipeline is None and not data.source.states:
            raise CheckpointError(
                f"{data.folder}: has no hidden states, and no engine to compute them; make it with --states"
            )
        self.data, self._offset, self._sides, self._device = data, code_offset, sides, device
        self._pipeline = pipeline

    def batch(self, numbers: list[int], dropped: frozenset[int] = frozenset()) -> Batch:
        """The pictures of these numbers; those at the places in `dropped` have no caption."""
        cells = self.data.source.cells
        tokens: list[NDArray[np.integer]] = []
        states: list[NDArray[np.floating]] = []
        for place, number in enumerate(numbers):
            picture = self.data.picture(number)
            both = picture.states[0] if picture.states is not None else self._states(picture)
            for side in range(self._sides):
                own = 1 if place in dropped else side
                prefix = int(picture.lengths[0, own])
                tokens.append(
                    np.concatenate([picture.tokens[0, own, : prefix - 1], picture.codes[0, :-1] + self._offset])
                )
                states.append(both[own][: prefix + cells - 1])
        slots = max(map(len, tokens))
        first = torch.tensor([len(row) - cells + 1 for row in tokens], device=self._device)
        return Batch(
            torch.from_numpy(np.stack([np.pad(row, (0, slots - len(row))) for row in tokens])).long().to(self._device),
            torch.from_numpy(np.stack([np.pad(row, ((0, slots + 1 - len(row)), (0, 0))) for row in states]))
            .to(self._device)
            .float(),
            first,
            self._sides,
            cells,
        )

    def _states(self, picture: Pictures) -> list[NDArray[np.float32]]:
        assert self._pipeline is not None
        subjects = picture.subjects if picture.embeddings is None else (picture.embeddings, picture.masks)
        return states_of(
            self._pipeline, prompts_of(self._pipeline, self.data.source.kind, subjects), np.asarray(picture.codes)
        )


def chosen_pictures(training: list[int], seed: int, start: int, count: int) -> list[int]:
    """Pictures `start` .. `start + count` of endless passes over all, each in an order of its own."""
    turns = range(start // len(training), (start + count - 1) // len(training) + 1)
    orders = {turn: np.random.default_rng((seed, turn)).permutation(len(training)) for turn in turns}
    places = (divmod(number, len(training)) for number in range(start, start + count))
    return [training[orders[turn][place]] for turn, place in places]
