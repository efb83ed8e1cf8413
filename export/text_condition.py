"""The condition graph of a text model: token ids through a T5 encoder and the caption projection to prefix rows.

LlamaGen encodes a right-padded text and then rolls it to the left. Here the token ids are padded on the left to
begin with: T5 knows only distances between tokens, so its hidden states are the same, and the graph needs no roll.

Does not know files, prompts or tokenizers.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from .graphs import Case, Graph
from .llamagen_gpt import CaptionCondition
from .onnx_ops import Ops, Value
from .t5 import T5Encoder, write_encoder


class TextCondition(nn.Module):
    """Left-padded `token_ids` and `token_mask [rows, prefix]` to prefix rows and unconditional rows."""

    def __init__(self, encoder: T5Encoder, caption: CaptionCondition) -> None:
        super().__init__()
        self.encoder, self.caption = encoder, caption

    def forward(self, token_ids: Tensor, token_mask: Tensor) -> tuple[Tensor, Tensor]:
        rows: tuple[Tensor, Tensor] = self.caption(self.encoder(token_ids, token_mask), token_mask)
        return rows


def text_condition_graph(encoder: T5Encoder, caption: CaptionCondition) -> Graph:
    """The graph `condition` of kind `text`; checked on whole, half-filled and shortest prompts."""
    condition = TextCondition(encoder, caption)
    prefix, width = len(caption.uncond), len(caption.second)
    generator = np.random.default_rng(0)

    def case(name: str, lengths: list[int]) -> Case:
        mask = (np.arange(prefix) >= prefix - np.array(lengths)[:, None]).astype(np.int64)
        ids = generator.integers(1, encoder.config.vocabulary, size=mask.shape) * mask
        return Case(name, {"token_ids": ids, "token_mask": mask})

    return Graph(
        "condition",
        condition,
        tuple(Value(name, ("rows", prefix), "int64") for name in ("token_ids", "token_mask")),
        tuple(Value(name, ("rows", prefix, width)) for name in ("prefix_embeds", "uncond_embeds")),
        (case("three prompts", [prefix, max(prefix // 2, 1), 1]), case("one prompt", [max(prefix // 3, 1)])),
        lambda: _write(condition),
    )


def _write(condition: TextCondition) -> Ops:
    ops, caption = Ops(), condition.caption
    prefix = len(caption.uncond)
    states, mask = write_encoder(ops, condition.encoder, prefix)
    real = ops.op("Mul", states, ops.op("Unsqueeze", mask, ops.ints(2)))
    first = ops.op("MatMul", real, ops.weight("caption.first", caption.first.t()))
    active = ops.op("Gelu", first, approximate="tanh")
    ops.op("MatMul", active, ops.weight("caption.second", caption.second.t()), name="prefix_embeds")
    with torch.no_grad():
        uncond = caption.project(caption.uncond)  # [prefix, width]: the same for every prompt
    rows = ops.op("Shape", "token_ids", start=0, end=1)
    shape = ops.op("Concat", rows, ops.ints(*uncond.shape), axis=0)
    ops.op("Expand", ops.weight("uncond", uncond), shape, name="uncond_embeds")
    return ops
