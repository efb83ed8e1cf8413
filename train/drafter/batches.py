"""Training batches: the tokens and hidden states that the drafter reads, and the slots that predict image tokens.

Slot p of a drafter's sequence reads the target's hidden state at position p and the token at position p + 1.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .shards import ShardFolder


class TrainingBatch(NamedTuple):
    """Sequences of several images, padded on the right; the rows of one image follow each other."""

    tokens: Tensor  # token ids that the drafter reads, int64 `[rows, slots]`
    states: Tensor  # the target's hidden states at all positions, float32 `[rows, slots + 1, width]`
    # Slot that reads the first image token in each row, int64 `[rows]`. At depth `d`, the loss begins `d` slots later.
    first_image_positions: Tensor
    rows_per_image: int  # 2 with guidance, the conditional row first; else 1
    num_cells: int  # number of cells of the image grid

    def select_predictions(self, hidden: Tensor, depth: int) -> Tensor:
        """Of the predicted hidden states `[rows, slots, width]`, select those of the slots that predict image tokens.

        They are `[images, rows_per_image, num_cells - 1 - depth, width]`. `depth` is the depth in the draft, from 0.
        """
        rows = torch.arange(len(hidden), device=hidden.device)[:, None]
        slots = self.first_image_positions[:, None] + torch.arange(depth, self.num_cells - 1, device=hidden.device)
        selected = hidden[rows, slots]
        return selected.reshape(-1, self.rows_per_image, *selected.shape[1:])

    def select_target_states(self, depth: int) -> Tensor:
        """Select the target's hidden states that `select_predictions` should equal."""
        return self.select_predictions(self.states[:, 1:], depth)  # slot p predicts the state at position p + 1


def make_training_batch(
    shards: ShardFolder, image_indices: list[int], code_offset: int, rows_per_image: int, device: str
) -> TrainingBatch:
    """Read images of equal size as a batch; `code_offset` is the token id of code 0."""
    tokens: list[NDArray[np.integer]] = []
    states: list[NDArray[np.floating]] = []
    for index in image_indices:
        image, source = shards.read_image(index)
        for row in range(rows_per_image):
            prefix = int(image.prefix_lengths[0, row])
            # The last image token predicts nothing, so neither the token nor its state is needed.
            tokens.append(np.concatenate([image.tokens[0, row, : prefix - 1], image.codes[0, :-1] + code_offset]))
            states.append(image.states[0, row, : prefix + source.num_cells - 1])
    slots = max(map(len, tokens))
    padded_tokens = np.stack([np.pad(row, (0, slots - len(row))) for row in tokens])
    padded_states = np.stack([np.pad(row, ((0, slots + 1 - len(row)), (0, 0))) for row in states])
    return TrainingBatch(
        torch.from_numpy(padded_tokens).long().to(device),
        torch.from_numpy(padded_states).to(device).float(),
        torch.tensor([len(row) - source.num_cells + 1 for row in tokens], device=device),
        rows_per_image,
        source.num_cells,
    )


def select_shuffled_images(image_indices: list[int], seed: int, start: int, count: int) -> list[int]:
    """Select `count` images of an endless sequence of epochs, each of which is shuffled differently.

    `start` is the number of images that earlier steps used.
    """
    epochs = range(start // len(image_indices), (start + count - 1) // len(image_indices) + 1)
    orders = {epoch: np.random.default_rng((seed, epoch)).permutation(len(image_indices)) for epoch in epochs}
    positions = (divmod(number, len(image_indices)) for number in range(start, start + count))
    return [image_indices[orders[epoch][position]] for epoch, position in positions]
