"""The graph `condition`: from what is asked for to prefix rows, with guidance and without.

Class ids and text embeddings are LlamaGen's, token ids any decoder's that embeds text itself. LlamaGen pads a text to
120 tokens on the right, encodes it with T5, and rolls the result to the left. T5 knows only distances between tokens
and the projection maps zero to zero, so a text is encoded at its own length here and zeros are put before it.
Shorter texts of a batch are padded on the left.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...bundle.manifest import ConditionSpec, TokenLayout
from ..checkpoints.files import read_tokenizer
from ..models.t5 import write_encoder
from .graphs import Arrays, Graph, cases_of
from .onnx_ops import Ops, Value


class Condition(NamedTuple):
    """How what is asked for becomes prefix rows: for the manifest, as a graph, and the `tokenizer.json` of a text."""

    spec: ConditionSpec
    graph: Graph
    tokenizer: bytes | None = None


class ClassCondition(nn.Module):
    """`class_ids [rows]` to prefix rows; the unconditional row is the last one of the table."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table, requires_grad=False)  # [classes + 1, hidden_size]

    def forward(self, class_ids: Tensor) -> tuple[Tensor, Tensor]:
        prefix = self.table[class_ids][:, None]  # [rows, 1, hidden_size]
        return prefix, self.table[-1].expand_as(prefix)

    def condition(self) -> Condition:
        """Class ids as a bundle's condition."""
        (rows, width), generator = self.table.shape, np.random.default_rng(0)
        cases = cases_of(*({"class_ids": generator.integers(rows - 1, size=n)} for n in (3, 1)))
        ids = Value("class_ids", ("rows",), "int64")
        graph = Graph("condition", self, (ids,), _prefix_rows(1, width), cases)
        return Condition(ConditionSpec(kind="class", prefix=1, classes=rows - 1), graph)


class CaptionCondition(nn.Module):
    """Left-padded text embeddings to prefix rows; unconditional rows come from `uncond [prefix, caption_dim]`."""

    def __init__(self, first: Tensor, second: Tensor, uncond: Tensor) -> None:
        super().__init__()
        self.first, self.second, self.uncond = (nn.Parameter(w, requires_grad=False) for w in (first, second, uncond))

    def project(self, captions: Tensor) -> Tensor:
        """`[..., caption_dim]` to `[..., hidden_size]`."""
        return F.linear(F.gelu(F.linear(captions, self.first), approximate="tanh"), self.second)

    def forward(self, caption_embeds: Tensor, caption_mask: Tensor) -> tuple[Tensor, Tensor]:
        prefix = self.project(caption_embeds * caption_mask[..., None])  # [rows, prefix, hidden_size]
        return prefix, self.project(self.uncond).expand_as(prefix)

    def condition(self) -> Condition:
        """Text embeddings as a bundle's condition."""
        (prefix, caption_dim), generator = self.uncond.shape, np.random.default_rng(0)
        embeds = Value("caption_embeds", ("rows", prefix, caption_dim))
        mask = Value("caption_mask", ("rows", prefix), "int64")
        cases: list[Arrays] = [
            {
                embeds.name: generator.standard_normal((rows, prefix, caption_dim), dtype=np.float32),
                mask.name: np.sort(generator.integers(2, size=(rows, prefix))),
            }
            for rows in (3, 1)
        ]
        graph = Graph("condition", self, (embeds, mask), _prefix_rows(prefix, len(self.second)), cases_of(*cases))
        return Condition(ConditionSpec(kind="embeddings", prefix=prefix, caption_dim=caption_dim), graph)


class TextCondition(nn.Module):
    """Left-padded `token_ids` and `token_mask [rows, tokens]` to prefix rows and unconditional rows.

    At most as many tokens as the prefix has rows; both results are `[rows, prefix, hidden_size]`.
    """

    def __init__(self, encoder: nn.Module, caption: CaptionCondition) -> None:
        super().__init__()
        self.encoder, self.caption = encoder, caption

    def forward(self, token_ids: Tensor, token_mask: Tensor) -> tuple[Tensor, Tensor]:
        states = self.encoder(input_ids=token_ids, attention_mask=token_mask).last_hidden_state
        padding = (0, 0, len(self.caption.uncond) - token_ids.shape[1], 0)  # rows before the text
        rows: tuple[Tensor, Tensor] = self.caption(F.pad(states, padding), F.pad(token_mask, padding[2:]))
        return rows


class TokenCondition(nn.Module):
    """`token_ids [rows, tokens]` and `uncond_ids [rows, uncond_tokens]` of a prompt to their embeddings."""

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
    """The condition of prompts made of token ids that the decoder embeds itself.

    embeddings `[tokens, hidden_size]`: of all ids. prefix: the longest prompt. named: the ids by name that the
    tokenizer must have. content: the tokenizer, where its file is no `tokenizer.json`. Raises: CheckpointError.
    """
    read_tokenizer(tokenizer, len(embeddings), named, content)
    generator = np.random.default_rng(0)
    tokens, width = embeddings.shape
    inputs = Value("token_ids", ("rows", "tokens"), "int64"), Value("uncond_ids", ("rows", "uncond_tokens"), "int64")
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

    graph = Graph("condition", TokenCondition(embeddings), inputs, outputs, cases_of(*cases), write)
    return Condition(
        ConditionSpec(kind="tokens", prefix=prefix, layout=layout), graph, content or tokenizer.read_bytes()
    )


def text_condition(encoder: Any, tokenizer: bytes, caption: CaptionCondition) -> Condition:
    """The condition of prompts that a `T5Stack` reads; checked on whole, half-filled and shortest prompts."""
    prefix, width = len(caption.uncond), len(caption.second)
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
        _prefix_rows(prefix, width),
        cases_of(prompts([prefix, max(prefix // 2, 1), 1]), prompts([max(prefix // 3, 1)])),
        lambda ops: _write_text(ops, encoder, caption),
        tolerance=None,  # some layers make much of the rounding of float32
    )
    return Condition(ConditionSpec(kind="text", prefix=prefix, cleaning="llamagen"), graph, tokenizer)


def _write_text(ops: Ops, encoder: Any, caption: CaptionCondition) -> None:
    prefix = len(caption.uncond)
    states, mask = write_encoder(ops, encoder, prefix)
    real = ops.op("Mul", states, ops.op("Unsqueeze", mask, ops.ints(2)))
    first = ops.op("MatMul", real, ops.weight("caption.first", caption.first.t()))
    active = ops.op("Gelu", first, approximate="tanh")
    text = ops.op("MatMul", active, ops.weight("caption.second", caption.second.t()))  # [rows, tokens, hidden_size]
    padding = ops.op("Sub", ops.ints(prefix), ops.op("Shape", "token_ids", start=1, end=2))
    pads = ops.op("Concat", ops.ints(0), padding, ops.ints(0, 0, 0, 0), axis=0)  # before each axis, then behind
    ops.op("Pad", text, pads, name="prefix_embeds")
    with torch.no_grad():
        uncond = caption.project(caption.uncond)  # [prefix, hidden_size]: the same for every prompt
    rows = ops.op("Shape", "token_ids", start=0, end=1)
    shape = ops.op("Concat", rows, ops.ints(*uncond.shape), axis=0)
    ops.op("Expand", ops.weight("uncond", uncond), shape, name="uncond_embeds")


def _prefix_rows(prefix: int, width: int) -> tuple[Value, Value]:
    return Value("prefix_embeds", ("rows", prefix, width)), Value("uncond_embeds", ("rows", prefix, width))
