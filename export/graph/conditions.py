"""The graph `condition`: computes the prefix embeddings of prompts, conditional and unconditional.

LlamaGen's prompts are class ids or text embeddings; decoders that embed text themselves take token ids. LlamaGen pads a
text to 120 tokens on the right, encodes it with T5, and rolls the result to the left. T5 uses only distances between
tokens, and the projection maps zero to zero, so here a text is encoded without padding and zeros are put before it.
Shorter texts of a batch are padded on the left.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from ...bundle.conditions import ConditionSpec, TokenLayout
from ..checkpoints.files import read_tokenizer
from ..models.t5 import write_encoder
from .graphs import Arrays, Graph, named_cases
from .onnx_ops import Ops, Value


class Condition(NamedTuple):
    """The condition of a bundle: its manifest entry, its graph, and `tokenizer.json` for text."""

    spec: ConditionSpec
    graph: Graph
    tokenizer: bytes | None = None


class ClassCondition(nn.Module):
    """Maps `class_ids [rows]` to prefix embeddings; the last row of the table is unconditional."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table, requires_grad=False)  # [classes + 1, hidden_size]

    def forward(self, class_ids: Tensor) -> tuple[Tensor, Tensor]:
        prefix = self.table[class_ids][:, None]  # [rows, 1, hidden_size]
        return prefix, self.table[-1].expand_as(prefix)

    def make_condition(self) -> Condition:
        """Return the condition graph and its manifest fields, for a bundle whose prompts are class ids."""
        rows, width = self.table.shape
        generator = np.random.default_rng(0)
        cases = named_cases(*({"class_ids": generator.integers(rows - 1, size=n)} for n in (3, 1)))
        ids = Value("class_ids", ("rows",), "int64")
        graph = Graph("condition", self, (ids,), _declare_prefix_rows(1, width), cases)
        return Condition(ConditionSpec(kind="class", prefix=1, classes=rows - 1), graph)


class CaptionCondition(nn.Module):
    """Projects left-padded text embeddings to prefix embeddings; `uncond [prefix, caption_dim]` is unconditional."""

    def __init__(self, first: Tensor, second: Tensor, uncond: Tensor) -> None:
        super().__init__()
        self.first, self.second, self.uncond = (nn.Parameter(w, requires_grad=False) for w in (first, second, uncond))

    def project(self, captions: Tensor) -> Tensor:
        """Map text embeddings `captions [..., caption_dim]` to `[..., hidden_size]`."""
        return F.linear(F.gelu(F.linear(captions, self.first), approximate="tanh"), self.second)

    def forward(self, caption_embeds: Tensor, caption_mask: Tensor) -> tuple[Tensor, Tensor]:
        prefix = self.project(caption_embeds * caption_mask[..., None])  # [rows, prefix, hidden_size]
        return prefix, self.project(self.uncond).expand_as(prefix)

    def make_condition(self) -> Condition:
        """Return the condition graph and its manifest fields, for a bundle whose prompts are text embeddings."""
        prefix, caption_dim = self.uncond.shape
        generator = np.random.default_rng(0)
        embeds = Value("caption_embeds", ("rows", prefix, caption_dim))
        mask = Value("caption_mask", ("rows", prefix), "int64")
        cases: list[Arrays] = [
            {
                embeds.name: generator.standard_normal((rows, prefix, caption_dim), dtype=np.float32),
                mask.name: np.sort(generator.integers(2, size=(rows, prefix))),
            }
            for rows in (3, 1)
        ]
        graph = Graph(
            "condition", self, (embeds, mask), _declare_prefix_rows(prefix, len(self.second)), named_cases(*cases)
        )
        return Condition(ConditionSpec(kind="embeddings", prefix=prefix, caption_dim=caption_dim), graph)


class TextCondition(nn.Module):
    """Encodes left-padded text to conditional and unconditional prefix embeddings, `[rows, prefix, hidden_size]`.

    Inputs are `token_ids` and `token_mask`, `[rows, tokens]`, with at most `prefix` tokens.
    """

    def __init__(self, encoder: nn.Module, caption: CaptionCondition) -> None:
        super().__init__()
        self.encoder = encoder
        self.caption = caption

    def forward(self, token_ids: Tensor, token_mask: Tensor) -> tuple[Tensor, Tensor]:
        states = self.encoder(input_ids=token_ids, attention_mask=token_mask).last_hidden_state
        padding = (0, 0, len(self.caption.uncond) - token_ids.shape[1], 0)  # rows before the text
        rows: tuple[Tensor, Tensor] = self.caption(F.pad(states, padding), F.pad(token_mask, padding[2:]))
        return rows


