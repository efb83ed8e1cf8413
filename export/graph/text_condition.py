"""The condition graph of a text model: token ids through a T5 encoder and the caption projection to prefix rows.

LlamaGen pads a text to 120 tokens on the right, encodes it, and rolls the result to the left. T5 knows only distances
between tokens, and the projection maps zero to zero; so here a text is encoded at its own length, and zeros are put
before it afterwards: the same rows for a fraction of the work. Shorter texts of a batch are padded on the left.

Does not know files, prompts or tokenizers.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.llamagen_gpt import CaptionCondition
from ..models.t5 import T5Encoder, write_encoder
from .graphs import Case, Graph
from .onnx_ops import Ops, Value

# Rounding alone moves the states of 24 random layers by 4e-4 of the largest value (float32 against float64, in ONNX
# Runtime as in PyTorch), and the published programs run the encoder in bfloat16; a wrong graph differs by far more.
_TOLERANCE = 5e-3


class TextCondition(nn.Module):
    """Left-padded `token_ids` and `token_mask [rows, tokens]` to prefix rows and unconditional rows.

    At most as many tokens as the prefix has rows; both results are `[rows, prefix, width]`.
    """

    def __init__(self, encoder: T5Encoder, caption: CaptionCondition) -> None:
        super().__init__()
        self.encoder, self.caption = encoder, caption

    def forward(self, token_ids: Tensor, token_mask: Tensor) -> tuple[Tensor, Tensor]:
        prefix = len(self.caption.uncond)
        states = self.encoder(token_ids, token_mask)
        padding = (0, 0, prefix - token_ids.shape[1], 0)  # rows before the text
        rows: tuple[Tensor, Tensor] = self.caption(F.pad(states, padding), F.pad(token_mask, padding[2:]))
        return rows


def text_condition_graph(encoder: T5Encoder, caption: CaptionCondition) -> Graph:
    """The graph `condition` of kind `text`; checked on whole, half-filled and shortest prompts."""
    condition = TextCondition(encoder, caption)
    prefix, width = len(caption.uncond), len(caption.second)
    generator = np.random.default_rng(0)

    def case(name: str, lengths: list[int]) -> Case:
        tokens = max(lengths)
        mask = (np.arange(tokens) >= tokens - np.array(lengths)[:, None]).astype(np.int64)
        ids = generator.integers(1, encoder.config.vocabulary, size=mask.shape) * mask
        return Case(name, {"token_ids": ids, "token_mask": mask})

    return Graph(
        "condition",
        condition,
        tuple(Value(name, ("rows", "tokens"), "int64") for name in ("token_ids", "token_mask")),
        tuple(Value(name, ("rows", prefix, width)) for name in ("prefix_embeds", "uncond_embeds")),
        (case("three prompts", [prefix, max(prefix // 2, 1), 1]), case("one prompt", [max(prefix // 3, 1)])),
        lambda ops: _write(ops, condition),
        _TOLERANCE,
    )


def _write(ops: Ops, condition: TextCondition) -> None:
    caption = condition.caption
    prefix = len(caption.uncond)
    states, mask = write_encoder(ops, condition.encoder, prefix)
    real = ops.op("Mul", states, ops.op("Unsqueeze", mask, ops.ints(2)))
    first = ops.op("MatMul", real, ops.weight("caption.first", caption.first.t()))
    active = ops.op("Gelu", first, approximate="tanh")
    text = ops.op("MatMul", active, ops.weight("caption.second", caption.second.t()))  # [rows, tokens, width]
    padding = ops.op("Sub", ops.ints(prefix), ops.op("Shape", "token_ids", start=1, end=2))
    pads = ops.op("Concat", ops.ints(0), padding, ops.ints(0, 0, 0, 0), axis=0)  # before each axis, then behind
    ops.op("Pad", text, pads, name="prefix_embeds")
    with torch.no_grad():
        uncond = caption.project(caption.uncond)  # [prefix, width]: the same for every prompt
    rows = ops.op("Shape", "token_ids", start=0, end=1)
    shape = ops.op("Concat", rows, ops.ints(*uncond.shape), axis=0)
    ops.op("Expand", ops.weight("uncond", uncond), shape, name="uncond_embeds")
