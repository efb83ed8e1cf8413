"""The image encoder of GLM-Image: a vision transformer over patches, then the code nearest to each state."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoints.deferred import without_weights
from ..checkpoints.files import Config
from ..checkpoints.folders import Checkpoint
from ..graph.graphs import Graph, named_cases
from ..graph.onnx_ops import Value

_BOTH = ("weight", "bias")
_LAYERS = {
    "norm1": "norm1",
    "norm2": "norm2",
    "qkv": "attn.qkv",
    "proj": "attn.proj",
    "fc1": "mlp.fc1",
    "fc2": "mlp.fc2",
}
# names of transformers by the names here
_NAMES = {
    "positions": "visual.embeddings.position_embedding.weight",
    "codebook": "vqmodel.quantize.embedding.weight",
    **{f"patch_embed.{part}": f"visual.patch_embed.proj.{part}" for part in _BOTH},
    **{f"quant_conv.{part}": f"vqmodel.quant_conv.{part}" for part in _BOTH},
    **{f"blocks.*.{ours}.{part}": f"visual.blocks.*.{name}.{part}" for ours, name in _LAYERS.items() for part in _BOTH},
}


class SourceEncoder(nn.Module):
    """Module of the graph `vq_encoder`, from images to `codes [images, cells]` and the latents before quantisation.

    Args:
        width: width of the states.
        depth: number of blocks.
        heads: number of attention heads.
        hidden: width of the hidden layers of feed-forward networks.
        patch: pixels along each side of a patch, which is a cell.
        places: number of learned positions, of a square that is scaled to the grid of the image.
        codes: number of codes.
        code_width: width of the codes.
        epsilon: epsilon of the norms.
        colours: mean and standard deviation of red, green and blue, 0 .. 1, by which images are normalised.
    """

    def __init__(
        self,
        width: int,
        depth: int,
        heads: int,
        hidden: int,
        patch: int,
        places: int,
        codes: int,
        code_width: int,
        epsilon: float,
        colours: tuple[list[float], list[float]],
    ) -> None:
        super().__init__()
        self.patch = patch
        self.code_width = code_width
        self.colours = colours
        self.patch_embed = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(torch.empty(places, width))
        self.blocks = nn.ModuleList(_Block(width, heads, hidden, epsilon) for _ in range(depth))
        self.quant_conv = nn.Conv2d(width, code_width, 1)
        self.codebook = nn.Parameter(torch.empty(codes, code_width))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        mean, deviation = (torch.tensor(numbers, dtype=self.positions.dtype)[:, None, None] for numbers in self.colours)
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
        """Return the graph of the encoder, for images of any size."""
        image = Value("images", ("images", 3, "height", "width"))
        latents = Value("pre_quant", ("images", self.code_width, "rows", "columns"))
        generator = np.random.default_rng(0)
        shapes = [(2, 3, 4 * self.patch, 3 * self.patch), (1, 3, 2 * self.patch, 5 * self.patch)]
        cases = named_cases(*({"images": generator.uniform(-1, 1, shape).astype(np.float32)} for shape in shapes))
        codes = Value("codes", ("images", "cells"), "int64")
        return Graph("vq_encoder", self, (image,), (codes, latents), cases)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, epsilon: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, epsilon)
        self.norm2 = nn.LayerNorm(width, epsilon)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        joint = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1))
        query, key, value = joint.permute(2, 0, 3, 1, 4)  # each [images, heads, cells, head width]
        mixed = F.scaled_dot_product_attention(query, key, value)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        hidden: Tensor = self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return x + hidden


def load_source_encoder(
    checkpoint: Checkpoint, config: Config, mean: list[float], deviation: list[float]
) -> SourceEncoder:
    """Load the encoder, with sizes from the shapes and names of its weights.

    Args:
        checkpoint: weights `visual.*` and `vqmodel.*`, without the weights of the decoder.
        config: the section `vision_config` of config.json.
        mean: mean of red, green and blue, 0 .. 1.
        deviation: their standard deviation.

    Raises:
        CheckpointError: weights are missing, unexpected or of another shape, or a setting does not fit.
    """
    config.expect("hidden_act", "gelu")
    codes, code_width = checkpoint.shape("vqmodel.quantize.embedding.weight")
    width, _, patch, _ = checkpoint.shape("visual.patch_embed.proj.weight", 4)
    places, _ = checkpoint.shape("visual.embeddings.position_embedding.weight")
    hidden, _ = checkpoint.shape("visual.blocks.0.mlp.fc1.weight")
    heads = config.integer("num_heads") or 1
    if width % heads:
        raise config.error("num_heads", expected=f"a divisor of {width}, the width")
    if math.isqrt(places) ** 2 != places:
        raise checkpoint.error("visual.embeddings.position_embedding.weight", expected="the positions of a square")
    depth = checkpoint.count("visual.blocks.")
    with without_weights():
        epsilon = config.number("layer_norm_eps", 1e-6)
        sizes = (width, depth, heads, hidden, patch, places, codes, code_width)
        encoder = SourceEncoder(*sizes, epsilon, (mean, deviation))
    checkpoint.rename(_NAMES)
    checkpoint.weights = {name: weight.float() for name, weight in checkpoint.weights.items()}
    checkpoint.load_strict(encoder)
    return encoder
