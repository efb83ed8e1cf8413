"""Networks of Prologue: its image tokenizer, and the constants that its layers compute from a condition.

Norms and gates of the published layers depend on a condition, which is always that of no class. `read_folded_sizes`
puts the constants into the weights, which then are those of `DecoderLayer`.
"""

from __future__ import annotations

from functools import partial
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...engines.contracts import Progress, TensorSpec
from ...engines.function_tensors import declare_image_tensors
from ..checkpoints.deferred import compute_deferred_tensor, defer_concatenation, defer_tensor, skip_weight_allocation
from ..checkpoints.files import Config
from ..checkpoints.folders import Checkpoint
from ..graph.graphs import Graph, name_test_cases
from .decoder import Attention, DecoderConfig, FeedForward, RMSNorm, compute_rope_table
from .llama import read_layer_sizes

_NORM_EPS = 1e-12  # the published norms have none, and give 0 for a vector of zeros
# Averages over training, which the published program uses.
_ENCODER = "model_2.safetensors"
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
# How many of 64 numbers of a head a coordinate rotates in published models, and how many coordinates there are, by the
# field of a JSON file.
_ROTATED = {"rotated_by_position": (24, 1), "rotated_by_row": (20, 2)}


def read_folded_sizes(checkpoint: Checkpoint, prefix: str, settings: Config, rotated: str) -> dict[str, Any]:
    """Rename the weights of a transformer, fold its condition, and return fields of `DecoderConfig`.

    `rotated` is the field of a JSON file for how many numbers of a head a coordinate rotates.
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

    width, head_dim = checkpoint.get_shape("layers.0.attention.out.weight")[0], 0
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
    if "head.weight" in weights:
        weights["norm.weight"] = 1 + modulate("norm")
    sizes = read_layer_sizes(checkpoint, settings, width // max(1, head_dim), head_dim_multiple=2)
    published, coordinates = _ROTATED[rotated]
    numbers = settings.get_integer(rotated) or (published if head_dim == 64 else 0)
    if not 0 < numbers <= head_dim // coordinates or numbers % 2:
        expected = f"an even number up to {head_dim // coordinates}"
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


class _PatchTransformer(nn.Module):
    """Transformer in which every cell attends to all. Images are `[images, 3, height, width]`."""

    checkpoint: Checkpoint
    rope: Tensor

    def __init__(self, config: DecoderConfig, patch: int, code_width: int, input_width: int, length: int) -> None:
        super().__init__()
        self.config = config
        self.patch = patch
        self.length = length  # number of codes of a prologue that the layers also run over
        self.codebook = nn.Embedding(config.vocab_size, code_width)
        self.input_layer = nn.Linear(input_width, config.hidden_size)
        self.layers = nn.ModuleList(map(_PatchLayer, [config] * config.num_layers))
        self.register_buffer("rope", torch.zeros(config.grid**2 + length, config.head_dim // 2, 2))

    def run_layers(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.rope[None])
        return x

    def compute_rope(self) -> Tensor:
        """Compute the rotary table: cells, then the prologue, whose codes rotate the pairs that cells do not."""
        first = 2 * self.config.rope_sections[0]
        pairs = self.config.head_dim // 2 - first
        frequencies = 10000.0 ** -(torch.arange(pairs, dtype=torch.float64) / max(1, pairs))
        angles = F.pad(torch.arange(self.length)[:, None] * frequencies, (first, 0))
        return torch.cat([compute_rope_table(self.config), torch.stack([angles.cos(), angles.sin()], -1).float()])


class PatchDecoder(_PatchTransformer):
    """Module of the graph `vq_decoder`, from codes `[images, cells]` to images; a cell gives a patch of pixels."""

    def __init__(self, config: DecoderConfig, patch: int, code_width: int) -> None:
        super().__init__(config, patch, code_width, code_width, 0)
        self.norm = _ScaledNorm(config.hidden_size, config.norm_eps)
        self.head = nn.Linear(config.hidden_size, 3 * patch**2)  # rows, columns and colours of a patch

    def forward(self, codes: Tensor) -> Tensor:
        x = self.run_layers(self.input_layer(self.codebook(codes)))
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


class PatchEncoder(_PatchTransformer):
    """Module of the graph `vq_encoder`, from images to all codes of a sequence, and to latents of the image's cells."""

    def __init__(self, config: DecoderConfig, patch: int, code_width: int, length: int, visual: int) -> None:
        super().__init__(config, patch, code_width, 3 * patch**2, length)
        self.num_visual_codes = visual
        self.queries = nn.Parameter(torch.empty(1, length, config.hidden_size))  # learned inputs of the prologue
        self.to_visual, self.to_prologue = (nn.Linear(config.hidden_size, code_width) for _ in range(2))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        grid = self.config.grid
        visual = self.num_visual_codes
        patches = images.view(-1, 3, grid, self.patch, grid, self.patch).permute(0, 2, 4, 3, 5, 1)
        x = self.input_layer(patches.reshape(-1, grid**2, 3 * self.patch**2))
        x = self.run_layers(torch.cat([x, self.queries.expand(x.shape[0], -1, -1)], 1))
        latents = self.to_visual(x[:, : grid**2])
        vectors = self.codebook.weight
        codes = (latents @ vectors[:visual].T).argmax(-1)
        prologue = visual + (self.to_prologue(x[:, grid**2 :]) @ vectors[visual:-1].T).argmax(-1)
        end = torch.full_like(codes[:, :1], len(vectors) - 1)
        return torch.cat([prologue, end, codes], 1), latents.transpose(1, 2).unflatten(2, (grid, grid))

    def make_graph(self) -> Graph:
        grid = self.config.grid
        pixels = grid * self.patch
        _, images, codes = declare_image_tensors(grid**2, pixels, pixels, first_codes=self.length + 1)
        latents = TensorSpec("pre_quant", ("float32",), ("images", self.codebook.embedding_dim, grid, grid))
        generator = np.random.default_rng(0)
        numbers = (generator.uniform(-1, 1, (count, 3, pixels, pixels)).astype(np.float32) for count in (2, 1))
        cases = name_test_cases(*({"images": n} for n in numbers))
        return Graph("vq_encoder", self, (images,), (codes, latents), cases)


