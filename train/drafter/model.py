"""Forward pass of the drafter for training, at all depths of a draft (training-time test, EAGLE-3, arXiv 2503.01840).

The forward pass imitates decoding a chain of draft tokens. At depth 0 each slot reads the target's hidden state, as
after accepted tokens. At depth d a slot reads the prediction that the previous slot made at depth d - 1. The slot then
attends to the d slots before it at depths d - 1 to 0, and to all earlier slots at depth 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...export.models.decoder import DecoderLayer
from ...export.models.eagle import EagleDrafter
from .target import TrainingTarget

KeysAndValues = list[tuple[Tensor, Tensor]]


def make_drafter(target: TrainingTarget, seed: int) -> EagleDrafter:
    """Create an untrained drafter with the frozen output layer of the target.

    The drafter at first nearly copies its input state to its output, because consecutive hidden states are similar.
    """
    config = target.config
    width = config.hidden_size
    with torch.random.fork_rng(devices=[]):  # keeps the caller's random state
        torch.manual_seed(seed)
        head = nn.Linear(width, config.vocab_size, bias=False)
        drafter = EagleDrafter(config, head, bias=True, num_tokens=len(target.embeddings))
        for name, weight in drafter.layers.named_parameters():
            if weight.ndim == 2 and "norm" not in name:
                # Layers that write to the residual stream start smaller, so that an untrained layer changes little.
                spread = weight.shape[1] ** -0.5
                nn.init.normal_(weight, std=spread * (0.3 if name.endswith(("out.weight", "down.weight")) else 1.0))
        nn.init.uniform_(drafter.fc.weight, -((2 * width) ** -0.5), (2 * width) ** -0.5)
    with torch.no_grad():
        drafter.fc.weight[:, width:] = torch.eye(width)
        drafter.fc.weight[:, :width] *= 0.5
        drafter.fc.bias.zero_()
        drafter.embed.weight.copy_(target.embeddings)
        head.weight.copy_(target.head)
    head.weight.requires_grad_(False)
    return drafter


def predict_draft_states(
    drafter: EagleDrafter, tokens: Tensor, target_states: Tensor, num_depths: int
) -> Iterator[Tensor]:
    """Predict hidden states depth by depth. Gradients do not flow from one depth to the previous.

    Slot p reads token p + 1, of `tokens [rows, slots]`, and state p, of `target_states [rows, slots, width]`.

    Yields:
        Predictions of each depth, `[rows, slots, width]`; slot p predicts the state at position p + 1. At depth d the
        slots of the prefix and the d slots after it are invalid.
    """
    slots = tokens.shape[1]
    layers = [cast(DecoderLayer, layer) for layer in drafter.layers]
    rope = drafter.rope[None, :slots]
    embeds = drafter.embed(tokens)
    cache: list[KeysAndValues] = [[] for _ in layers]
    inputs = target_states
    for _ in range(num_depths):
        x = drafter.fc(torch.cat([embeds, inputs.to(embeds.dtype)], -1))
        for layer, layer_cache in zip(layers, cache, strict=True):
            query, key, value = layer.attention.project_qkv(layer.attention_norm(x), rope)
            layer_cache.append((key, value))
            x = x + layer.attention.out(_compute_attention(query, layer_cache).flatten(2))
            x = x + layer.ffn(layer.ffn_norm(x))
        yield x
        inputs = F.pad(x.detach()[:, :-1], (0, 0, 1, 0))  # each slot reads the prediction of the slot before it


def _compute_attention(query: Tensor, cache: KeysAndValues) -> Tensor:
    depth = len(cache) - 1
    group = query.shape[2] // cache[0][0].shape[2]  # number of query heads per key head
    wide = [tuple(part.repeat_interleave(group, 2) if group > 1 else part for part in pair) for pair in cache]
    key, value = (part.transpose(1, 2) for part in wide[0])  # [rows, heads, slots, head_dim]
    if not depth:
        return F.scaled_dot_product_attention(query.transpose(1, 2), key, value, is_causal=True).transpose(1, 2)
    slots = query.shape[1]
    scale = query.shape[3] ** -0.5
    behind = torch.ones(slots, slots, dtype=torch.bool, device=query.device).tril(-depth)  # attended at depth 0
    scores = (query.transpose(1, 2) @ key.transpose(2, 3)).masked_fill(~behind, float("-inf"))
    # The draft slot at depth i is depth - i slots back; the last pair belongs to the slot itself.
    drafted = [(_shift_states(k, depth - i), _shift_states(v, depth - i)) for i, (k, v) in enumerate(wide[1:], 1)]
    nearby = torch.stack([(query * k).sum(-1) for k, _ in drafted], -1).transpose(1, 2)  # [rows, heads, slots, depth]
    weights = (torch.cat([scores, nearby.to(scores.dtype)], -1) * scale).softmax(-1)
    mixed: Tensor = (weights[..., :slots].to(value.dtype) @ value).transpose(1, 2)
    for i, (_, v) in enumerate(drafted):
        mixed = mixed + weights[..., slots + i].transpose(1, 2)[..., None] * v
    return mixed


def _shift_states(states: Tensor, num_slots: int) -> Tensor:
    return F.pad(states[:, : states.shape[1] - num_slots], (0, 0, 0, 0, num_slots, 0)) if num_slots else states
