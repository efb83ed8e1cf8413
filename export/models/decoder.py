"""Decoder of all families: a Llama-style transformer with tree attention masks and an explicit KV cache.

`Decoder.forward` defines the target graph. The position is the first axis of keys and values. Past keys and values are
inputs; only the new keys and values are outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...bundle.decoder import Activation, Architecture, PrefixRotation, RopeStyle, Rotary
from ...bundle.manifest import DecoderSizes, DecoderSpec, DrafterSpec
from ..checkpoints.deferred import compute_deferred_tensor
from .output_heads import Head, RightBelowHeads, TwoLayerHead

if TYPE_CHECKING:
    from ..checkpoints.folders import Checkpoint

# Logit of a code that may not be sampled at a position. It is finite, as guidance subtracts logits, and exact in all
# floating-point types.
EXCLUDED = -(2.0**15)
HEAD_EPSILON = 1e-5  # epsilon of Chameleon's query and key norms, which no configuration contains


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and conventions of a decoder. `Architecture` describes the fields that are not described here.

    Checkpoints of `recipes/scenes` contain the names of these fields, so the names must not change.

    Args:
        vocab_size: number of codes, for each of which the head computes a logit.
        grid: number of grid rows and columns of the default image.
        prefix: maximum number of positions of a prompt.
        spare_positions: number of rows of the rotary table after an image, for draft nodes after the last cell.
        query_key_norm: whether queries and keys are normalised in each head (Chameleon, Qwen3).
        qkv_bias: whether the projections to queries, keys and values have a bias (Qwen2).
        max_image_tokens: maximum number of tokens of an image (Lumina-mGPT); 0: `grid * grid`.
        grids: rows and columns of the first grid, then of the second grid of codes, for each image size.
        rope_sections: number of pairs that are rotated by time, by row and by column, in this order; the other pairs
            are not rotated. With `rotary="sequence"`, the first number is that of pairs rotated by position; 0: all.
        head_width: width of an attention head (Qwen3); 0: `hidden_size / num_heads`.
        limited_positions: number of rows of `code_limits`, which limit the logits at each position; the last row holds
            for all later positions (Prologue). 0: no limits.
        layer_head_eps: epsilon of layer norms of queries and keys.
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
    rotary: Rotary = "grid"
    rope_style: RopeStyle = "interleaved"
    prefix_rotation: PrefixRotation = "zero"
    spare_positions: int = 64
    input_norm: bool = True
    final_norm: bool = True
    query_key_norm: bool = False
    qkv_bias: bool = False
    head_hidden: int = 0
    max_image_tokens: int = 0
    post_norms: bool = False
    grids: tuple[tuple[int, int, int, int], ...] = ()
    rope_sections: tuple[int, int, int] = (0, 0, 0)
    two_heads: bool = False
    rms_head_norm: bool = False
    head_width: int = 0
    activation: Activation = "silu"
    limited_positions: int = 0
    layer_head_eps: float = HEAD_EPSILON
    conditions: int = 0

    @property
    def head_dim(self) -> int:
        return self.head_width or self.hidden_size // self.num_heads

    @property
    def attention_scale(self) -> float:
        """Factor by which a graph multiplies the products of queries and keys: 1 / sqrt(head_dim), or 1.

        Query weights include a factor that is a power of two, because this multiplication does not round them. If
        queries are normalised, the weights of the norm include the factor.
        """
        scale = self.head_dim**-0.5
        return 1.0 if self.query_key_norm or math.log2(scale).is_integer() else scale

    @property
    def head_norm_eps(self) -> float | None:
        if not self.query_key_norm:
            return None
        return self.norm_eps if self.rms_head_norm else self.layer_head_eps

    @property
    def architecture(self) -> Architecture:
        return Architecture(**{name: getattr(self, name) for name in Architecture.model_fields})

    @property
    def num_logits(self) -> int:
        return self.vocab_size * (1 + self.two_heads)

    @property
    def max_sequence_length(self) -> int:
        return self.prefix + (self.max_image_tokens or self.grid**2) + self.spare_positions

    @property
    def num_rope_positions(self) -> int:
        """Number of position ids: `max_sequence_length` for each image size in `grids`, or each of `conditions`."""
        return self.max_sequence_length * max(1, len(self.grids), self.conditions)

    @property
    def _spec_fields(self) -> dict[str, Any]:
        names = ("hidden_size", "num_layers", "num_kv_heads", "head_dim", "architecture")
        return {name: getattr(self, name) for name in names} | {"vocab_size": self.num_logits}

    def make_target_spec(self) -> DecoderSpec:
        return DecoderSpec(**self._spec_fields, max_positions=self.num_rope_positions)

    def make_drafter_spec(self, **fields: Any) -> DrafterSpec:
        """Return the manifest entry of a drafter; `fields` are those that are not sizes."""
        return DrafterSpec(**self._spec_fields, **fields)


def compute_rope_table(config: DecoderConfig) -> Tensor:
    """Compute the cosines and sines of the rotary embedding, `[positions, head_dim / 2, 2]`.

    With `rotary="grid"`, a cell's row rotates the first half of the pairs, and a cell's column the second half. Pair k
    of each half has the frequency base^(-2k / (head_dim / 2)). With `rotary="sequence"`, pair k is rotated by the
    position, with the frequency base^(-k / n), where n is the number of rotated pairs. `_compute_two_grid_rope_table`
    describes `rotary="grids"`.
    """
    if config.rotary == "learned":
        return torch.zeros(0)
    if config.rotary == "grids":
        return _compute_two_grid_rope_table(config)
    # The device is given because modules are also built on the `meta` device, without weights.
    real: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    first = 0
    coordinates = torch.arange(config.num_rope_positions, **real)[:, None]
    if config.rotary == "grid":
        first = config.prefix
        cells = torch.arange(config.grid, **real)
        coordinates = torch.cartesian_prod(cells, cells)  # [grid * grid, 2]: row, column
    pairs = config.rope_sections[0] or config.head_dim // 2 // coordinates.shape[1]  # pairs per coordinate
    frequencies = torch.arange(pairs, **real) / pairs
    angles = (coordinates[:, :, None] * config.rope_base**-frequencies).flatten(1)
    angles = F.pad(angles, (0, config.head_dim // 2 - angles.shape[1]))
    table = torch.zeros(config.num_rope_positions, config.head_dim // 2, 2, **real)
    if config.prefix_rotation == "identity":
        table[:first, :, 0] = 1
    table[first : first + len(coordinates)] = torch.stack([angles.cos(), angles.sin()], -1)
    return table.float()


def _compute_two_grid_rope_table(config: DecoderConfig) -> Tensor:
    """Compute the rotary table of sequences with two grids, `[positions, head_dim / 2, 2]`.

    Each image size has `config.max_sequence_length` rows of the table. A position has three coordinates: time, row and
    column. In a prompt, all three are equal. A grid that starts at p has the coordinates (p, p + row, p + column). The
    next grid starts at p plus the larger of the grid's numbers of rows and columns. The second grids of all image sizes
    start at the same coordinates; the prompt of the first image size starts at 0. Pair k has the frequency base^(-k /
    n), where n is the number of rotated pairs.
    """
    real: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    sections = torch.tensor(config.rope_sections, device="cpu")
    count = int(sections.sum())
    part = torch.arange(3, device="cpu").repeat_interleave(sections)  # coordinate that each pair is rotated by
    frequencies = config.rope_base ** -(torch.arange(count, **real) / count)
    table = torch.zeros(len(config.grids), config.max_sequence_length, config.head_dim // 2, 2, **real)
    table[..., 0] = 1
    prompt = torch.arange(config.prefix, **real)[:, None].expand(-1, 3)
    second = config.prefix + max(config.grids[0][:2])  # start of all second grids
    for rows, (*first, high, wide) in zip(table, config.grids, strict=True):
        start = second - max(first)
        coordinates = [prompt + start - config.prefix]
        for sides in (first, (high, wide)):
            cells = torch.cartesian_prod(torch.zeros(1, **real), *(torch.arange(side, **real) for side in sides))
            coordinates.append(start + cells)
            start += max(sides)
        angles = torch.cat(coordinates)[:, part] * frequencies  # [prompt and cells, count]
        rows[: len(angles), :count] = torch.stack([angles.cos(), angles.sin()], -1)
    return table.flatten(0, 1).float()


def apply_rope(x: Tensor, rope: Tensor, rope_style: str = "interleaved") -> Tensor:
    """Rotate the pairs of queries or keys `[rows, nodes, heads, head_dim]` by `rope [rows, nodes, head_dim / 2, 2]`.

    A pair are the numbers i and i + head_dim / 2 (`half`), or 2 i and 2 i + 1 (`interleaved`).
    """
    cos = rope[:, :, None, :, 0]
    sin = rope[:, :, None, :, 1]
    if rope_style == "half":
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    even, odd = x.view(*x.shape[:-1], x.shape[-1] // 2, 2).unbind(-1)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).view(x.shape)


class RMSNorm(nn.Module):
    """RMS norm over the last axis. With `heads`, attention heads have different weights."""

    def __init__(self, width: int, eps: float, heads: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(*heads, width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class PerHeadLayerNorm(nn.Module):
    """Layer norm of each attention head; the heads have different weights and biases."""

    def __init__(self, num_heads: int, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_heads, width))
        self.bias = nn.Parameter(torch.zeros(num_heads, width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape[-1:], eps=self.eps) * self.weight + self.bias


def _make_head_norm(config: DecoderConfig, num_heads: int) -> nn.Module:
    if config.rms_head_norm:
        return RMSNorm(config.head_dim, config.norm_eps, (num_heads,))
    return PerHeadLayerNorm(num_heads, config.head_dim, config.layer_head_eps)


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        if config.query_key_norm:
            self.query_norm, self.key_norm = (
                _make_head_norm(config, n) for n in (config.num_heads, config.num_kv_heads)
            )
        heads = config.num_heads + 2 * config.num_kv_heads
        self.qkv = nn.Linear(config.hidden_size, heads * config.head_dim, bias=config.qkv_bias)
        self.out = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)

    def project_qkv(self, x: Tensor, rope: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries, keys and values, each `[rows, nodes, num_heads or num_kv_heads, head_dim]`."""
        config = self.config
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        query, key, value = self.qkv(x).view(*x.shape[:2], sum(heads), config.head_dim).split(heads, 2)
        if config.query_key_norm:
            query = self.query_norm(query)
            key = self.key_norm(key)
        if rope is None:
            return query, key, value
        return apply_rope(query, rope, config.rope_style), apply_rope(key, rope, config.rope_style), value

    def forward(
        self, x: Tensor, rope: Tensor | None, mask: Tensor | None = None, past: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute attention to the past and among the new nodes.

        Args:
            x: normalised hidden states, `[rows, nodes, hidden_size]`.
            rope: cosines and sines, `[rows, nodes, head_dim / 2, 2]`; None: queries and keys are not rotated.
            mask: additive attention mask, `[rows, 1, nodes, past + nodes]`; None: causal attention without a past.
            past: past keys and values, each `[past, rows, num_kv_heads, head_dim]`; empty without a past.

        Returns:
            The output, and the new keys and values `[nodes, rows, num_kv_heads, head_dim]`.
        """
        query, key, value = (heads.transpose(1, 2) for heads in self.project_qkv(x, rope))
        new = [heads.permute(2, 0, 1, 3) for heads in (key, value)]
        if past:
            key, value = (torch.cat(pair).permute(1, 2, 0, 3) for pair in zip(past, new, strict=True))
        grouped = self.config.num_heads != self.config.num_kv_heads
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )
        return self.out(mixed.transpose(1, 2).flatten(2)), new[0], new[1]


class FeedForward(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.activation = config.activation

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        active = F.silu(gate) if self.activation == "silu" else F.gelu(gate, approximate="tanh")
        mixed: Tensor = self.down(active * self.up(x))
        return mixed


class DecoderLayer(nn.Module):
    """Decoder layer: attention and feed-forward network, each with a norm before it and a residual connection."""

    def __init__(self, config: DecoderConfig, input_norm: bool) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps) if input_norm else nn.Identity()
        self.attention = Attention(config)
        self.attention_post_norm = self._make_post_norm(config)
        self.ffn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.ffn = FeedForward(config)
        self.ffn_post_norm = self._make_post_norm(config)

    def _make_post_norm(self, config: DecoderConfig) -> nn.Module:
        return RMSNorm(config.hidden_size, config.norm_eps) if config.post_norms else nn.Identity()

    def forward(
        self, x: Tensor, rope: Tensor, mask: Tensor | None = None, past: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the hidden states, the new keys and the new values; shapes are as in `Attention.forward`."""
        attended, key, value = self.attention(self.attention_norm(x), rope, mask, past)
        x = x + self.attention_post_norm(attended)
        return x + self.ffn_post_norm(self.ffn(self.ffn_norm(x))), key, value


class LayerStack(nn.Module):
    """Layers of a target or drafter, with their rotary table."""

    checkpoint: Checkpoint  # the files that the weights came from
    rope: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(map(self.make_layer, range(config.num_layers)))
        self.register_buffer("rope", compute_rope_table(config), persistent=False)

    def make_spec(self) -> DecoderSizes:
        return self.config.make_drafter_spec()

    def make_layer(self, index: int) -> nn.Module:
        return DecoderLayer(self.config, self.config.input_norm or index > 0)

    def run_layers(
        self, x: Tensor, position_ids: Tensor, mask: Tensor, past: Sequence[Tensor], layers: slice = slice(None)
    ) -> tuple[Tensor, list[Tensor]]:
        """Apply layers to new nodes; arguments and results are those of `Decoder.forward`, without its logits."""
        rope = self.look_up_positions(position_ids)
        new_kv: list[Tensor] = []
        for i, layer in [*enumerate(self.layers)][layers]:
            x, *new = layer(x, rope, mask, past[2 * i : 2 * i + 2])
            new_kv += new
        return x, new_kv

    def look_up_positions(self, position_ids: Tensor) -> Tensor:
        """Look up what layers read besides hidden states: cosines and sines, `[rows, nodes, head_dim / 2, 2]`.

        With two grids and a table of n rows, the position id p + s * n means row p with its three coordinates (time,
        row, column) decreased by s.
        """
        if self.config.rotary != "grids":
            return self.rope[position_ids]
        cos, sin = self.rope[position_ids % len(self.rope)].unbind(-1)
        back_cos, back_sin = self.rope[position_ids // len(self.rope)].unbind(-1)
        return torch.stack([cos * back_cos + sin * back_sin, sin * back_cos - cos * back_sin], -1)

    def bound_projection(self, layer_name: str, rows: Tensor) -> Tensor:
        """Bound the products `[n]` of the rows `[n, hidden_size]` of a matrix with the normalised input of a layer."""
        norm = compute_deferred_tensor(self.get_parameter(f"{layer_name}.attention_norm.weight"))
        largest: Tensor = rows.shape[1] ** 0.5 * torch.linalg.vector_norm(rows * norm, dim=1)
        return largest


class Decoder(LayerStack):
    """Target: decoder layers and an output head that computes the logits of the codes."""

    code_limits: Tensor  # [limited_positions, vocab_size]: the last axis has `EXCLUDED` or `-EXCLUDED`

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.norm: nn.Module = RMSNorm(config.hidden_size, config.norm_eps) if config.final_norm else nn.Identity()
        self.head: Head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.head_hidden:
            self.head = TwoLayerHead(config.hidden_size, config.head_hidden, config.vocab_size)
        if config.two_heads:
            self.head = RightBelowHeads(config.hidden_size, config.vocab_size)
            self.below_norm = RMSNorm(config.hidden_size, config.norm_eps)
        if config.limited_positions:
            self.register_buffer("code_limits", torch.zeros(config.limited_positions, config.vocab_size))

    def make_spec(self) -> DecoderSizes:
        return self.config.make_target_spec()

    def forward(self, embeds: Tensor, position_ids: Tensor, mask: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        """Compute one forward pass over new nodes.

        Args:
            embeds: input embeddings, `[rows, nodes, hidden_size]`.
            position_ids: rows of the rotary table, `[rows, nodes]`.
            mask: additive attention mask, `[rows, 1, nodes, past + nodes]`.
            past: past keys and values of each layer, `[past, rows, num_kv_heads, head_dim]`.

        Returns:
            Logits `[rows, nodes, num_logits]`, hidden states `[rows, nodes, hidden_size]`, and the new keys and values
            of each layer, `[nodes, rows, num_kv_heads, head_dim]`.
        """
        before = len(self.layers) - self.config.two_heads  # the last layer of two heads serves the cell below only
        x, new_kv = self.run_layers(embeds, position_ids, mask, past, slice(before))
        hidden = self.norm(x)
        if not self.config.two_heads:
            return self.limit_logits(self.head(hidden), position_ids), hidden, *new_kv
        x, last_kv = self.run_layers(x, position_ids, mask, past, slice(before, None))
        return self.head(hidden, self.below_norm(x)), hidden, *new_kv, *last_kv

    def limit_logits(self, logits: Tensor, position_ids: Tensor) -> Tensor:
        limited_positions = self.config.limited_positions
        if not limited_positions:
            return logits
        return torch.minimum(logits, self.code_limits[position_ids.clamp(max=limited_positions - 1)])

    def forward_sequences(self, embeds: Tensor) -> Tensor:
        """Compute hidden states of whole sequences, with causal attention and without a cache, for training and checks.

        Both embeddings and hidden states are `[rows, length, hidden_size]`.
        """
        rope = self.rope[None, : embeds.shape[1]]
        for layer in self.layers:
            embeds, *_ = layer(embeds, rope)
        hidden: Tensor = self.norm(embeds)
        return hidden
