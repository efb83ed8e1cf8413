"""Losses and metrics that compare guided distributions of drafter and target."""

from __future__ import annotations

import torch
from torch import Tensor


def compute_guided_logits(hidden_states: Tensor, head_weights: Tensor, cfg_scale: float) -> Tensor:
    """Compute logits from hidden states `[images, rows, n, width]` and apply classifier-free guidance.

    The conditional row comes first; with one row per image, the scale has no effect. The result is float32
    `[images, n, codes]`.
    """
    logits = (hidden_states @ head_weights.T.to(hidden_states.dtype)).float()
    if logits.shape[1] == 1:
        return logits[:, 0]
    cond, uncond = logits.unbind(1)
    guided: Tensor = uncond + cfg_scale * (cond - uncond)
    return guided


def compute_kl_loss(target_probs: Tensor, draft_logits: Tensor) -> Tensor:
    """Compute the mean Kullback-Leibler divergence of the drafter's distributions from the target's, in nats."""
    entropy: Tensor = torch.special.entr(target_probs).sum(-1)
    return (-(target_probs * draft_logits.log_softmax(-1)).sum(-1) - entropy).mean()


def compute_probability_overlap(p: Tensor, q: Tensor) -> Tensor:
    """Compute sum(min(p, q)), with which lossless speculative sampling accepts a draft token, over the last axis."""
    return torch.minimum(p, q).sum(-1)