class TokenCondition(nn.Module):
    """Embeds the `token_ids [rows, tokens]` and `uncond_ids [rows, uncond_tokens]` of a prompt."""

    def __init__(self, embeddings: Tensor) -> None:
        super().__init__()
        self.table = nn.Embedding(len(embeddings), embeddings.shape[1], _weight=embeddings, _freeze=True)

    def forward(self, token_ids: Tensor, uncond_ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.table(token_ids), self.table(uncond_ids)


def token_condition(
    embeddings: Tensor,
    prefix: int,
    layout: TokenLayout,
    tokenizer: Path,
    named: Mapping[str, int] | None = None,
    content: bytes | None = None,
) -> Condition:
    """Return the condition graph and its manifest fields, for prompts whose token ids the decoder embeds.

    Args:
        embeddings: embeddings of all token ids, `[tokens, hidden_size]`.
        prefix: maximum number of tokens of a prompt.
        layout: layout of a prompt's tokens.
        named: token ids by name that the tokenizer must have.
        content: `tokenizer.json`, where the tokenizer's file has another format.

    Raises:
        CheckpointError: the tokenizer does not fit.
    """
    read_tokenizer(tokenizer, len(embeddings), named, content)
    generator = np.random.default_rng(0)
    tokens, width = embeddings.shape
    inputs = (
        Value("token_ids", ("rows", "tokens"), "int64"),
        Value("uncond_ids", ("rows", "uncond_tokens"), "int64"),
    )
    outputs = (
        Value("prefix_embeds", ("rows", "tokens", width)),
        Value("uncond_embeds", ("rows", "uncond_tokens", width)),
    )
    cases: list[Arrays] = [
        {value.name: generator.integers(tokens, size=(rows, n)) for value, n in zip(inputs, lengths, strict=True)}
        for rows, lengths in ((2, (5, 3)), (1, (7, 7)))
    ]

    def write(ops: Ops) -> None:
        for source, result in zip(inputs, outputs, strict=True):
            ops.op("Gather", ops.weight("table.weight", embeddings), source.name, name=result.name)

    graph = Graph("condition", TokenCondition(embeddings), inputs, outputs, named_cases(*cases), write)
    return Condition(
        ConditionSpec(kind="tokens", prefix=prefix, layout=layout), graph, content or tokenizer.read_bytes()
    )


def text_condition(encoder: Any, tokenizer: bytes, caption: CaptionCondition) -> Condition:
    """Return the condition of text prompts that T5 encodes.

    Args:
        encoder: the `T5Stack`.
        tokenizer: content of `tokenizer.json`.
        caption: projection of the encoder's states.
    """
    prefix = len(caption.uncond)
    width = len(caption.second)
    generator = np.random.default_rng(0)

    def prompts(lengths: list[int]) -> Arrays:
        tokens = max(lengths)
        mask = (np.arange(tokens) >= tokens - np.array(lengths)[:, None]).astype(np.int64)
        ids = generator.integers(1, encoder.config.vocab_size, size=mask.shape) * mask
        return {"token_ids": ids, "token_mask": mask}

    graph = Graph(
        "condition",
        TextCondition(encoder, caption),
        tuple(Value(name, ("rows", "tokens"), "int64") for name in ("token_ids", "token_mask")),
        _declare_prefix_rows(prefix, width),
        named_cases(prompts([prefix, max(prefix // 2, 1), 1]), prompts([max(prefix // 3, 1)])),
        lambda ops: _write_text(ops, encoder, caption),
        tolerance=None,  # some layers amplify the rounding errors of float32
    )
    return Condition(ConditionSpec(kind="text", prefix=prefix, cleaning="llamagen"), graph, tokenizer)


def _write_text(ops: Ops, encoder: Any, caption: CaptionCondition) -> None:
    prefix = len(caption.uncond)
    states, mask = write_encoder(ops, encoder, prefix)
    real = ops.op("Mul", states, ops.op("Unsqueeze", mask, ops.ints(2)))
    first = ops.weight("caption.first", caption.first.t())
    second = ops.weight("caption.second", caption.second.t())

    def project(x: str) -> str:
        active = ops.op("Gelu", ops.op("MatMul", x, first), approximate="tanh")
        return ops.op("MatMul", active, second)  # [..., hidden_size]

    text = project(real)  # [rows, tokens, hidden_size]
    padding = ops.op("Sub", ops.ints(prefix), ops.op("Shape", "token_ids", start=1, end=2))
    pads = ops.op("Concat", ops.ints(0), padding, ops.ints(0, 0, 0, 0), axis=0)  # before each axis, then behind
    ops.op("Pad", text, pads, name="prefix_embeds")
    rows = ops.op("Shape", "token_ids", start=0, end=1)
    shape = ops.op("Concat", rows, ops.ints(prefix, len(caption.second)), axis=0)
    ops.op("Expand", project(ops.weight("caption.uncond", caption.uncond)), shape, name="uncond_embeds")


def _declare_prefix_rows(prefix: int, width: int) -> tuple[Value, Value]:
    return Value("prefix_embeds", ("rows", prefix, width)), Value("uncond_embeds", ("rows", prefix, width))