def read_prologue_tokenizer(folder: Path, progress: Progress, settings: Config) -> tuple[PatchDecoder, PatchEncoder]:
    """Read the image tokenizer. Its vectors are those of the image's codes, the prologue's codes, and the end mark."""
    encoder_files, decoder_files = (Checkpoint(folder / name, "vq", progress) for name in (_ENCODER, _DECODER))
    for checkpoint in (encoder_files, decoder_files):
        checkpoint.read_weights()
    cells, length = (encoder_files.get_shape(f"{kind}.pos_select_mask")[0] for kind in _QUANTIZERS)
    (visual, code_width), _ = (encoder_files.get_shape(f"{kind}.embedding.weight") for kind in _QUANTIZERS)
    vectors = [encoder_files.weights.pop(f"{kind}.embedding.weight") for kind in _QUANTIZERS]
    table = F.normalize(torch.cat([*vectors, torch.zeros(1, code_width)]).float(), dim=-1)
    for kind, name in zip(_QUANTIZERS, ("to_visual", "to_prologue"), strict=True):
        del encoder_files.weights[f"{kind}.pos_select_mask"]
        encoder_files.rename_weights({f"{name}.{part}": f"{kind}.proj_in.{part}" for part in _KINDS})
    encoder_files.rename_weights({"queries": "enc.learnable_query"})
    make_config = partial(
        DecoderConfig, vocab_size=len(table), grid=isqrt(cells), rope_base=2000.0, prefix=0, spare_positions=0
    )
    encoder_config, decoder_config = (
        make_config(**read_folded_sizes(checkpoint, prefix, settings, "rotated_by_row"))
        for checkpoint, prefix in ((encoder_files, "enc."), (decoder_files, "dec."))
    )
    patch = isqrt(decoder_files.get_shape("head.weight")[0] // 3)
    with skip_weight_allocation():
        encoder = PatchEncoder(encoder_config, patch, code_width, length, visual)
        decoder = PatchDecoder(decoder_config, patch, code_width)
    for module, checkpoint in ((encoder, encoder_files), (decoder, decoder_files)):
        checkpoint.weights |= {"codebook.weight": table, "rope": module.compute_rope()}
        # The module is traced, and the tracer would take deferred tensors of one shape for the same tensor.
        checkpoint.weights = {name: compute_deferred_tensor(w).float() for name, w in checkpoint.weights.items()}
        checkpoint.load_module_weights(module)
    return decoder, encoder
