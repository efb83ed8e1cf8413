"""Rounding the target to integers so that what it gives changes least, by its inputs on scenes that nothing else uses.

Columns are rounded one after the other, and those still to come make up for each error as far as inputs go together
(GPTQ: Frantar et al., 2022). Nearest integers have three times the divergence.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lantern_rt.export.graph.precision import quantize, round_activations
from lantern_rt.export.models.decoder import Decoder

from .data import draw_scenes
from .model import ScenesTarget
from .target import tokenise
from .text import encode_caption
from .vocabulary import describe
from .vq import ScenesVQ

SCENES = 48
SEED = 840_000
_DAMPING = 0.01  # of the mean of the diagonal


@torch.no_grad()
def round_target(decoder: Decoder, target: ScenesTarget, code_embeddings: Tensor, vq: ScenesVQ) -> Decoder:
    """The decoder with weights that integers of `--precision int8` hold without loss.

    Args:
        decoder: of `target.fold()`, and so is code_embeddings.
        target: for the prefixes.
        vq: tokenises the scenes.
    """
    rounded = copy.deepcopy(decoder)
    codes = torch.from_numpy(tokenise(vq, SCENES, SEED).astype(np.int64)).repeat(2, 1)  # with captions and without
    rng = np.random.default_rng(SEED)
    captions = np.stack([encode_caption(describe(scene, rng)) for scene in draw_scenes(SCENES, SEED)])
    dropped = torch.arange(2 * SCENES) >= SCENES
    prefix = target.prefix(torch.from_numpy(captions).repeat(2, 1), dropped)
    x = torch.cat([prefix, code_embeddings[codes[:, :-1]]], 1)  # [scenes, prefix and codes, width]
    rope = rounded.rope[None, : x.shape[1]]
    for layer in rounded.layers:
        attention = layer.attention
        ffn = layer.ffn
        normed = layer.attention_norm(x)
        round_layer(attention.qkv, normed)
        query, key, value = (heads.transpose(1, 2) for heads in attention.project(normed, rope))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        x = x + round_layer(attention.out, round_activations(mixed))
        normed = round_activations(layer.ffn_norm(x))
        x = x + round_layer(ffn.down, F.silu(round_layer(ffn.gate, normed)) * round_layer(ffn.up, normed))
    round_layer(rounded.head, round_activations(rounded.norm(x)))
    return rounded


@torch.no_grad()
def round_layer(linear: nn.Linear, inputs: Tensor) -> Tensor:
    """Round a layer's weights for inputs `[scenes, nodes, in]`; returns what it then gives of them."""
    known = inputs.flatten(0, 1).double()
    moments = known.T @ known / len(known)  # [in, in]
    moments += _DAMPING * moments.diagonal().mean() * torch.eye(len(moments))
    order = moments.diagonal().argsort(descending=True)
    inverse = torch.linalg.inv(moments[order][:, order])
    share = torch.linalg.cholesky(inverse, upper=True)  # row i: of an error in i, over those behind it
    weights = linear.weight.double()[:, order]
    integers, scales = quantize(weights.T.float(), "columns")
    scales = scales[0].double()
    largest = integers.abs().argmax(0)
    most = int(integers.abs().max())
    result = torch.empty_like(weights)
    for i in range(len(order)):
        nearest = (weights[:, i] / scales).round().clamp(-most, most)
        nearest = torch.where(largest == i, weights[:, i].sign() * most, nearest)  # or the scale would be another
        result[:, i] = nearest * scales
        error = (weights[:, i] - result[:, i]) / share[i, i]
        weights[:, i + 1 :] -= error[:, None] * share[i, i + 1 :]
    linear.weight.copy_(result[:, order.argsort()])
    given: Tensor = linear(inputs)
    return given
