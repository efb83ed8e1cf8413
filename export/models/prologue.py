"""Networks of Prologue: its image decoder, and the constants that its layers compute from a condition.

Norms and gates of the published layers depend on a condition, which is always that of no class. `read_folded_sizes`
puts the constants into the weights, which then are those of `DecoderLayer`.
"""

from __future__ import annotations

from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...engines.contracts import Progress
from ...engines.function_tensors import declare_image_tensors
from ..checkpoints.deferred import compute_deferred_tensor, defer_concatenation, defer_tensor, skip_weight_allocation
from ..checkpoints.files import Config
from ..checkpoints.folders import Checkpoint
from ..graph.graphs import Graph, name_test_cases
from .decoder import Attention, DecoderConfig, FeedForward, RMSNorm, compute_rope_table
from .llama import read_layer_sizes

_NORM_EPS = 1e-12  # the published norms have none, and give 0 for a vector of zeros
# Averages over training, which the published program uses.
_CODEBOOKS = "model_2.safetensors"
_DECODER = "model_3.safetensors"
_QUANTIZERS = ("quantizer", "semantic_quantizer")  # of the image's codes, and of the prologue's
_KINDS = ("weight", "bias")
_LAYER_NAMES = {
    "attention_norm": "adaln_1.affine",
    "attention_gate": "gate1",
    "attention.query": "attn1.to_q",
    "attention.key_value": "attn1.to_kv",
    "attention.query_norm": "attn1.q_norm",
    "attention.key_norm": "attn1.k_norm",
    "attention.out": "attn1.proj",
    "ffn_norm": "adaln_mlp.affine",
    "ffn_gate": "gate_mlp",
    "ffn.up_gate": "ffn.fc1",
    "ffn.down": "ffn.fc2",
}
_NAMES = {f"layers.*.{ours}": f"layers.*.{theirs}" for ours, theirs in _LAYER_NAMES.items()}
_NAMES |= {"norm": "out_norm.affine", "head": "out", "input_layer": "input_layer"}
_NAMES |= {f"condition.{i}": f"cond_proj.{i}" for i in range(2)}


