"""Training of draft heads, two small networks that propose tokens without a drafter.

If a draft token is not accepted, another token replaces it. The first head then corrects the logits that the target
computed after the unaccepted token. The second head predicts the tokens of the next grid row from the row above.

The heads compute their token tables from the target's embeddings. Tables with separately trained weights had better
results on training images, but worse results on validation images. The outputs of the heads are changes of the target's
hidden state. Training takes minutes, so no state is saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...engines.contracts import Progress
from ...export.torch_settings import default_torch_settings
from .batches import select_shuffled_images
from .losses import compute_kl_loss, compute_probability_overlap
from .shards import ShardFolder
from .target import HeadTrainingTarget, OutputLayer

RANK = 48  # rank of the corrections; twice the rank gained less than a percent
UNITS = 96  # number of hidden units of the predictions; twice as many gained less than a percent
_SEED = 0  # of the weights, the sequence of images and the choice of cells
_BATCH_IMAGES = 24
_BATCH_CELLS = 16  # maximum number of cells per image of a batch
_RATE = 3e-3
_DECAY = 0.02
_WARM_UP = 0.05  # share of the steps
_VALIDATION_IMAGES = 64  # maximum number
_VALIDATION_CELLS = 32  # maximum number per image


@dataclass(frozen=True)
class HeadSamples:
    """Training samples of draft heads: guided hidden states of the target and tokens, for n grid cells."""

    inputs: Tensor  # inputs of the output layer's matrix that give the target's logits of each cell, `[n, inputs]`
    left_tokens: Tensor  # token before each cell, int64 `[n]`
    # Hidden states that predicted the cell above and the cell to the upper right, `[2, n, width]`. The states are zeros
    # in the first row of a grid.
    context_states: Tensor
    unaccepted_states: Tensor  # hidden state that predicted each cell after an unaccepted draft token, `[n, width]`
    # Inputs of the output layer's matrix that are computed from `unaccepted_states`, `[n, inputs]`.
    unaccepted_inputs: Tensor
    unaccepted_tokens: Tensor  # unaccepted draft token before each cell, int64 `[n]`


class TrainableDraftHeads(nn.Module):
    """Draft heads as a PyTorch module; `export_tables` returns the tables of the runtime's `DraftHeads`."""

    embeddings: Tensor

    def __init__(self, target: HeadTrainingTarget, seed: int) -> None:
        super().__init__()
        self.output_layer = target.output_layer
        inputs = self.output_layer.weight.shape[1]
        width = target.embeddings.shape[1]
        self.register_buffer("embeddings", target.embeddings / target.embeddings.std())
        generator = torch.Generator().manual_seed(seed)

        def make_normal_parameter(*shape: int, scale: float) -> nn.Parameter:
            return nn.Parameter(scale * torch.randn(shape, generator=generator))

        self.change = make_normal_parameter(width, RANK, scale=0.3 * width**-0.5)
        self.gate = make_normal_parameter(width, RANK, scale=width**-0.5)
        self.gate_bias = nn.Parameter(torch.zeros(RANK))
        self.correct = nn.Parameter(torch.zeros(RANK, inputs))
        self.left = make_normal_parameter(width, UNITS, scale=0.3 * width**-0.5)
        self.states = make_normal_parameter(2, width, UNITS, scale=width**-0.5)
        self.output = make_normal_parameter(UNITS, inputs, scale=0.02)
        self.output_bias = nn.Parameter(self.output_layer.bias.clone())

    def correct_logits(self, samples: HeadSamples) -> Tensor:
        """Compute corrected logits `[n, codes]` from the hidden states after unaccepted draft tokens.

        The correction depends on the difference between the true token on the left and the unaccepted draft token.
        """
        change = (self.embeddings[samples.left_tokens] - self.embeddings[samples.unaccepted_tokens]) @ self.change
        gate = torch.sigmoid(samples.unaccepted_states @ self.gate + self.gate_bias)
        return self.output_layer.compute_logits(samples.unaccepted_inputs + (change * gate) @ self.correct)

    def predict_logits(self, samples: HeadSamples) -> Tensor:
        """Predict logits `[n, codes]` from the token on the left and the hidden states of the row above."""
        states = samples.context_states[0] @ self.states[0] + samples.context_states[1] @ self.states[1]
        sums = self.embeddings[samples.left_tokens] @ self.left + states
        return nn.functional.silu(sums) @ self.output @ self.output_layer.weight.T + self.output_bias

    @torch.no_grad()
    def export_tables(self) -> dict[str, NDArray[np.float16]]:
        tables = {
            # Products with the frozen embeddings and output matrix are computed once, so decoding only looks them up.
            "change": self.embeddings @ self.change,
            "gate": self.gate,
            "gate_bias": self.gate_bias,
            "correct": self.correct @ self.output_layer.weight.T,
            "left": self.embeddings @ self.left,
            "states": self.states,
            "output": self.output @ self.output_layer.weight.T,
            "output_bias": self.output_bias,
        }
        return {name: table.cpu().numpy().astype(np.float16) for name, table in tables.items()}


