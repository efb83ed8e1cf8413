"""What a drafter is trained towards: the divergence of its guided distributions from the target's."""

from __future__ import annotations

import torch
from torch import Tensor


def guided_logits(hidden: Tensor, head: Tensor, cfg_scale: float) -> Tensor:
    """Compute logits and apply classifier-free guidance.

    Args:
        hidden: hidden states `[pictures, sides, n, width]`; of two sides the conditional one comes first.
        head: `[codes, width]`.
        cfg_scale: guidance; of no effect on one side.

    Returns:
        float32 `[pictures, n, codes]`.
    """
    logits = (hidden @ head.T.to(hidden.dtype)).float()
    if logits.shape[1] == 1:
        return logits[:, 0]
    cond, uncond = logits.unbind(1)
    guided: Tensor = uncond + cfg_scale * (cond - uncond)
    return guided


def kl_loss(p: Tensor, logits: Tensor) -> Tensor:
    """Mean divergence, in nats, of the drafter's distributions from the target's.

    Args:
        p: the target's distributions `[..., codes]`, without gradient.
        logits: the drafter's `[..., codes]`.
    """
    entropy: Tensor = torch.special.entr(p).sum(-1)
    return (-(p * logits.log_softmax(-1)).sum(-1) - entropy).mean()


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """Sum of min(p, q) over the last axis: how often exact acceptance takes a draft from q."""
    return torch.minimum(p, q).sum(-1)
