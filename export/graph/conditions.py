"""The graph `condition`, which computes the conditional and unconditional prefix embeddings of prompts.

LlamaGen's prompts are class ids or text embeddings; decoders that embed text themselves take token ids. LlamaGen pads a
text on the right to 120 tokens, encodes it with T5, and moves the padding to the left. T5 uses only distances between
tokens, and the projection maps zero to zero. So a text can be encoded without padding here, and zeros are put before
the result. In a batch, shorter texts are padded on the left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from ...bundle.conditions import ConditionSpec, TokenLayout
from ...engines.function_tensors import declare_condition_tensors
from ..checkpoints.files import read_tokenizer
from ..models.causal_encoder import CausalEncoder, write_causal_encoder
from ..models.t5 import write_t5_encoder
from .graphs import Arrays, Graph, name_test_cases
from .onnx_ops import ExportGraphWriter


class PromptCondition(NamedTuple):
    """Condition of a bundle: its manifest entry, its graph, and the content of `tokenizer.json` if prompts are text.

    `sources` are roles and paths of files that do not belong to the target's checkpoint.
    """

    spec: ConditionSpec
    graph: Graph
    tokenizer_json: bytes | None = None
    sources: Sequence[tuple[str, Path]] = ()


class ClassCondition(nn.Module):
    """Module that looks up class ids in `[classes + 1, hidden_size]`; the last row is unconditional."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table, requires_grad=False)  # [classes + 1, hidden_size]

    def forward(self, class_ids: Tensor) -> tuple[Tensor, Tensor]:
        prefix = self.table[class_ids][:, None]  # [rows, 1, hidden_size]
        return prefix, self.table[-1].expand_as(prefix)

    def make_condition(self, prefix: int = 1, **fields: Any) -> PromptCondition:
        rows, width = self.table.shape
        generator = np.random.default_rng(0)
        cases = name_test_cases(*({"class_ids": generator.integers(rows - 1, size=n)} for n in (3, 1)))
        spec = ConditionSpec(kind="class", prefix=prefix, classes=rows - 1, **fields)
        return PromptCondition(spec, Graph("condition", self, *declare_condition_tensors(spec, width), cases))


class CaptionProjection(nn.Module):
    """Projection of text embeddings to prefix embeddings.

    Weights of its layers are `first [hidden_size, caption_dim]` and `second`, which is square.
    """

    def __init__(self, first: Tensor, second: Tensor) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(w, requires_grad=False) for w in (first, second))

    def project(self, captions: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(captions, self.first), approximate="tanh"), self.second)

    def write_nodes(self, ops: ExportGraphWriter, captions: str, name: str | None = None) -> str:
        """Write the nodes of `project`. The weights have the prefix `caption.`."""
        first, second = (ops.add_weight(f"caption.{part}", getattr(self, part).t()) for part in ("first", "second"))
        active = ops.op("Gelu", ops.op("MatMul", captions, first), approximate="tanh")
        return ops.op("MatMul", active, second, name=name)  # [..., hidden_size]


class CaptionCondition(CaptionProjection):
    """Module that projects text embeddings, padded on the left, to prefix embeddings.

    The text embeddings of the unconditional row are `uncond [prefix, caption_dim]`.
    """

    def __init__(self, first: Tensor, second: Tensor, uncond: Tensor) -> None:
        super().__init__(first, second)
        self.uncond = nn.Parameter(uncond, requires_grad=False)

    def forward(self, caption_embeds: Tensor, caption_mask: Tensor) -> tuple[Tensor, Tensor]:
        prefix = self.project(caption_embeds * caption_mask[..., None])  # [rows, prefix, hidden_size]
        return prefix, self.project(self.uncond).expand_as(prefix)

    def make_condition(self) -> PromptCondition:
        prefix, caption_dim = self.uncond.shape
        generator = np.random.default_rng(0)
        cases: list[Arrays] = [
            {
                "caption_embeds": generator.standard_normal((rows, prefix, caption_dim), dtype=np.float32),
                "caption_mask": np.sort(generator.integers(2, size=(rows, prefix))),
            }
            for rows in (3, 1)
        ]
        spec = ConditionSpec(kind="embeddings", prefix=prefix, caption_dim=caption_dim)
        tensors = declare_condition_tensors(spec, len(self.second))
        return PromptCondition(spec, Graph("condition", self, *tensors, name_test_cases(*cases)))