def read_folded_sizes(
    checkpoint: Checkpoint, prefix: str, settings: Config, rotated: str, published: int
) -> dict[str, Any]:
    """Rename the weights of a transformer, fold its condition, and return fields of `DecoderConfig`.

    `rotated` is the field of how many numbers of a head a coordinate rotates, `published` of 64 in published models.
    """
    checkpoint.rename_weights({f"{ours}.{k}": f"{prefix}{name}.{k}" for ours, name in _NAMES.items() for k in _KINDS})
    weights = checkpoint.weights

    def pop(name: str, num_dimensions: int = 1) -> Tensor:
        checkpoint.get_shape(name, num_dimensions)  # raises an error for a missing weight or another shape
        return weights.pop(name)

    no_class = pop("condition.0.weight", 2)[:, -1].float() + pop("condition.0.bias")
    normed = F.normalize(no_class, dim=0) * len(no_class) ** 0.5
    condition = F.gelu(normed * (1 + pop("condition.1.weight").float()), approximate="tanh")

    def modulate(name: str) -> Tensor:
        product = pop(f"{name}.weight", 2).float() @ condition
        return product + pop(f"{name}.bias") if f"{name}.bias" in weights else product

    width, head_dim = checkpoint.get_shape("head.weight")[1], 0
    for i in range(checkpoint.count_layers("layers.")):
        at = f"layers.{i}."
        for part, output in (("attention", "attention.out"), ("ffn", "ffn.down")):
            weights[f"{at}{part}_norm.weight"] = 1 + modulate(f"{at}{part}_norm")
            gate = modulate(f"{at}{part}_gate")
            for name in weights.keys() & {f"{at}{output}.{kind}" for kind in _KINDS}:
                weights[name] = _multiply_rows(weights[name], gate)
        for kind in ("query", "key"):
            norm = 1 + pop(f"{at}attention.{kind}_norm.weight").float()
            head_dim = len(norm)
            weights[f"{at}attention.{kind}_norm.weight"] = norm.repeat(width // head_dim, 1)
        parts = [pop(f"{at}attention.{part}.weight", 2) for part in ("query", "key_value")]
        weights[f"{at}attention.qkv.weight"] = defer_concatenation(parts)
        for name in weights.keys() & {f"{at}ffn.up_gate.{kind}" for kind in _KINDS}:
            halves = weights.pop(name).chunk(2)
            weights |= zip((name.replace("up_gate", "up"), name.replace("up_gate", "gate")), halves, strict=True)
    weights["norm.weight"] = 1 + modulate("norm")
    sizes = read_layer_sizes(checkpoint, settings, width // max(1, head_dim), head_dim_multiple=2)
    numbers = settings.get_integer(rotated) or (published if head_dim == 64 else 0)
    if not 0 < numbers <= head_dim or numbers % 2:
        expected = f"an even number of the {head_dim} numbers of a head"
        raise settings.make_error(rotated, expected=expected, remedy="give it in a JSON file, as --config")
    pairs = numbers // 2
    return {**sizes, "rope_sections": (pairs, pairs, 0), "norm_eps": _NORM_EPS, "activation": "gelu-tanh"}


def _multiply_rows(weight: Tensor, factors: Tensor) -> Tensor:
    return defer_tensor(lambda: (compute_deferred_tensor(weight).float().T * factors).T, weight.shape, torch.float32)


class _ScaledNorm(RMSNorm):
    """RMS norm whose squares are at most 1, so that they do not overflow in float16."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / (x.abs().amax(-1, keepdim=True) + 1e-6))


class _PatchLayer(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.attention_norm, self.ffn_norm = (_ScaledNorm(width, config.norm_eps) for _ in range(2))
        self.attention = Attention(config)
        self.attention.out = nn.Linear(width, width)
        self.ffn = FeedForward(config)
        self.ffn.gate, self.ffn.up = (nn.Linear(width, config.intermediate_size) for _ in range(2))
        self.ffn.down = nn.Linear(config.intermediate_size, width)
        self.scale = config.head_dim**-0.5

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        joint = self.attention.project_qkv(self.attention_norm(x), rope)
        query, key, value = (heads.transpose(1, 2) for heads in joint)
        mixed = torch.softmax(query @ key.transpose(2, 3) * self.scale, -1) @ value
        x = x + self.attention.out(mixed.transpose(1, 2).flatten(2))
        changed: Tensor = x + self.ffn(self.ffn_norm(x))
        return changed


class PatchDecoder(nn.Module):
    """Module of the graph `vq_decoder`: a transformer in which every cell attends to all, and gives a patch of pixels.

    Codes are `[images, cells]`, images `[images, 3, height, width]`.
    """

    checkpoint: Checkpoint
    rope: Tensor

    def __init__(self, config: DecoderConfig, code_width: int, patch: int) -> None:
        super().__init__()
        self.config = config
        self.patch = patch
        self.codebook = nn.Embedding(config.vocab_size, code_width)
        self.input_layer = nn.Linear(code_width, config.hidden_size)
        self.layers = nn.ModuleList(map(_PatchLayer, [config] * config.num_layers))
        self.norm = _ScaledNorm(config.hidden_size, config.norm_eps)
        self.head = nn.Linear(config.hidden_size, 3 * patch**2)  # rows, columns and colours of a patch
        self.register_buffer("rope", torch.zeros(config.grid**2, config.head_dim // 2, 2))

    def forward(self, codes: Tensor) -> Tensor:
        x = self.input_layer(self.codebook(codes))
        for layer in self.layers:
            x = layer(x, self.rope[None])
        grid = self.config.grid
        patches: Tensor = self.head(self.norm(x)).view(-1, grid, grid, self.patch, self.patch, 3)
        return patches.permute(0, 5, 1, 3, 2, 4).reshape(-1, 3, grid * self.patch, grid * self.patch)

    def make_graph(self) -> Graph:
        cells = self.config.grid**2
        pixels = self.config.grid * self.patch
        codes, images, _ = declare_image_tensors(cells, pixels, pixels)
        generator = np.random.default_rng(0)
        numbers = (generator.integers(self.config.vocab_size, size=(count, cells)) for count in (2, 1))
        return Graph("vq_decoder", self, (codes,), (images,), name_test_cases(*({"codes": n} for n in numbers)))


def read_prologue_tokenizer(folder: Path, progress: Progress, settings: Config) -> tuple[PatchDecoder, int, int]:
    """Read the image decoder, and return it with the number of codes of a prologue, and of codes to choose from.

    The decoder has vectors of the image's codes, the prologue's codes, and the end mark.
    """
    codebooks = Checkpoint(folder / _CODEBOOKS, "vq", progress)
    codebooks.read_weights(name_filter=lambda name: name.startswith(_QUANTIZERS))
    cells, length = (codebooks.get_shape(f"{kind}.pos_select_mask")[0] for kind in _QUANTIZERS)
    (visual, code_width), (others, _) = (codebooks.get_shape(f"{kind}.embedding.weight") for kind in _QUANTIZERS)
    checkpoint = Checkpoint(folder / _DECODER, "vq", progress)
    checkpoint.read_weights()
    checkpoint.sources = [*codebooks.sources, *checkpoint.sources]
    sizes = read_folded_sizes(checkpoint, "dec.", settings, "rotated_by_row", published=20)  # and as many by column
    sizes |= {"vocab_size": visual + others + 1, "grid": isqrt(cells), "rope_base": 2000.0}
    config = DecoderConfig(**sizes, prefix=0, spare_positions=0)
    with skip_weight_allocation():
        decoder = PatchDecoder(config, code_width, isqrt(checkpoint.get_shape("head.weight")[0] // 3))
    vectors = [codebooks.weights[f"{kind}.embedding.weight"] for kind in _QUANTIZERS]
    table = F.normalize(torch.cat([*vectors, torch.zeros(1, code_width)]).float(), dim=-1)
    checkpoint.weights |= {"codebook.weight": table, "rope": compute_rope_table(config)}
    # The module is traced, and the tracer would take deferred tensors of one shape for the same tensor.
    checkpoint.weights = {name: compute_deferred_tensor(w).float() for name, w in checkpoint.weights.items()}
    checkpoint.load_module_weights(decoder)
    return decoder, length, others
