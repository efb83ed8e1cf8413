"""Rounding of the target's weights to integers with GPTQ (Frantar et al., 2022).

The columns of a matrix are rounded one after the other. Later columns compensate each rounding error, as far as their
inputs correlate. Rounding to the nearest integers changes the target's distributions three times as much. The inputs
are computed on scenes that no other step uses.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lantern_rt.export.graph.precision import quantize, round_activations
from lantern_rt.export.models.decoder import Decoder

from .data import sample_scenes
from .model import ScenesTarget
from .target import tokenise_scenes
from .text import encode_caption
from .vocabulary import write_caption
from .vq import ScenesVQ

SCENES = 48
SEED = 840_000
_DAMPING = 0.01  # added to the diagonal of the input moments, as a share of its mean, so that they can be inverted


@torch.no_grad()
def round_target(decoder: Decoder, target: ScenesTarget, code_embeddings: Tensor, vq: ScenesVQ) -> Decoder:
    """Return a copy of the decoder, with weights that `--precision int8` stores without a further change.

    Args:
        decoder: decoder of `target.fold_code_tables()`.
        target: target that computes the caption embeddings.
        code_embeddings: code embeddings of `target.fold_code_tables()`, `[codes, width]`.
        vq: VQ tokenizer that encodes the scenes.
    """
    rounded = copy.deepcopy(decoder)
    codes = torch.from_numpy(tokenise_scenes(vq, SCENES, SEED).astype(np.int64)).repeat(2, 1)
    # Every scene comes once with a caption and once without.
    rng = np.random.default_rng(SEED)
    captions = np.stack([encode_caption(write_caption(scene, rng)) for scene in sample_scenes(SCENES, SEED)])
    dropped = torch.arange(2 * SCENES) >= SCENES
    prefix = target.prefix(torch.from_numpy(captions).repeat(2, 1), dropped)
    x = torch.cat([prefix, code_embeddings[codes[:, :-1]]], 1)  # [scenes, prefix and codes, width]
    rope = rounded.rope[None, : x.shape[1]]
    # Each layer is rounded for the outputs of the rounded layers before it, which are its inputs at run time.
    for layer in rounded.layers:
        attention = layer.attention
        ffn = layer.ffn
        normed = layer.attention_norm(x)
        round_layer(attention.qkv, normed)
        query, key, value = (heads.transpose(1, 2) for heads in attention.project_qkv(normed, rope))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        x = x + round_layer(attention.out, round_activations(mixed))
        normed = round_activations(layer.ffn_norm(x))
        x = x + round_layer(ffn.down, F.silu(round_layer(ffn.gate, normed)) * round_layer(ffn.up, normed))
    round_layer(rounded.head, round_activations(rounded.norm(x)))
    return rounded


@torch.no_grad()
def round_layer(linear: nn.Linear, inputs: Tensor) -> Tensor:
    """Round the weights of a linear layer in place.

    Args:
        linear: layer to round.
        inputs: inputs for which the layer's outputs should change least, `[scenes, positions, in]`.

    Returns:
        The outputs of the rounded layer, `[scenes, positions, out]`.
    """
    rows = inputs.flatten(0, 1).double()
    moments = rows.T @ rows / len(rows)  # [in, in]
    moments += _DAMPING * moments.diagonal().mean() * torch.eye(len(moments))
    # Columns with the largest inputs are rounded first, because the later columns can compensate their errors.
    order = moments.diagonal().argsort(descending=True)
    inverse = torch.linalg.inv(moments[order][:, order])
    influence = torch.linalg.cholesky(inverse, upper=True)  # row i: how an error in column i spreads over later columns
    weights = linear.weight.double()[:, order]
    integers, scales = quantize(weights.T.float(), "columns")
    scales = scales[0].double()
    largest = integers.abs().argmax(0)
    largest_integer = int(integers.abs().max())
    result = torch.empty_like(weights)
    for i in range(len(order)):
        nearest = (weights[:, i] / scales).round().clamp(-largest_integer, largest_integer)
        # The largest weight of each row keeps the largest integer; otherwise the export would choose another scale.
        nearest = torch.where(largest == i, weights[:, i].sign() * largest_integer, nearest)
        result[:, i] = nearest * scales
        error = (weights[:, i] - result[:, i]) / influence[i, i]
        weights[:, i + 1 :] -= error[:, None] * influence[i, i + 1 :]
    linear.weight.copy_(result[:, order.argsort()])
    outputs: Tensor = linear(inputs)
    return outputs
