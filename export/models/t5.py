"""T5 text encoders of the v1.1 kind (flan-t5-xl is one): a folder of files, a torch module, and its ops.

A token's place counts only relative to other tokens, through one learned bias per head that all layers share. So
padding may stand on either side: hidden by the mask, it leaves the other rows as they are. Everything is computed
in float32: activations of these encoders leave the range of float16.

Does not know captions, prefixes of image models, or how text becomes token ids.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import CheckpointError
from ..checkpoints.deferred import without_weights
from ..checkpoints.files import Weights, config_float, config_int, count_blocks, fill, read_config, shape_of
from ..checkpoints.folders import find_weights, read_weight_files
from ..graph.decoder_graph import write_norm
from ..graph.onnx_ops import Ops
from .decoder import RMSNorm

_HIDDEN = -1e9  # added to the scores of padding; finite, as in the other graphs
_BIAS = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
_SECOND = "encoder.embed_tokens.weight"  # the table of tokens, `shared.weight`, under its second name
_NAMES = {"embed.weight": "shared.weight", "bias.weight": _BIAS, "norm.weight": "encoder.final_layer_norm.weight"}
_LAYER_NAMES = {
    "attention_norm.weight": "layer.0.layer_norm.weight",
    "query.weight": "layer.0.SelfAttention.q.weight",
    "key.weight": "layer.0.SelfAttention.k.weight",
    "value.weight": "layer.0.SelfAttention.v.weight",
    "out.weight": "layer.0.SelfAttention.o.weight",
    "ffn_norm.weight": "layer.1.layer_norm.weight",
    "gate.weight": "layer.1.DenseReluDense.wi_0.weight",
    "up.weight": "layer.1.DenseReluDense.wi_1.weight",
    "down.weight": "layer.1.DenseReluDense.wo.weight",
}


@dataclass(frozen=True)
class T5Config:
    """Sizes of an encoder. Distances from `max_distance` on share the last of the `buckets` of each side."""

    width: int
    layers: int
    heads: int
    head_dim: int
    intermediate_size: int
    vocabulary: int
    buckets: int = 32
    max_distance: int = 128
    norm_eps: float = 1e-6


def distance_buckets(tokens: int, buckets: int, max_distance: int) -> Tensor:
    """Bucket of each pair `[tokens, tokens]`, by the place of the column's token relative to the row's.

    Half of the buckets are for tokens behind. In either half the first half is one distance each, the rest
    grows with the distance's logarithm (T5, arXiv 1910.10683, section 2.1).
    """
    place = torch.arange(tokens)
    relative = place[None] - place[:, None]
    side = buckets // 2
    exact = side // 2
    distance = relative.abs()
    growth = torch.log(distance.clamp(min=exact).float() / exact) / math.log(max_distance / exact)  # float32, as T5's
    far = (exact + (growth * (side - exact)).long()).clamp(max=side - 1)
    return torch.where(distance < exact, distance, far) + side * (relative > 0)


class T5Layer(nn.Module):
    """Attention without scale, then a gated feed-forward; each behind a norm and around a skip connection."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.heads, self.head_dim = config.heads, config.head_dim
        inner = config.heads * config.head_dim
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.query = nn.Linear(config.width, inner, bias=False)
        self.key = nn.Linear(config.width, inner, bias=False)
        self.value = nn.Linear(config.width, inner, bias=False)
        self.out = nn.Linear(inner, config.width, bias=False)
        self.ffn_norm = RMSNorm(config.width, config.norm_eps)
        self.gate = nn.Linear(config.width, config.intermediate_size, bias=False)
        self.up = nn.Linear(config.width, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.width, bias=False)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        normed = self.attention_norm(x)
        query, key, value = (
            part(normed).view(rows, tokens, self.heads, self.head_dim).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        weights = torch.softmax(query @ key.transpose(2, 3) + bias, -1)  # [rows, heads, tokens, tokens]
        x = x + self.out((weights @ value).transpose(1, 2).flatten(2))
        normed = self.ffn_norm(x)
        mixed: Tensor = x + self.down(F.gelu(self.gate(normed), approximate="tanh") * self.up(normed))
        return mixed


class T5Encoder(nn.Module):
    """Token ids and a mask to hidden states."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.bias = nn.Embedding(config.buckets, config.heads)
        self.layers = nn.ModuleList(T5Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)

    def distance_bias(self, tokens: int) -> Tensor:
        """What is added to the scores for the tokens' distance, `[1, heads, tokens, tokens]`."""
        buckets = distance_buckets(tokens, self.config.buckets, self.config.max_distance)
        bias: Tensor = self.bias(buckets).float().permute(2, 0, 1)[None]
        return bias

    def forward(self, token_ids: Tensor, token_mask: Tensor) -> Tensor:
        """`token_ids` and `token_mask [rows, tokens]`, the mask 0 on padding; to `[rows, tokens, width]`."""
        hidden = (token_mask.float()[:, None, None] - 1) * -_HIDDEN
        bias = self.distance_bias(token_ids.shape[1]) + hidden
        x = self.embed(token_ids)
        for layer in self.layers:
            x = layer(x, bias)
        states: Tensor = self.norm(x)
        return states


def write_encoder(ops: Ops, encoder: T5Encoder, most: int) -> tuple[str, str]:
    """Ops from `token_ids` and `token_mask [rows, tokens]` to hidden states, and the mask as float.

    `most`: the largest number of tokens that the graph takes.
    """
    mask = ops.op("Cast", "token_mask", to=1)
    real = ops.op("Sub", mask, ops.weight("one", torch.tensor(1.0)))
    hidden = ops.op("Mul", real, ops.weight("hidden", torch.tensor(-_HIDDEN)))
    hidden = ops.op("Unsqueeze", hidden, ops.ints(1, 2))  # [rows, 1, 1, tokens]
    tokens = ops.op("Shape", "token_ids", start=1, end=2)
    ends = ops.op("Concat", tokens, tokens, axis=0)
    # Distances are those of fewer tokens in any corner of the table.
    near = ops.op(
        "Slice", ops.weight("distance_bias", encoder.distance_bias(most)), ops.ints(0, 0), ends, ops.ints(2, 3)
    )
    bias = ops.op("Add", near, hidden)
    x = ops.op("Gather", ops.weight("embed.weight", encoder.embed.weight), "token_ids")
    for i, layer in enumerate(encoder.layers):
        x = _write_layer(ops, x, f"layers.{i}", cast(T5Layer, layer), bias)
    return write_norm(ops, x, "norm", encoder.norm), mask


def _write_layer(ops: Ops, x: str, at: str, layer: T5Layer, bias: str) -> str:
    normed = write_norm(ops, x, f"{at}.attention_norm", layer.attention_norm)
    parts = {"query": layer.query, "key": layer.key, "value": layer.value}
    split = {
        name: ops.reshape(ops.linear(normed, f"{at}.{name}", part.weight), 0, 0, layer.heads, layer.head_dim)
        for name, part in parts.items()
    }  # each [rows, tokens, heads, head_dim]
    query, value = (ops.transpose(split[name], 0, 2, 1, 3) for name in ("query", "value"))
    scores = ops.op("Add", ops.op("MatMul", query, ops.transpose(split["key"], 0, 2, 3, 1)), bias)
    mixed = ops.op("MatMul", ops.op("Softmax", scores, axis=-1), value)
    joined = ops.reshape(ops.transpose(mixed, 0, 2, 1, 3), 0, 0, layer.heads * layer.head_dim)
    x = ops.op("Add", x, ops.linear(joined, f"{at}.out", layer.out.weight))
    normed = write_norm(ops, x, f"{at}.ffn_norm", layer.ffn_norm)
    gate = ops.op("Gelu", ops.linear(normed, f"{at}.gate", layer.gate.weight), approximate="tanh")
    active = ops.op("Mul", gate, ops.linear(normed, f"{at}.up", layer.up.weight))
    return ops.op("Add", x, ops.linear(active, f"{at}.down", layer.down.weight))


@dataclass(frozen=True)
class T5Files:
    """An encoder and the files it came from, with roles."""

    encoder: T5Encoder
    files: tuple[tuple[str, Path], ...]


def read_t5(folder: Path) -> T5Files:
    """The encoder in a folder as `transformers` saves it, of a whole T5 or of the encoder alone.

    The decoder of a whole T5 is left out. Raises CheckpointError if anything else is missing or too much.
    """
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise CheckpointError(f"{folder}: expected the folder of a T5 encoder such as flan-t5-xl, found no config.json")
    arguments = read_config(config_path)
    kind, activation = arguments.get("model_type"), arguments.get("feed_forward_proj")
    if kind != "t5" or activation != "gated-gelu":
        raise CheckpointError(
            f"{config_path}: model_type is {kind!r} with feed_forward_proj {activation!r}, expected 't5' with "
            "'gated-gelu', such as flan-t5-xl"
        )
    found = find_weights(folder)
    weights = _tied(read_weight_files(found, _is_of_encoder, (_SECOND,)), folder)
    with without_weights():
        encoder = T5Encoder(_infer(weights, folder, arguments, config_path))
    shown = dict(_NAMES)
    for i in range(encoder.config.layers):
        shown |= {f"layers.{i}.{ours}": f"encoder.block.{i}.{theirs}" for ours, theirs in _LAYER_NAMES.items()}
    back = {theirs: ours for ours, theirs in shown.items()}
    fill(encoder, {back.get(name, name): tensor for name, tensor in weights.items()}, folder, shown)
    files = [("text_encoder_index", found.index)] if found.index else []
    files += [("text_encoder", file) for file in found.files]
    return T5Files(encoder, (*files, ("text_encoder_config", config_path)))


def _is_of_encoder(name: str) -> bool:
    return not name.startswith(("decoder.", "lm_head."))


def _tied(weights: Weights, folder: Path) -> Weights:
    """The weights with one table of tokens, which older files hold under two names."""
    second = weights.pop(_SECOND, None)
    if second is None:
        return weights
    if "shared.weight" in weights and not torch.equal(weights["shared.weight"], second):
        raise CheckpointError(f"{folder}: shared.weight and {_SECOND} differ, expected one table of tokens")
    return {"shared.weight": second} | weights


def _infer(weights: Weights, folder: Path, arguments: Mapping[str, Any], source: Path) -> T5Config:
    vocabulary, width = shape_of(weights, "shared.weight", 2, folder)
    layers = count_blocks(weights, "encoder.block.")
    buckets, heads = shape_of(weights, _BIAS, 2, folder)
    inner = shape_of(weights, "encoder.block.0.layer.0.SelfAttention.q.weight", 2, folder)[0]
    if inner % heads:
        raise CheckpointError(f"{folder}: queries have {inner} rows, which {heads} heads do not divide")
    known = {
        "vocab_size": vocabulary,
        "d_model": width,
        "num_layers": layers,
        "num_heads": heads,
        "d_kv": inner // heads,
        "d_ff": shape_of(weights, "encoder.block.0.layer.1.DenseReluDense.wi_0.weight", 2, folder)[0],
        "relative_attention_num_buckets": buckets,
    }
    for name, count in known.items():
        given = config_int(arguments, name, source)
        if given not in (None, count):
            raise CheckpointError(f"{source}: {name} is {given}, but the weights have {count}")
    distance = config_int(arguments, "relative_attention_max_distance", source) or 128
    if buckets % 4 or distance <= buckets // 4:
        raise CheckpointError(
            f"{source}: {buckets} buckets for distances to {distance}, expected a multiple of 4 and a larger distance"
        )
    return T5Config(
        width=width,
        layers=layers,
        heads=heads,
        head_dim=inner // heads,
        intermediate_size=known["d_ff"],
        vocabulary=vocabulary,
        buckets=buckets,
        max_distance=distance,
        norm_eps=config_float(arguments, "layer_norm_epsilon", 1e-6, source),
    )
