"""Sizes and frozen weights of a bundle's target, for training a drafter or draft heads.

Only the output layer and the token embeddings are read; the bundle's engine runs the target's layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...bundle.files import Bundle
from ...errors import CheckpointError
from ...export.models.decoder import DecoderConfig, rope_table
from ..graph_weights import GraphWeights
from .shards import Source, read_source

# Configuration of each family's drafters; llamagen and anole follow LANTERN.
_CONVENTIONS: dict[str, dict[str, Any]] = {
    "llamagen": {"norm_eps": 1e-6, "input_norm": False},
    "scenes": {"norm_eps": 1e-5, "input_norm": False, "prefix_rotation": "identity"},
    "anole": {"norm_eps": 1e-5, "query_key_norm": True, "rotary": "sequence", "rope_style": "half"},
}


@dataclass(frozen=True)
class Target:
    """Frozen target weights for drafter training.

    Args:
        name: name of the bundle.
        source: target and sizes that the training images must have.
        config: configuration of the drafter.
        head: weights of the output layer, float32 `[codes, width]`.
        embeddings: initial embeddings of the drafter, `[tokens, width]`.
        code_offset: token id of code 0.
        fields: fields of the drafter's config.json, without sizes.
    """

    name: str
    source: Source
    config: DecoderConfig
    head: Tensor
    embeddings: Tensor
    code_offset: int
    fields: dict[str, Any]


class OutputLayer(nn.Module):
    """Frozen output layer of a target: logits of codes from hidden states.

    Args:
        graph: weights of the target's graph.

    Attributes:
        weight: matrix from inputs to logits, float32 `[codes, inputs]`.
        bias: bias of the logits, `[codes]`.
        hidden_weight: weight `[width, inputs]` of a hidden layer with GELU before the matrix. None: the inputs of the
            matrix are hidden states.
        hidden_bias: bias of the hidden layer, `[inputs]`, or None.
    """

    weight: Tensor
    bias: Tensor
    hidden_weight: Tensor | None
    hidden_bias: Tensor | None

    def __init__(self, graph: GraphWeights) -> None:
        super().__init__()
        is_deep = "head.first.weight" in graph
        weight = graph.read("head.second.weight" if is_deep else "head.weight").T.contiguous()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", graph.read("head.second.bias") if is_deep else torch.zeros(len(weight)))
        self.register_buffer("hidden_weight", graph.read("head.first.weight") if is_deep else None)
        self.register_buffer("hidden_bias", graph.read("head.first.bias") if is_deep else None)

    def inputs(self, states: Tensor) -> Tensor:
        """Compute the inputs of the matrix, `[..., inputs]`, from hidden states `[..., width]`."""
        if self.hidden_weight is None or self.hidden_bias is None:
            return states
        return F.gelu(states @ self.hidden_weight + self.hidden_bias)

    def logits(self, inputs: Tensor) -> Tensor:
        """Compute logits, `[..., codes]`. Guided inputs give guided logits."""
        return inputs @ self.weight.T + self.bias


@dataclass(frozen=True)
class HeadsTarget:
    """Target of draft heads.

    Args:
        sources: target and sizes that training images may have.
        layer: output layer.
        embeddings: input embeddings of the codes, float32 `[codes, width]`.
    """

    sources: list[Source]
    layer: OutputLayer
    embeddings: Tensor


def read_heads_target(bundle: Bundle) -> HeadsTarget:
    """Read sizes and weights that training draft heads needs, from a bundle of any family but PAR and NAR.

    Raises:
        RequestError: the bundle generates without drafts.
        BundleError: the bundle is damaged.
    """
    manifest = bundle.manifest
    sources = [read_source(manifest, size) for size in manifest.all_sizes]
    embeddings = torch.from_numpy(np.array(bundle.code_embeddings[: manifest.codebook_size]))
    return HeadsTarget(sources, OutputLayer(GraphWeights(bundle.path("target"))), embeddings.float())


def read_target(bundle: Bundle) -> Target:
    """Read sizes and weights that training a drafter needs.

    Raises:
        RequestError: the bundle generates without drafts.
        CheckpointError: drafters of the bundle's family cannot be trained.
        BundleError: the bundle is damaged.
    """
    manifest = bundle.manifest
    source = read_source(manifest)
    if manifest.family not in _CONVENTIONS:
        field = f"family of bundle {manifest.name}"
        remedy = "train draft heads with `lantern-rt train-drafter heads`"
        raise CheckpointError(field=field, found=manifest.family, expected=", ".join(_CONVENTIONS), remedy=remedy)
    graph = GraphWeights(bundle.path("target"))
    config = _drafter_config(bundle, graph)
    if config.rotary == "grid":
        _check_rotation(bundle, graph, config)
    embeddings = torch.from_numpy(np.array(bundle.code_embeddings))
    code_offset = 0
    if manifest.condition.kind == "tokens":
        codes = embeddings
        embeddings = GraphWeights(bundle.path("condition")).read("table.weight")
        code_offset = _code_offset(bundle, embeddings, codes)
    head = graph.read("head.weight").T.contiguous()
    fields = _config_fields(bundle, config)
    return Target(manifest.name, source, config, head, embeddings, code_offset, fields)


def _drafter_config(bundle: Bundle, graph: GraphWeights) -> DecoderConfig:
    manifest = bundle.manifest
    spec = manifest.target
    prefix = manifest.condition.prefix
    return DecoderConfig(
        hidden_size=spec.hidden_size,
        num_layers=1,
        num_heads=spec.hidden_size // spec.head_dim,
        num_kv_heads=spec.num_kv_heads,
        intermediate_size=graph.shape("layers.0.ffn.gate.weight")[1],
        vocab_size=spec.vocab_size,
        grid=manifest.grid_rows,
        prefix=prefix - 1,
        spare_positions=spec.max_positions - prefix - manifest.codes_per_image,
        final_norm=False,
        **_CONVENTIONS[manifest.family],
    )


def _check_rotation(bundle: Bundle, graph: GraphWeights, config: DecoderConfig) -> None:
    cos, sin = (graph.read(f"rotary.{part}")[1:] for part in ("cos", "sin"))
    table = torch.stack([cos[:, ::2], sin[:, 1::2]], -1)
    expected = rope_table(config)
    tolerance = 2e-3 if bundle.manifest.target.dtype == "float16" else 1e-5
    if table.shape != expected.shape or not torch.allclose(table, expected, atol=tolerance):
        problem = f"the rotary table differs from that of base {config.rope_base:.0f}, which the family's drafters use"
        raise CheckpointError(problem, field=f"bundle {bundle.manifest.name}")


def _code_offset(bundle: Bundle, table: Tensor, codes: Tensor) -> int:
    rounded = codes.to(torch.float16).float() if not (table == codes[0]).all(1).any() else codes
    for start in torch.nonzero((table == rounded[0]).all(1)).flatten().tolist():
        if torch.equal(table[start : start + len(codes)], rounded):
            return int(start)
    raise CheckpointError(
        "the embeddings of its codes are not consecutive in its token table", field=f"bundle {bundle.manifest.name}"
    )


def _config_fields(bundle: Bundle, config: DecoderConfig) -> dict[str, Any]:
    condition = bundle.manifest.condition
    if bundle.manifest.family == "anole":
        return {
            "architectures": ["ChameleonForConditionalGeneration"],
            "model_type": "chameleon",
            "max_position_embeddings": config.positions - config.spare_positions + 1,
            "rope_theta": config.rope_base,
            "swin_norm": False,
            "attention_bias": False,
            "mlp_bias": False,
        }
    inputs: dict[str, Any] = {"input_type": "t2i", "caption_dim": condition.caption_dim}
    if condition.kind == "class":
        inputs = {"input_type": "c2i", "num_classes": condition.classes}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{name: value for name, value in inputs.items() if value is not None},
        "cls_token_num": condition.prefix,
        "block_size": bundle.manifest.codes_per_image,
        "rope_base": config.rope_base,
    }
