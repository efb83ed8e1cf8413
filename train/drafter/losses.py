"""What a drafter is trained towards, as losses of guided distributions `[..., codes]`; the target's has no gradient.

`kl`: the divergence of q from p. `tv`: their total variation distance, one minus the rate at which exact speculative
sampling accepts. `tv-neighbors`: one minus the rate at which relaxed acceptance accepts, where every token borrows the
probability of its aggregation set.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Loss = Literal["kl", "tv", "tv-neighbors"]
LOSSES: tuple[Loss, ...] = ("kl", "tv", "tv-neighbors")
_BLOCK = 1 << 24  # numbers gathered at a time


def guided(hidden: Tensor, head: Tensor, cfg_scale: float) -> Tensor:
    """Guided logits float32 `[pictures, n, codes]` of `hidden [pictures, sides, n, width]`; one side: no guidance."""
    logits = (hidden @ head.T.to(hidden.dtype)).float()
    if logits.shape[1] == 1:
        return logits[:, 0]
    cond, uncond = logits.unbind(1)
    mixed: Tensor = uncond + cfg_scale * (cond - uncond)
    return mixed


def draft_loss(loss: Loss, wanted: Tensor, logits: Tensor) -> Tensor:
    """The mean loss of the drafter's `logits [..., codes]`; wanted: `p`, or for `tv-neighbors` its `pooled`."""
    if loss == "kl":
        entropy: Tensor = torch.special.entr(wanted).sum(-1)
        return (-(wanted * logits.log_softmax(-1)).sum(-1) - entropy).mean()
    return 1 - overlap(wanted, logits.softmax(-1)).mean()


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """Sum of min(p, q) over the last axis: how often a draft from q is accepted."""
    return torch.minimum(p, q).sum(-1)


@torch.no_grad()
def pooled(p: Tensor, neighbors: Tensor, bound: float) -> Tensor:
    """p(x) + p(A) for every token x, `[..., codes]`; above 1 in sum, since sets overlap.

    neighbors: `[codes, k]`, nearest first. bound: lambda of LANTERN++: A is the longest nearest-first run of neighbours
    with p(A) <= (lambda - 1) p(x).
    """
    flat = p.reshape(-1, p.shape[-1])
    rows = max(1, _BLOCK // neighbors.numel())
    parts = []
    for part in torch.split(flat, rows):
        near = part[:, neighbors].cumsum(-1)  # [rows, codes, k]: never falls, so what is within comes first
        parts.append(part + (near * (near <= (bound - 1) * part[..., None])).amax(-1))
    return torch.cat(parts).view(p.shape)
