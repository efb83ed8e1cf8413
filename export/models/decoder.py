"""The one decoder every family shares: a Llama-style transformer with tree masks and an explicit cache.

`Decoder.forward` is what the target graph computes: past-first keys and values, the past is read but never returned.
`Decoder.forward_sequences` is the same function without a cache, for training and checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...engines.graph_writer import HEAD_EPSILON


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and conventions of a decoder.

    rotary: positions are cells of a `grid` with rows and columns (LlamaGen), or a plain `sequence` (Llama, Chameleon).
    rope_style: which numbers of a head are a pair, `interleaved` (2i, 2i + 1) or `half` (i, i + half). prefix_rotation:
    rows of the rotary table before a grid; `zero` makes prefix queries and keys vanish (LlamaGen). spare_positions:
    rows after the grid, for draft nodes past the last cell. input_norm: whether the first layer normalises its input
    (an EAGLE drafter of LlamaGen does not). query_key_norm: whether queries and keys are normalised head by head
    (Chameleon). qkv_bias: whether their projections add one (Qwen2). head_hidden: width of a hidden layer in the head
    (Janus), 0 for a linear one. max_image_tokens: of the longest picture (Lumina-mGPT), 0 for those of the grid.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    grid: int
    prefix: int
    norm_eps: float = 1e-5
    rope_base: float = 10000.0
    rotary: Literal["grid", "sequence"] = "grid"
    rope_style: Literal["interleaved", "half"] = "interleaved"
    prefix_rotation: Literal["zero", "identity"] = "zero"
    spare_positions: int = 64
    input_norm: bool = True
    final_norm: bool = True
    query_key_norm: bool = False
    qkv_bias: bool = False
    head_hidden: int = 0
    max_image_tokens: int = 0

    @property
    def head_dim(self) -> int:
        """Numbers per head."""
        return self.hidden_size // self.num_heads

    @property
    def positions(self) -> int:
        """Rows of the rotary table."""
        return self.prefix + (self.max_image_tokens or self.grid**2) + self.spare_positions


def rope_table(config: DecoderConfig) -> Tensor:
    """Cosines and sines `[positions, head_dim / 2, 2]` of the rotary embedding.

    On a grid the first half of the pairs turns by the row of the cell, the second half by its column, both with
    frequencies base^(-2k / (head_dim / 2)). In a sequence pair k turns by the position, with frequency
    base^(-2k / head_dim).
    """
    real: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}  # also in a module built without weights
    first, places = 0, torch.arange(config.positions, **real)[:, None]
    if config.rotary == "grid":
        first, side = config.prefix, torch.arange(config.grid, **real)
        places = torch.cartesian_prod(side, side)  # [grid * grid, 2]: row, column
    pairs = config.head_dim // 2 // places.shape[1]  # that turn by one coordinate
    frequencies = torch.arange(pairs, **real) / pairs
    angles = (places[:, :, None] * config.rope_base**-frequencies).flatten(1)  # [places, head_dim / 2]
    table = torch.zeros(config.positions, config.head_dim // 2, 2, **real)
    if config.prefix_rotation == "identity":
        table[:first, :, 0] = 1
    table[first : first + len(places)] = torch.stack([angles.cos(), angles.sin()], -1)
    return table.float()


def rotate(x: Tensor, rope: Tensor, rope_style: str = "interleaved") -> Tensor:
    """Turn pairs of `x [rows, nodes, heads, head_dim]` by cosines and sines `rope [rows, nodes, head_dim / 2, 2]`."""
    cos, sin = rope[:, :, None, :, 0], rope[:, :, None, :, 1]
    if rope_style == "half":
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    even, odd = x.view(*x.shape[:-1], x.shape[-1] // 2, 2).unbind(-1)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).view(x.shape)


class RMSNorm(nn.Module):
    """x / rms(x), scaled."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class HeadNorm(nn.Module):
    """(x - mean) / deviation of every head by itself, then scaled and shifted by weights of that head."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(heads, width)), nn.Parameter(torch.zeros(heads, width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape[-1:], eps=HEAD_EPSILON) * self.weight + self.bias


class Attention(nn.Module):
    """Grouped-query attention with separate paths for cached decoding and for training."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.rope_style = config.rope_style
        if config.query_key_norm:
            self.query_norm = HeadNorm(config.num_heads, config.head_dim)
            self.key_norm = HeadNorm(config.num_kv_heads, config.head_dim)
        self.normed = config.query_key_norm
        width, heads = config.hidden_size, config.num_heads + 2 * config.num_kv_heads
        self.qkv = nn.Linear(width, heads * config.head_dim, bias=config.qkv_bias)
        self.out = nn.Linear(config.num_heads * config.head_dim, width, bias=False)

    def project(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values: each `[rows, nodes, heads or num_kv_heads, head_dim]`."""
        heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        query, key, value = self.qkv(x).view(*x.shape[:2], sum(heads), self.head_dim).split(heads, 2)
        if self.normed:
            query, key = self.query_norm(query), self.key_norm(key)
        return rotate(query, rope, self.rope_style), rotate(key, rope, self.rope_style), value

    def forward(
        self, x: Tensor, rope: Tensor, mask: Tensor | None = None, past: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attend to the past and to the new nodes.

        Args:
            x: `[rows, nodes, hidden_size]`.
            rope: `[rows, nodes, head_dim / 2, 2]`.
            mask: additive, `[rows, 1, nodes, past + nodes]`; None: a whole causal sequence.
            past: keys and values, each `[past, rows, num_kv_heads, head_dim]`.

        Returns:
            The output, and the new keys and values `[nodes, rows, num_kv_heads, head_dim]`.
        """
        query, key, value = (heads.transpose(1, 2) for heads in self.project(x, rope))
        new = [heads.permute(2, 0, 1, 3) for heads in (key, value)]
        if past:
            key, value = (torch.cat(pair).permute(1, 2, 0, 3) for pair in zip(past, new, strict=True))
        grouped = self.num_heads != self.num_kv_heads
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )
        return self.out(mixed.transpose(1, 2).flatten(2)), new[0], new[1]


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return mixed


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and around a skip connection."""

    def __init__(self, config: DecoderConfig, input_norm: bool) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps) if input_norm else nn.Identity()
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(
        self, x: Tensor, rope: Tensor, mask: Tensor | None = None, past: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `Attention.forward`."""
        attended, key, value = self.attention(self.attention_norm(x), rope, mask, past)
        x = x + attended
        return x + self.ffn(self.ffn_norm(x)), key, value


