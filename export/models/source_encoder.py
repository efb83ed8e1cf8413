"""Image encoder of GLM-Image: a vision transformer over patches, whose output is quantised to the nearest codes."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...engines.contracts import TensorSpec
from ...engines.function_tensors import declare_image_tensors
from ..checkpoints.deferred import skip_weight_allocation
from ..checkpoints.files import Config
from ..checkpoints.folders import Checkpoint
from ..graph.graphs import Graph, name_test_cases

_BOTH = ("weight", "bias")
_LAYERS = {
    "norm1": "norm1",
    "norm2": "norm2",
    "qkv": "attn.qkv",
    "proj": "attn.proj",
    "fc1": "mlp.fc1",
    "fc2": "mlp.fc2",
}
# Names of weights in transformers by the names in `SourceImageEncoder`.
_NAMES = {
    "positions": "visual.embeddings.position_embedding.weight",
    "codebook": "vqmodel.quantize.embedding.weight",
    **{f"patch_embed.{part}": f"visual.patch_embed.proj.{part}" for part in _BOTH},
    **{f"quant_conv.{part}": f"vqmodel.quant_conv.{part}" for part in _BOTH},
    **{f"blocks.*.{ours}.{part}": f"visual.blocks.*.{name}.{part}" for ours, name in _LAYERS.items() for part in _BOTH},
}


class SourceImageEncoder(nn.Module):
    """Module of the graph `vq_encoder`, from images to `codes [images, cells]` and the latents before quantisation.

    A patch is a cell of the grid. The learned position embeddings form a square, which is resized to the image's grid.
    Images are normalised by `color_stats`: mean and standard deviation of red, green and blue, 0 .. 1.
    """

    def __init__(
        self,
        width: int,
        num_blocks: int,
        num_heads: int,
        mlp_width: int,
        patch_size: int,
        num_positions: int,
        num_codes: int,
        code_width: int,
        norm_eps: float,
        color_stats: tuple[list[float], list[float]],
    ) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.code_width = code_width
        self.color_stats = color_stats
        self.patch_embed = nn.Conv2d(3, width, patch_size, patch_size)
        self.positions = nn.Parameter(torch.empty(num_positions, width))
        self.blocks = nn.ModuleList(_TransformerBlock(width, num_heads, mlp_width, norm_eps) for _ in range(num_blocks))
        self.quant_conv = nn.Conv2d(width, code_width, 1)
        self.codebook = nn.Parameter(torch.empty(num_codes, code_width))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        mean, deviation = (
            torch.tensor(numbers, dtype=self.positions.dtype)[:, None, None] for numbers in self.color_stats
        )
        x = self.patch_embed(((image + 1) / 2 - mean) / deviation)
        grid = x.shape[2:]
        side = math.isqrt(len(self.positions))
        square = self.positions.T.reshape(1, -1, side, side)
        x = (x + F.interpolate(square, grid, mode="bilinear")).flatten(2).transpose(1, 2)  # [images, cells, width]
        for block in self.blocks:
            x = block(x)
        latents = self.quant_conv(x.transpose(1, 2).unflatten(2, grid))
        cells = F.normalize(latents, dim=1).flatten(2).transpose(1, 2)
        vectors = F.normalize(self.codebook, dim=-1)
        return (cells @ vectors.T).argmax(-1), latents

    def make_graph(self) -> Graph:
        _, image, codes = declare_image_tensors(None)
        latents = TensorSpec("pre_quant", ("float32",), ("images", self.code_width, "rows", "columns"))
        generator = np.random.default_rng(0)
        shapes = [(2, 3, 4 * self.patch_size, 3 * self.patch_size), (1, 3, 2 * self.patch_size, 5 * self.patch_size)]
        cases = name_test_cases(*({"images": generator.uniform(-1, 1, shape).astype(np.float32)} for shape in shapes))
        return Graph("vq_encoder", self, (image,), (codes, latents), cases)


class _TransformerBlock(nn.Module):
    def __init__(self, width: int, num_heads: int, mlp_width: int, norm_eps: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width, norm_eps)
        self.norm2 = nn.LayerNorm(width, norm_eps)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.fc1 = nn.Linear(width, mlp_width)
        self.fc2 = nn.Linear(mlp_width, width)

    def forward(self, x: Tensor) -> Tensor:
        joint = self.qkv(self.norm1(x)).unflatten(2, (3, self.num_heads, -1))
        query, key, value = joint.permute(2, 0, 3, 1, 4)  # each [images, heads, cells, head width]
        mixed = F.scaled_dot_product_attention(query, key, value)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        hidden: Tensor = self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return x + hidden


def load_source_image_encoder(
    checkpoint: Checkpoint, config: Config, color_mean: list[float], color_std: list[float]
) -> SourceImageEncoder:
    """Load the image encoder, whose sizes come from its weights; `config` is the section `vision_config`."""
    config.check_value("hidden_act", "gelu")
    num_codes, code_width = checkpoint.get_shape("vqmodel.quantize.embedding.weight")
    width, _, patch_size, _ = checkpoint.get_shape("visual.patch_embed.proj.weight", 4)
    num_positions, _ = checkpoint.get_shape("visual.embeddings.position_embedding.weight")
    mlp_width, _ = checkpoint.get_shape("visual.blocks.0.mlp.fc1.weight")
    num_heads = config.get_integer("num_heads") or 16  # the default of transformers
    if width % num_heads:
        raise config.make_error("num_heads", expected=f"a divisor of {width}, the width")
    if math.isqrt(num_positions) ** 2 != num_positions:
        name = "visual.embeddings.position_embedding.weight"
        raise checkpoint.make_error(name, expected="a square number of positions")
    num_blocks = checkpoint.count_layers("visual.blocks.")
    with skip_weight_allocation():
        norm_eps = config.get_number("layer_norm_eps", 1e-6)
        sizes = (width, num_blocks, num_heads, mlp_width, patch_size, num_positions, num_codes, code_width)
        encoder = SourceImageEncoder(*sizes, norm_eps, (color_mean, color_std))
    checkpoint.rename_weights(_NAMES)
    checkpoint.weights = {name: weight.float() for name, weight in checkpoint.weights.items()}
    checkpoint.load_module_weights(encoder)
    return encoder
