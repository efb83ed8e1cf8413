"""Output heads of decoders, from hidden states to logits, for decoders whose head is not one linear layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TwoLayerHead(nn.Module):
    """Output head with one hidden layer and GELU; both layers have a bias."""

    def __init__(self, hidden_size: int, inner_size: int, vocab_size: int) -> None:
        super().__init__()
        self.first = nn.Linear(hidden_size, inner_size)
        self.second = nn.Linear(inner_size, vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.second(F.gelu(self.first(x)))
        return logits


class RightBelowHeads(nn.Module):
    """Heads for the cell to the right of a code and, from the states of an additional layer, for the cell below it."""

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.right = nn.Linear(hidden_size, vocab_size, bias=False)
        self.below = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, hidden: Tensor, hidden_for_cell_below: Tensor) -> Tensor:
        return torch.cat([self.right(hidden), self.below(hidden_for_cell_below)], -1)


Head = nn.Linear | TwoLayerHead | RightBelowHeads
