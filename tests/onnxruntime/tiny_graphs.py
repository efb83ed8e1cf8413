"""Tiny graphs of the bundle's contracts, exported from the torch modules they are compared with."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from lantern_rt.export.models.decoder import Decoder, DecoderConfig

TINY = DecoderConfig(
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


class TargetGraph(nn.Module):
    """A decoder with the flat inputs and outputs of `target.onnx`."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, embeds: Tensor, positions: Tensor, mask: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = self.decoder(embeds, positions, mask, *past)
        return found


class DrafterGraph(TargetGraph):
    """A decoder over a map of token embedding and hidden state, as `drafter.onnx`."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder)
        width = decoder.config.hidden_size
        self.embedding = nn.Embedding(decoder.config.vocab_size, width)
        self.join = nn.Linear(2 * width, width)

    def rows(self, ids: Tensor, hidden: Tensor) -> Tensor:
        joined: Tensor = self.join(torch.cat([self.embedding(ids), hidden], -1))
        return joined

    def forward(self, ids: Tensor, hidden: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return super().forward(self.rows(ids, hidden), *rest)


class ClassTable(nn.Module):
    """Class ids to prefix rows."""

    def __init__(self, classes: int, prefix: int, width: int) -> None:
        super().__init__()
        self.shape = (-1, prefix, width)
        self.table = nn.Embedding(classes + 1, prefix * width)

    def forward(self, class_ids: Tensor) -> tuple[Tensor, Tensor]:
        none = torch.full_like(class_ids, self.table.num_embeddings - 1)
        return self.table(class_ids).view(self.shape), self.table(none).view(self.shape)


class Painter(nn.Module):
    """Codes to images, two pixels a cell."""

    def __init__(self, codes: int, grid: int) -> None:
        super().__init__()
        self.grid = grid
        self.colors = nn.Embedding(codes, 12)

    def forward(self, codes: Tensor) -> Tensor:
        cells = self.colors(codes).tanh().view(-1, self.grid, self.grid, 12).permute(0, 3, 1, 2)
        images: Tensor = nn.functional.pixel_shuffle(cells, 2)
        return images


def export_decoder(module: TargetGraph, path: Path) -> None:
    """Write a target or drafter graph."""
    config = module.decoder.config
    rows, nodes, past = 2, 3, 5
    names = [f"key_values.{i}.{part}" for i in range(config.num_layers) for part in ("key", "value")]
    ids, embeds = torch.zeros(rows, nodes, dtype=torch.int64), torch.zeros(rows, nodes, config.hidden_size)
    first = (
        {"input_ids": ids, "target_hidden": embeds} if isinstance(module, DrafterGraph) else {"input_embeds": embeds}
    )
    inputs = first | {"position_ids": ids, "attention_mask": torch.zeros(rows, 1, nodes, past + nodes)}
    inputs |= {f"past_{name}": torch.zeros(past, rows, config.num_kv_heads, config.head_dim) for name in names}
    outputs = ["logits", "hidden_states", *(f"new_{name}" for name in names)]
    free = {name: {0: "rows", 1: "nodes"} for name in [*first, "position_ids", *outputs[:2]]}
    free["attention_mask"] = {0: "rows", 2: "nodes", 3: "columns"}
    free |= {f"past_{name}": {0: "past", 1: "rows"} for name in names}
    free |= {f"new_{name}": {0: "nodes", 1: "rows"} for name in names}
    export(module, inputs, outputs, free, path)


def export(
    module: nn.Module, inputs: dict[str, Tensor], outputs: Iterable[str], free: dict[str, dict[int, str]], path: Path
) -> None:
    """Write a graph with the exporter that traces: quick, and enough for test graphs."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(),
            tuple(inputs.values()),
            str(path),
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_axes=free,
            opset_version=18,
            dynamo=False,
        )