class DeepHead(nn.Module):
    """Hidden states to logits through one hidden layer with GELU, both layers with bias."""

    def __init__(self, width: int, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.second(F.gelu(self.first(x)))
        return logits


Head = nn.Linear | DeepHead


class LayerStack(nn.Module):
    """The layers that decoders and drafters are made of, with their rotary table."""

    rope: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Layer(config, config.input_norm or i > 0) for i in range(config.num_layers))
        self.register_buffer("rope", rope_table(config), persistent=False)

    def run_layers(
        self, x: Tensor, position_ids: Tensor, mask: Tensor, past: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """One pass of `x [rows, nodes, hidden_size]` through all layers; the rest as in `Decoder.forward`."""
        rope = self.rope[position_ids]
        new_kv: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            x, *new = layer(x, rope, mask, past[2 * i : 2 * i + 2])
            new_kv += new
        return x, new_kv


class Decoder(LayerStack):
    """A stack of layers with an output head over the image vocabulary."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps) if config.final_norm else nn.Identity()
        self.head: Head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.head_hidden:
            self.head = DeepHead(config.hidden_size, config.head_hidden, config.vocab_size)

    def forward(self, embeds: Tensor, position_ids: Tensor, mask: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        """One pass over new nodes.

        `embeds [rows, nodes, hidden_size]`, `position_ids [rows, nodes]`, additive `mask [rows, 1, nodes, past +
        nodes]`, `past` keys and values of each layer `[past, rows, num_kv_heads, head_dim]`. Returns logits
        `[rows, nodes, vocab_size]`, hidden states `[rows, nodes, hidden_size]` and the new keys and values of each
        layer `[nodes, rows, num_kv_heads, head_dim]`.
        """
        x, new_kv = self.run_layers(embeds, position_ids, mask, past)
        hidden = self.norm(x)
        return self.head(hidden), hidden, *new_kv

    def forward_sequences(self, embeds: Tensor) -> Tensor:
        """Hidden states `[rows, length, hidden_size]` of whole causal sequences that start at position 0."""
        rope = self.rope[None, : embeds.shape[1]]
        for layer in self.layers:
            embeds, *_ = layer(embeds, rope)
        hidden: Tensor = self.norm(embeds)
        return hidden
