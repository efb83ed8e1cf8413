"""Fitting `Heads` to a target: what another code on the left does to logits, and what stands in the row below.

Tables of codes are products with the target's own embeddings, and what comes out changes the target's hidden state, so
that little is to be learned: free tables of the same size fitted the training pictures better and held-out ones worse
(measured here). It takes minutes, so that nothing is saved on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...engines.contracts import Progress
from .batches import shuffled_pictures
from .losses import kl_loss, overlap
from .shards import ShardFolder
from .target import Target

RANK, UNITS = 48, 96  # of corrections, of guesses; twice as many gained less than a percent
_PICTURES, _CELLS = 24, 16  # of a step, and of each of its pictures; as many late drafts
_RATE, _DECAY, _WARM_UP = 3e-3, 0.02, 0.05
_HELD_OUT, _HELD_OUT_CELLS = 64, 32  # what figures are of, at most


@dataclass(frozen=True)
class Samples:
    """Cells of pictures, what was drawn around them, and guided hidden states.

    Args:
        goal: of the target, from which each cell is drawn, `[n, width]`.
        left: code before the cell, int64 `[n]`.
        context: from which the code above, and the one to its right, were drawn, `[2, n, width]`; else zeros.
        late: of a pass in which another code stood before the cell, `[n, width]`.
        before: that code, int64 `[n]`.
    """

    goal: Tensor
    left: Tensor
    context: Tensor
    late: Tensor
    before: Tensor


class TrainedHeads(nn.Module):
    """`Heads` while they learn."""

    head: Tensor
    embeddings: Tensor

    def __init__(self, target: Target, seed: int) -> None:
        super().__init__()
        codes, width = target.head.shape
        table = target.embeddings[target.code_offset : target.code_offset + codes].float()
        self.register_buffer("head", target.head.float())
        self.register_buffer("embeddings", table / table.std())
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int, scale: float) -> nn.Parameter:
            return nn.Parameter(scale * torch.randn(shape, generator=generator))

        self.change, self.gate = normal(width, RANK, scale=0.3 * width**-0.5), normal(width, RANK, scale=width**-0.5)
        self.gate_bias = nn.Parameter(torch.zeros(RANK))
        self.correct = nn.Parameter(torch.zeros(RANK, width))
        self.left = normal(width, UNITS, scale=0.3 * width**-0.5)
        self.states = normal(2, width, UNITS, scale=width**-0.5)
        self.output = normal(UNITS, width, scale=0.02)
        self.output_bias = nn.Parameter(torch.zeros(codes))

    def corrected(self, samples: Samples) -> Tensor:
        """Logits `[n, codes]` by what a pass said after the code before."""
        change = (self.embeddings[samples.left] - self.embeddings[samples.before]) @ self.change
        gate = torch.sigmoid(samples.late @ self.gate + self.gate_bias)
        return (samples.late + (change * gate) @ self.correct) @ self.head.T

    def guessed(self, samples: Samples) -> Tensor:
        """Logits `[n, codes]` by what stands around."""
        states = samples.context[0] @ self.states[0] + samples.context[1] @ self.states[1]
        sums = self.embeddings[samples.left] @ self.left + states
        return nn.functional.silu(sums) @ self.output @ self.head.T + self.output_bias

    @torch.no_grad()
    def tables(self) -> dict[str, NDArray[np.float16]]:
        """What `Heads` holds."""
        tables = {
            "change": self.embeddings @ self.change,
            "gate": self.gate,
            "gate_bias": self.gate_bias,
            "correct": self.correct @ self.head.T,
            "left": self.embeddings @ self.left,
            "states": self.states,
            "output": self.output @ self.head.T,
            "output_bias": self.output_bias,
        }
        return {name: table.cpu().numpy().astype(np.float16) for name, table in tables.items()}


def fit_heads(
    data: Path, target: Target, cfg_scale: float, steps: int, progress: Progress, device: str = "cpu", seed: int = 0
) -> tuple[dict[str, NDArray[np.float16]], dict[str, float]]:
    """Train heads.

    Args:
        data: folder of shards; all of them are read once and checked.
        target: what the heads belong to.
        cfg_scale: guidance of the distributions.
        steps: updates, from 1.
        progress: told the step.
        device: where to train, as PyTorch names it.
        seed: of weights and order.

    Returns:
        The tables, and figures of held-out pictures: overlaps with the target's distributions (0 .. 1) of logits that
        came late, of corrected ones, and of guesses.

    Raises:
        CheckpointError: data are damaged, or of another target.
    """
    torch.set_flush_denormal(True)  # small weights would take a hundred times as long
    shards = ShardFolder(data, target.source, len(target.embeddings))
    heads = TrainedHeads(target, seed).to(device)
    optimizer = torch.optim.AdamW(heads.parameters(), _RATE, weight_decay=_DECAY)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=steps + 1, pct_start=_WARM_UP)
    for step in range(steps):
        progress("training", step, steps)
        numbers = shuffled_pictures(shards.training, seed, step * _PICTURES, _PICTURES)
        samples = read_samples(shards, numbers, cfg_scale, _CELLS, np.random.default_rng((seed, step)), device)
        goal = (samples.goal @ heads.head.T).softmax(-1)
        loss = kl_loss(goal, heads.corrected(samples)) + kl_loss(goal, heads.guessed(samples))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(heads.parameters(), 1.0)
        optimizer.step()
        rates.step()
    progress("training", steps, steps)
    held_out = shards.validation[:_HELD_OUT]
    samples = read_samples(shards, held_out, cfg_scale, _HELD_OUT_CELLS, np.random.default_rng(seed), device)
    with torch.no_grad():
        p = (samples.goal @ heads.head.T).softmax(-1)
        logits = {
            "late": samples.late @ heads.head.T,
            "corrected": heads.corrected(samples),
            "guessed": heads.guessed(samples),
        }
        figures = {name: float(overlap(p, each.softmax(-1)).mean()) for name, each in logits.items()}
    return heads.tables(), figures


def read_samples(
    shards: ShardFolder, numbers: list[int], cfg_scale: float, count: int, rng: np.random.Generator, device: str
) -> Samples:
    """Read late drafts of these pictures, at most `count` of each, and the cells they belong to."""
    columns = shards.source.columns
    states: list[NDArray[np.float32]] = []  # of each picture, `[4, n, width]`
    left: list[NDArray[np.integer]] = []
    before: list[NDArray[np.integer]] = []
    for number in numbers:
        picture = shards.picture(number)
        late = np.flatnonzero(picture.late_cells[0])
        late = rng.choice(late, min(count, len(late)), replace=False)
        cells = picture.late_cells[0][late]
        over = cells - columns
        sides: list[NDArray[np.float32]] = []
        for side in range(1 if cfg_scale == 1 else 2):
            drawn = picture.states[0, side, picture.lengths[0, side] - 1 :]  # from which each code was drawn
            context = [np.where(over[:, None] >= 0, drawn[np.maximum(over + i, 0)], 0) for i in (0, 1)]
            sides.append(np.stack([drawn[cells], *context, picture.late_states[0, side, late]]).astype(np.float32))
        states.append(sides[-1] + cfg_scale * (sides[0] - sides[-1]))
        left.append(picture.codes[0][cells - 1])
        before.append(picture.late_codes[0][late])
    read = torch.from_numpy(np.concatenate(states, 1)).to(device)
    tokens = [torch.from_numpy(np.concatenate(codes).astype(np.int64)).to(device) for codes in (left, before)]
    return Samples(read[0], tokens[0], read[1:3], read[3], tokens[1])