class TextCondition(nn.Module):
    """Module that encodes text to prefix embeddings; `token_ids` and `token_mask` `[rows, tokens]` are padded left."""

    def __init__(self, encoder: nn.Module, caption: CaptionCondition) -> None:
        super().__init__()
        self.encoder = encoder
        self.caption = caption

    def forward(self, token_ids: Tensor, token_mask: Tensor) -> tuple[Tensor, Tensor]:
        states = self.encoder(input_ids=token_ids, attention_mask=token_mask).last_hidden_state
        padding = (0, 0, len(self.caption.uncond) - token_ids.shape[1], 0)  # rows before the text
        rows: tuple[Tensor, Tensor] = self.caption(F.pad(states, padding), F.pad(token_mask, padding[2:]))
        return rows


class CausalTextCondition(nn.Module):
    """Module that encodes text to prefix embeddings; `token_ids` and `token_mask` `[rows, tokens]` are padded right."""

    def __init__(self, encoder: CausalEncoder, caption: CaptionProjection) -> None:
        super().__init__()
        self.encoder = encoder
        self.caption = caption

    def forward(self, token_ids: Tensor, token_mask: Tensor) -> tuple[Tensor, Tensor]:
        prefix = self.caption.project(self.encoder(token_ids, token_mask))
        return prefix[:, :-1], prefix[:, -1:]


