"""A target and a drafter with random weights, as graph files: what a benchmark needs to know a model's cost.

Does not know what is measured. Building imports torch and onnx.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lantern_rt.bundle.manifest import DecoderSpec, DrafterSpec

if TYPE_CHECKING:
    from lantern_rt.export.models.decoder import DecoderConfig

# How much a layer adds to what enters it, and how well the drafter reads its token: random weights whose
# drafter is right about as often as a trained one, so that every path of the decode loop is walked.
LAYER_GAIN, DRAFTER_NOISE, LOGIT_SPREAD = 0.02, 0.3, 4.0


@dataclass(frozen=True)
class Shapes:
    """Sizes of the random model, and how much of it to run."""

    name: str
    width: int
    layers: int
    heads: int
    intermediate_size: int
    vocabulary: int
    grid: int
    nodes: tuple[int, ...]
    pasts: tuple[int, ...]
    repeats: int
    codes: int  # decoded per image; short, so that a decode takes seconds and not minutes
    neighbors: int
    trees: tuple[tuple[str, str], ...]  # method and tree
    bandwidth_bytes: int
    images: int  # per method on the bundle


LLAMAGEN_B = Shapes(
    name="LlamaGen-B",
    width=768,
    layers=12,
    heads=12,
    intermediate_size=2048,
    vocabulary=16384,
    grid=16,
    nodes=(1, 2, 4, 8, 16, 32, 60),
    pasts=(128, 256),
    repeats=15,
    codes=256,
    neighbors=1000,
    trees=(
        ("ar", ""),
        ("eagle", "chain-3"),
        ("eagle", "dynamic-59"),
        ("lantern", "dynamic-8-4-2"),
        ("lantern", "dynamic-59"),
        ("lantern++", "chain-4"),
        ("lantern++", "balanced-25"),
    ),
    bandwidth_bytes=1 << 28,
    images=4,
)
LLAMAGEN_XL = replace(LLAMAGEN_B, name="LlamaGen-XL", width=1280, layers=36, heads=20, intermediate_size=3584)
LLAMAGEN_3B = replace(LLAMAGEN_B, name="LlamaGen-3B", width=3200, layers=24, heads=32, intermediate_size=8704)
SMOKE = Shapes(
    name="tiny",
    width=64,
    layers=2,
    heads=4,
    intermediate_size=128,
    vocabulary=256,
    grid=4,
    nodes=(1, 2, 4),
    pasts=(8,),
    repeats=2,
    codes=12,
    neighbors=16,
    trees=(("ar", ""), ("eagle", "chain-3"), ("lantern", "dynamic-8-4-2"), ("lantern++", "chain-4")),
    bandwidth_bytes=1 << 24,
    images=1,
)


@dataclass(frozen=True)
class RandomModel:
    """Graph files of a random target and its drafter, their sizes, and the bytes that a pass must read."""

    target: Path
    drafter: Path
    drafter_int8: Path  # its matrices as blocks of 8-bit integers, its head not
    target_spec: DecoderSpec
    drafter_spec: DrafterSpec
    code_embeddings: np.ndarray
    target_bytes: int
    drafter_bytes: int


def build_random_model(shapes: Shapes, folder: Path, compute: Literal["float32", "float16"] = "float32") -> RandomModel:
    """Write the graphs, to compute in float32 or in float16; imports torch and onnx."""
    import torch

    from lantern_rt.export.graph.graphs import in_half, target_graph, write_graph
    from lantern_rt.export.models.decoder import Decoder, DecoderConfig
    from lantern_rt.export.models.eagle import EagleDrafter, drafter_graph

    torch.manual_seed(0)
    config = DecoderConfig(
        shapes.width,
        shapes.layers,
        shapes.heads,
        shapes.heads,
        shapes.intermediate_size,
        shapes.vocabulary,
        shapes.grid,
        prefix=1,
    )
    target = Decoder(config)
    drafter = EagleDrafter(
        replace(config, num_layers=1, prefix=0, input_norm=False, final_norm=False), target.head, bias=True
    )
    with torch.no_grad():
        for module in (target, drafter):
            for name, weight in module.named_parameters():
                if weight.ndim == 2 and name.endswith(("out.weight", "down.weight")):
                    weight.mul_(LAYER_GAIN)
        target.head.weight.normal_(std=LOGIT_SPREAD / shapes.width**0.5)
        code_embeddings = torch.randn(shapes.vocabulary, shapes.width)
        drafter.embed.weight.copy_(code_embeddings)
        drafter.fc.bias.zero_()
        drafter.fc.weight.normal_(std=DRAFTER_NOISE / (2 * shapes.width) ** 0.5)
        drafter.fc.weight[:, : shapes.width] += torch.eye(shapes.width)
    graphs = [target_graph(target, code_embeddings), drafter_graph(drafter)]
    if compute == "float16":
        graphs = [in_half(graph) for graph in graphs]
    (target_file, *_), (drafter_file, *_) = (write_graph(graph, folder) for graph in graphs)
    (folder / "int8").mkdir()
    drafter_int8, *_ = write_graph(drafter_graph(drafter), folder / "int8", "int8-weights")
    number = 2 if compute == "float16" else 4
    target_bytes = number * _matrix_numbers(target)
    drafter_bytes = number * (_matrix_numbers(drafter) - drafter.embed.weight.numel())  # few rows of the table are read
    return RandomModel(
        target_file,
        drafter_file,
        drafter_int8,
        DecoderSpec(**_sizes(config), dtype=compute),
        DrafterSpec(**_sizes(drafter.config)),
        code_embeddings.numpy(),
        target_bytes,
        drafter_bytes,
    )


def _sizes(config: DecoderConfig) -> dict[str, Any]:
    fields = {
        name: getattr(config, name) for name in ("hidden_size", "num_layers", "num_kv_heads", "head_dim", "vocab_size")
    }
    return fields if config.input_norm is False else fields | {"max_positions": config.positions}


def _matrix_numbers(module: Any) -> int:
    return sum(weight.numel() for weight in module.parameters() if weight.ndim == 2)
