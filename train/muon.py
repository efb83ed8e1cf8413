"""Muon optimizer: momentum with orthogonalised updates, for matrices and convolution kernels.

Source: Keller Jordan, Muon (2024), quintic Newton-Schulz iteration with coefficients (3.4445, -4.7750, 2.0315).
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from .precision import is_bfloat16_fast

# `torch.optim.Muon` (2.13) does not replace this class: it rejects convolution kernels, which the scenes recipe trains,
# and always orthogonalises in bfloat16, which changes updates of small matrices by 2 % and is slow on older CPUs.


class Muon(torch.optim.Optimizer):
    """Nesterov momentum with orthogonalised updates, scaled by sqrt(max(1, rows / columns)).

    A convolution kernel `[outputs, inputs, height, width]` is treated as a matrix with one row per output.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            # Weights of the same shape are orthogonalised together, because batched matmuls are faster.
            stacks: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is not None:
                    stacks[weight.flatten(1).shape].append(weight)
            for shape, weights in stacks.items():
                updates = []
                for weight in weights:
                    assert weight.grad is not None
                    state = self.state[weight]
                    average = state.setdefault("momentum", torch.zeros_like(weight))
                    average.lerp_(weight.grad, 1 - group["momentum"])
                    updates.append(weight.grad.lerp(average, group["momentum"]).flatten(1))
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                stacked = torch.stack(updates)
                stacked = stacked.bfloat16() if is_bfloat16_fast(stacked.device) else stacked
                for weight, update in zip(weights, orthogonalise(stacked), strict=True):
                    weight.add_(update.view_as(weight), alpha=-scale)


def orthogonalise(matrices: Tensor) -> Tensor:
    """Return `[matrices, rows, columns]` with the same singular vectors, and singular values close to 1."""
    tall = matrices.shape[1] > matrices.shape[2]  # transposed, since the smaller Gram matrix is cheaper
    x = matrices.transpose(1, 2) if tall else matrices
    # Newton-Schulz converges only if no singular value exceeds 1, so matrices are scaled to norm 1.
    x = x / (x.square().sum((1, 2), keepdim=True).sqrt() + 1e-7)
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.transpose(1, 2) if tall else x
