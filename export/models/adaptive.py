"""RAR's decoder, whose layers have adaptive norms; `AdaptiveLayers` in `engines/graph_writer.py` describes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoints.deferred import compute_deferred_tensor, defer_tensor
from .decoder import Attention, Decoder, DecoderConfig

_NUM_SAMPLES = 512  # number of pairs of class and position from which the range of normalised inputs is estimated


class GeluFeedForward(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.down(F.gelu(self.up(x)))
        return mixed


class AdaptiveNorm(nn.Module):
    """Layer norm whose shift and scale depend on the condition of a node."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.modulation = nn.Linear(config.hidden_size, 2 * config.hidden_size)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.modulation(condition).chunk(2, -1)
        normed: Tensor = F.layer_norm(x, x.shape[-1:], eps=self.eps) * scale + shift
        return normed


class AdaptiveLayer(nn.Module):
    """Attention and a network with GELU, each with a norm before it and a gate after it, and biases everywhere."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.eps = config.norm_eps
        self.modulation = nn.Linear(width, 6 * width)
        self.attention = Attention(config)
        self.attention.out = nn.Linear(width, width)
        self.ffn = GeluFeedForward(config)

    def forward(
        self, x: Tensor, condition: Tensor, mask: Tensor | None = None, past: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the hidden states, the new keys and the new values; `condition` is `[rows, nodes, hidden_size]`."""
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = self.modulation(condition).chunk(6, -1)
        normed = F.layer_norm(x, x.shape[-1:], eps=self.eps)
        attended, key, value = self.attention(normed * scale + shift, None, mask, past)
        x = x + attended * gate
        normed = F.layer_norm(x, x.shape[-1:], eps=self.eps)
        return x + self.ffn(normed * ffn_scale + ffn_shift) * ffn_gate, key, value


class AdaptiveDecoder(Decoder):
    """Target whose inputs and layers depend on learned vectors of positions and classes."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        positions = config.max_sequence_length
        self.class_vectors = nn.Parameter(torch.randn(config.conditions, width))
        self.step_vectors = nn.Parameter(torch.randn(positions, width))
        self.position_vectors = nn.Parameter(torch.randn(positions, width))
        self.norm = AdaptiveNorm(config)
        self.head = nn.Linear(width, config.vocab_size)

    def make_layer(self, index: int) -> nn.Module:
        return AdaptiveLayer(self.config)

    def look_up_positions(self, position_ids: Tensor) -> Tensor:
        """Look up the condition of each node, `[rows, nodes, hidden_size]`."""
        count = len(self.step_vectors)
        return F.silu(self.class_vectors[position_ids // count] + self.step_vectors[position_ids % count])

    def forward(self, embeds: Tensor, position_ids: Tensor, mask: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        x = embeds + self.position_vectors[position_ids % len(self.position_vectors)]
        x, new_kv = self.run_layers(x, position_ids, mask, past)
        hidden = self.norm(x, self.look_up_positions(position_ids))
        return self.head(hidden), hidden, *new_kv

    def bound_projection(self, layer_name: str, rows: Tensor) -> Tensor:
        """Estimate the bounds from `_NUM_SAMPLES` pairs; graphs clip values beyond them."""
        count = self.config.conditions * len(self.step_vectors)
        ids = torch.arange(_NUM_SAMPLES) * count // _NUM_SAMPLES
        modulation = self.get_submodule(f"{layer_name}.modulation")
        with torch.no_grad():
            shift, scale, *_ = modulation(self.look_up_positions(ids)).float().chunk(6, -1)  # [samples, width]
        width = rows.shape[1]
        largest: Tensor = width**0.5 * (rows.square() @ scale.square().T).sqrt() + (rows @ shift.T).abs()
        return largest.amax(1)  # of [rows, samples]


def fold_norms(matrix: Tensor, bias: Tensor, norms: Sequence[Sequence[Tensor]]) -> tuple[Tensor, Tensor]:
    """Multiply weights and biases of norms into the linear layer that computes their shifts and scales.

    A norm with weight w and bias b gives (n w + b) (1 + scale) + shift. So the new scale is w (1 + scale), and the new
    shift is b (1 + scale) + shift.

    Args:
        matrix: weight of the linear layer, `[outputs, width]`. The outputs are, for each norm, a shift, a scale and
            perhaps a gate, each `[width]`.
        bias: bias of the linear layer, `[outputs]`.
        norms: weight and bias of each norm, `[width]`.

    Returns:
        The new weight, which is deferred, and the new bias, both float32.
    """
    width = matrix.shape[1]

    def fold(outputs: Tensor, one: float) -> Tensor:
        """Fold the norms into `outputs [outputs, any]`; `one` is added to scales."""
        parts = compute_deferred_tensor(outputs).float().view(len(norms), -1, width, outputs[0].numel()).clone()
        for part, (norm_weight, norm_bias) in zip(parts, norms, strict=True):
            scale = part[1] + one
            part[0] += norm_bias.float()[:, None] * scale
            part[1] = norm_weight.float()[:, None] * scale
        return parts.view(outputs.shape)

    return defer_tensor(lambda: fold(matrix, 0.0), matrix.shape, torch.float32), fold(bias, 1.0)