@default_torch_settings(flush_denormal=True)  # denormal weights would slow training down a hundred times
def train_draft_heads(
    data_folder: Path,
    target: HeadTrainingTarget,
    cfg_scale: float,
    steps: int,
    progress: Progress,
    device: str,
) -> tuple[dict[str, NDArray[np.float16]], dict[str, float]]:
    """Train draft heads on a folder of shards, for a guidance scale. Return their tables, and metrics by name.

    The metrics are the overlap with the target's distributions, 0 .. 1, on validation images, of `uncorrected` logits
    after unaccepted drafts, of `corrected` logits and of `predicted` logits.

    Raises:
        CheckpointError: the data are damaged or belong to another target.
    """
    shards = ShardFolder(data_folder, target.shard_sources)
    heads = TrainableDraftHeads(target, _SEED).to(device)
    optimizer = torch.optim.AdamW(heads.parameters(), _RATE, weight_decay=_DECAY)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=steps + 1, pct_start=_WARM_UP)
    for step in range(steps):
        progress("training", step, steps)
        indices = select_shuffled_images(shards.training_indices, _SEED, step * _BATCH_IMAGES, _BATCH_IMAGES)
        rng = np.random.default_rng((_SEED, step))
        samples = read_head_samples(shards, indices, heads.output_layer, cfg_scale, _BATCH_CELLS, rng, device)
        p = heads.output_layer.compute_logits(samples.inputs).softmax(-1)
        loss = compute_kl_loss(p, heads.correct_logits(samples)) + compute_kl_loss(p, heads.predict_logits(samples))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(heads.parameters(), 1.0)
        optimizer.step()
        rates.step()
    progress("training", steps, steps)
    indices = shards.validation_indices[:_VALIDATION_IMAGES]
    rng = np.random.default_rng(_SEED)
    samples = read_head_samples(shards, indices, heads.output_layer, cfg_scale, _VALIDATION_CELLS, rng, device)
    with torch.no_grad():
        p = heads.output_layer.compute_logits(samples.inputs).softmax(-1)
        logits = {
            "uncorrected": heads.output_layer.compute_logits(samples.unaccepted_inputs),
            "corrected": heads.correct_logits(samples),
            "predicted": heads.predict_logits(samples),
        }
        metrics = {
            name: float(compute_probability_overlap(p, each.softmax(-1)).mean()) for name, each in logits.items()
        }
    return heads.export_tables(), metrics


def read_head_samples(
    shards: ShardFolder,
    image_indices: list[int],
    output_layer: OutputLayer,
    cfg_scale: float,
    max_cells: int,
    rng: np.random.Generator,
    device: str,
) -> HeadSamples:
    """Read training samples at cells that follow an unaccepted draft token, at most `max_cells` per image."""
    states: list[NDArray[np.float32]] = []  # [rows, 4, n, width] per image
    left_tokens: list[NDArray[np.integer]] = []
    unaccepted_tokens: list[NDArray[np.integer]] = []
    for index in image_indices:
        image, source = shards.read_image(index)
        drafts = np.flatnonzero(image.unaccepted_cells[0])
        drafts = rng.choice(drafts, min(max_cells, len(drafts)), replace=False)
        cells = image.unaccepted_cells[0][drafts]
        above = np.array([source.raster_layout.find_code_index_above(cell) for cell in cells.tolist()], np.int64)
        rows: list[NDArray[np.float32]] = []
        for row in range(1 if cfg_scale == 1 else 2):
            # The state at the last prefix position predicts cell 0, the next state cell 1, and so on.
            predicting = image.states[0, row, image.prefix_lengths[0, row] - 1 :]
            context_states = [np.where(above[:, None] >= 0, predicting[np.maximum(above + i, 0)], 0) for i in (0, 1)]
            unaccepted = image.unaccepted_states[0, row, drafts]
            rows.append(np.stack([predicting[cells], *context_states, unaccepted]).astype(np.float32))
        states.append(np.stack(rows))
        left_tokens.append(image.codes[0][cells - 1])
        unaccepted_tokens.append(image.unaccepted_codes[0][drafts])
    joined = torch.from_numpy(np.concatenate(states, 2)).to(device)  # [rows, 4, n, width]
    # Without guidance there is one row, and the difference of the first and last row is zero.
    guided = joined[-1] + cfg_scale * (joined[0] - joined[-1])
    inputs = output_layer.inputs(joined[:, [0, 3]])
    guided_inputs = inputs[-1] + cfg_scale * (inputs[0] - inputs[-1])
    tokens = [
        torch.from_numpy(np.concatenate(codes).astype(np.int64)).to(device)
        for codes in (left_tokens, unaccepted_tokens)
    ]
    return HeadSamples(guided_inputs[0], tokens[0], guided[1:3], guided[3], guided_inputs[1], tokens[1])