class TokenCondition(nn.Module):
    """Module that looks up the `token_ids [rows, tokens]` and `uncond_ids [rows, uncond_tokens]` of prompts."""

    def __init__(self, embeddings: Tensor) -> None:
        super().__init__()
        self.table = nn.Embedding(len(embeddings), embeddings.shape[1], _weight=embeddings, _freeze=True)

    def forward(self, token_ids: Tensor, uncond_ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.table(token_ids), self.table(uncond_ids)


def make_token_condition(
    embeddings: Tensor,
    prefix: int,
    layout: TokenLayout,
    tokenizer_path: Path,
    required_ids: Mapping[str, int] | None = None,
    tokenizer_json: bytes | None = None,
) -> PromptCondition:
    """Return the condition of prompts whose token ids the decoder embeds, by `embeddings [tokens, hidden_size]`.

    Args:
        prefix: maximum number of tokens of a prompt.
        required_ids: token ids by name that the tokenizer must have.
        tokenizer_json: the tokenizer converted to `tokenizer.json`, if its file has another format.

    Raises:
        CheckpointError: the tokenizer does not belong to the model.
    """
    read_tokenizer(tokenizer_path, len(embeddings), required_ids, tokenizer_json)
    generator = np.random.default_rng(0)
    tokens, width = embeddings.shape
    spec = ConditionSpec(kind="tokens", prefix=prefix, layout=layout)
    inputs, outputs = declare_condition_tensors(spec, width)
    cases: list[Arrays] = [
        {value.name: generator.integers(tokens, size=(rows, n)) for value, n in zip(inputs, lengths, strict=True)}
        for rows, lengths in ((2, (5, 3)), (1, (7, 7)))
    ]

    def write_embedding_lookup(ops: ExportGraphWriter) -> None:
        for source, result in zip(inputs, outputs, strict=True):
            ops.op("Gather", ops.add_weight("table.weight", embeddings), source.name, name=result.name)

    graph = Graph(
        "condition", TokenCondition(embeddings), inputs, outputs, name_test_cases(*cases), write_embedding_lookup
    )
    return PromptCondition(spec, graph, tokenizer_json or tokenizer_path.read_bytes())


def make_text_condition(encoder: Any, tokenizer_json: bytes, caption_projection: CaptionCondition) -> PromptCondition:
    """Return the condition of text prompts that T5 encodes."""
    prefix = len(caption_projection.uncond)
    generator = np.random.default_rng(0)

    def make_prompts(lengths: list[int]) -> Arrays:
        tokens = max(lengths)
        mask = (np.arange(tokens) >= tokens - np.array(lengths)[:, None]).astype(np.int64)
        ids = generator.integers(1, encoder.config.vocab_size, size=mask.shape) * mask
        return {"token_ids": ids, "token_mask": mask}

    spec = ConditionSpec(kind="text", prefix=prefix, cleaning="llamagen")
    graph = Graph(
        "condition",
        TextCondition(encoder, caption_projection),
        *declare_condition_tensors(spec, len(caption_projection.second)),
        name_test_cases(make_prompts([prefix, max(prefix // 2, 1), 1]), make_prompts([max(prefix // 3, 1)])),
        lambda ops: _write_text_condition(ops, encoder, caption_projection),
        tolerance=None,  # some layers amplify the rounding errors of float32
    )
    return PromptCondition(spec, graph, tokenizer_json)


def _write_text_condition(ops: ExportGraphWriter, encoder: Any, caption_projection: CaptionCondition) -> None:
    prefix = len(caption_projection.uncond)
    states, mask = write_t5_encoder(ops, encoder, prefix)
    real = ops.op("Mul", states, ops.op("Unsqueeze", mask, ops.int_vector(2)))
    text = caption_projection.write_nodes(ops, real)  # [rows, tokens, hidden_size]
    padding = ops.op("Sub", ops.int_vector(prefix), ops.op("Shape", "token_ids", start=1, end=2))
    # `Pad` takes the padding before each axis, then the padding after each. Only axis 1 is padded, before the text.
    pads = ops.op("Concat", ops.int_vector(0), padding, ops.int_vector(0, 0, 0, 0), axis=0)
    ops.op("Pad", text, pads, name="prefix_embeds")
    rows = ops.op("Shape", "token_ids", start=0, end=1)
    shape = ops.op("Concat", rows, ops.int_vector(prefix, len(caption_projection.second)), axis=0)
    uncond = caption_projection.write_nodes(ops, ops.add_weight("caption.uncond", caption_projection.uncond))
    ops.op("Expand", uncond, shape, name="uncond_embeds")


def make_causal_text_condition(
    encoder: CausalEncoder, tokenizer_json: bytes, caption: CaptionProjection
) -> PromptCondition:
    """Return the condition of text prompts that a causal encoder encodes, such as Qwen3."""
    prefix = encoder.config.prefix
    generator = np.random.default_rng(0)

    def make_prompts(lengths: list[int]) -> Arrays:
        mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
        ids = generator.integers(encoder.config.vocab_size, size=mask.shape)
        return {"token_ids": np.where(mask > 0, ids, encoder.padding), "token_mask": mask}

    def write_nodes(ops: ExportGraphWriter) -> None:
        embeds = caption.write_nodes(ops, write_causal_encoder(ops, encoder))
        lengths = ops.op("Concat", ops.op("Shape", "token_ids", start=1, end=2), ops.int_vector(1), axis=0)
        ops.add_node("Split", [embeds, lengths], ["prefix_embeds", "uncond_embeds"], axis=1)

    spec = ConditionSpec(kind="text", prefix=prefix, padding=encoder.padding)
    graph = Graph(
        "condition",
        CausalTextCondition(encoder, caption),
        *declare_condition_tensors(spec, len(caption.second)),
        name_test_cases(make_prompts([prefix, max(prefix // 2, 1), 1]), make_prompts([max(prefix // 3, 1)])),
        write_nodes,
        tolerance=None,  # some layers amplify the rounding errors of float32
    )
    return PromptCondition(spec, graph, tokenizer_json)
