"""Tiny torch modules with the inputs and outputs of the graphs in a bundle, and their export to ONNX."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from lantern_rt.export.graph.graphs import Graph, make_graph_file
from lantern_rt.export.graph.precision import StorageRule
from lantern_rt.export.models.adaptive import AdaptiveDecoder
from lantern_rt.export.models.decoder import Decoder, DecoderConfig
from lantern_rt.export.models.eagle import EagleDrafter

TINY_CONFIG = DecoderConfig(
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=96,
    vocab_size=48,
    grid=8,
    prefix=4,
    prefix_rotation="identity",
)


ADAPTIVE_CONFIG = replace(
    TINY_CONFIG, rotary="learned", conditions=3, query_key_norm=True, qkv_bias=True, final_norm=False
)


def make_decoder(config: DecoderConfig) -> Decoder:
    return (AdaptiveDecoder if config.conditions else Decoder)(config).eval()


def write_graph(graph: Graph, folder: Path, storage_rule: StorageRule = "fp32") -> Path:
    path = folder / f"{graph.role}.onnx"
    make_graph_file(graph, storage_rule).write(path)
    return path


def make_tiny_drafter(config: DecoderConfig = TINY_CONFIG) -> EagleDrafter:
    head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    return EagleDrafter(replace(config, final_norm=False), head, bias=True).eval()


class TinyImageDecoder(nn.Module):
    """Module that decodes codes to images; each code becomes 2 x 2 pixels."""

    def __init__(self, codes: int, grid: int) -> None:
        super().__init__()
        self.grid = grid
        self.colors = nn.Embedding(codes, 12)

    def forward(self, codes: Tensor) -> Tensor:
        cells = self.colors(codes).tanh().view(-1, self.grid, self.grid, 12).permute(0, 3, 1, 2)
        images: Tensor = nn.functional.pixel_shuffle(cells, 2)
        return images


def export_graph(
    module: nn.Module,
    inputs: dict[str, Tensor],
    outputs: Iterable[str],
    dynamic_axes: dict[str, dict[int, str]],
    path: Path,
) -> None:
    """Write a module as an ONNX graph with the tracing exporter of PyTorch, which is fast."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(),
            tuple(inputs.values()),
            str(path),
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_axes=dynamic_axes,
            opset_version=18,
            dynamo=False,
        )
