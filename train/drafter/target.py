"""Sizes and frozen weights of a bundle's target, for training a drafter.

Only the output layer and the token embeddings are read; the bundle's engine runs the target's layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

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


def read_target(bundle: Bundle) -> Target:
    """Read sizes and weights that training a drafter needs.

    Raises:
        CheckpointError: drafters of the bundle's family cannot be trained.
        BundleError: the bundle is damaged.
    """
    manifest = bundle.manifest
    source = read_source(manifest)
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
