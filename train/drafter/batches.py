"""Pictures as batches of rows: tokens and hidden states that the drafter reads, and where its predictions begin."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .shards import ShardFolder


class Batch(NamedTuple):
    """Rows of pictures, the sides of one picture next to each other; padded on the right.

    Args:
        tokens: int64 `[rows, slots]`.
        states: the target's hidden states of all positions, float32 `[rows, slots + 1, width]`.
        first: int64 `[rows]`, the slot that reads the first code. The next one is the first whose prediction counts
            deeper in a draft.
        sides: rows of a picture: 2 with guidance, the conditional one first; else 1.
        cells: codes of a picture.
    """

    tokens: Tensor
    states: Tensor
    first: Tensor
    sides: int
    cells: int

    def predictions(self, hidden: Tensor, depth: int) -> Tensor:
        """Select predictions of codes, `[pictures, sides, cells - 1 - depth, width]`.

        Args:
            hidden: predictions of all slots, `[rows, slots, width]`.
            depth: how deep in a draft they are made.
        """
        rows = torch.arange(len(hidden), device=hidden.device)[:, None]
        slots = self.first[:, None] + torch.arange(depth, self.cells - 1, device=hidden.device)
        selected = hidden[rows, slots]
        return selected.reshape(-1, self.sides, *selected.shape[1:])

    def goals(self, depth: int) -> Tensor:
        """Select the target's hidden states that `predictions` of this depth should equal; the same shape."""
        return self.predictions(self.states[:, 1:], depth)


def make_batch(data: ShardFolder, numbers: list[int], code_offset: int, sides: int, device: str) -> Batch:
    """Read pictures as a batch.

    Args:
        data: where they lie.
        numbers: which ones.
        code_offset: the token of code 0.
        sides: rows of a picture, 1 or 2.
        device: where the tensors go.
    """
    cells = data.source.cells
    tokens: list[NDArray[np.integer]] = []
    states: list[NDArray[np.floating]] = []
    for number in numbers:
        picture = data.picture(number)
        for side in range(sides):
            prefix = int(picture.lengths[0, side])
            tokens.append(np.concatenate([picture.tokens[0, side, : prefix - 1], picture.codes[0, :-1] + code_offset]))
            states.append(picture.states[0, side, : prefix + cells - 1])
    slots = max(map(len, tokens))
    padded_tokens = np.stack([np.pad(row, (0, slots - len(row))) for row in tokens])
    padded_states = np.stack([np.pad(row, ((0, slots + 1 - len(row)), (0, 0))) for row in states])
    return Batch(
        torch.from_numpy(padded_tokens).long().to(device),
        torch.from_numpy(padded_states).to(device).float(),
        torch.tensor([len(row) - cells + 1 for row in tokens], device=device),
        sides,
        cells,
    )


def shuffled_pictures(pictures: list[int], seed: int, start: int, count: int) -> list[int]:
    """Select pictures `start` .. `start + count` of endless passes over all, each pass in an order of its own."""
    passes = range(start // len(pictures), (start + count - 1) // len(pictures) + 1)
    orders = {index: np.random.default_rng((seed, index)).permutation(len(pictures)) for index in passes}
    places = (divmod(number, len(pictures)) for number in range(start, start + count))
    return [pictures[orders[index][place]] for index, place in places]
