"""Sizes and frozen weights of a bundle's target, for training a drafter or draft heads.

Only the output layer and the token embeddings are read; the bundle's engine runs the target's layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...bundle.files import Bundle
from ...bundle.weights import StoredWeights
from ...errors import CheckpointError
from ...export.models.decoder import DecoderConfig
from .shards import ShardSource, describe_shard_source

# Fields of `DecoderConfig` in which a family's drafter differs from the target; llamagen and anole follow LANTERN.
_DIFFERENCES: dict[str, dict[str, Any]] = {
    "llamagen": {"norm_eps": 1e-6, "input_norm": False},
    "scenes": {"input_norm": False},
    "anole": {},
}


@dataclass(frozen=True)
class TrainingTarget:
    """Frozen weights of a target and sizes for training a drafter."""

    name: str
    shard_source: ShardSource  # target and sizes that the training images must have
    config: DecoderConfig  # configuration of the drafter
    head: Tensor  # weights of the output layer, float32 `[codes, width]`
    embeddings: Tensor  # initial embeddings of the drafter, `[tokens, width]`
    code_offset: int  # token id of code 0
    config_fields: dict[str, Any]  # fields of the drafter's config.json, without sizes


class OutputLayer(nn.Module):
    """Frozen output layer of a target: logits of codes from hidden states."""

    weight: Tensor  # matrix from inputs to logits, float32 `[codes, inputs]`
    bias: Tensor  # bias of the logits, `[codes]`
    # Weight `[width, inputs]` of a hidden layer with GELU before the matrix. None: the inputs of the matrix are hidden
    # states.
    hidden_weight: Tensor | None
    hidden_bias: Tensor | None  # bias of the hidden layer, `[inputs]`, or None

    def __init__(self, weights: StoredWeights) -> None:
        super().__init__()
        is_deep = "head.first.weight" in weights
        last = "head.second" if is_deep else "head"
        weight = _read_weight(weights, f"{last}.weight").T.contiguous()
        has_bias = f"{last}.bias" in weights
        self.register_buffer("weight", weight)
        self.register_buffer("bias", _read_weight(weights, f"{last}.bias") if has_bias else torch.zeros(len(weight)))
        self.register_buffer("hidden_weight", _read_weight(weights, "head.first.weight") if is_deep else None)
        self.register_buffer("hidden_bias", _read_weight(weights, "head.first.bias") if is_deep else None)

    def inputs(self, states: Tensor) -> Tensor:
        """Compute the inputs of the matrix, `[..., inputs]`, from hidden states `[..., width]`."""
        if self.hidden_weight is None or self.hidden_bias is None:
            return states
        return F.gelu(states @ self.hidden_weight + self.hidden_bias)

    def compute_logits(self, inputs: Tensor) -> Tensor:
        """Compute logits `[..., codes]` from inputs of the matrix.

        The layer is affine, so guidance may be applied to its inputs instead of the logits.
        """
        return inputs @ self.weight.T + self.bias


@dataclass(frozen=True)
class HeadTrainingTarget:
    """Frozen weights of a target for training draft heads."""

    shard_sources: list[ShardSource]  # sources that the shards of training images may have, one per image size
    output_layer: OutputLayer
    embeddings: Tensor  # input embeddings of the codes, float32 `[codes, width]`


def read_head_training_target(bundle: Bundle) -> HeadTrainingTarget:
    """Read what draft heads are trained with, or raise RequestError for PAR and NAR, which have no drafts."""
    manifest = bundle.manifest
    sources = [describe_shard_source(manifest, size) for size in manifest.all_sizes]
    embeddings = torch.from_numpy(np.array(bundle.code_embeddings[: manifest.codebook_size]))
    return HeadTrainingTarget(sources, OutputLayer(StoredWeights(bundle.path("target"))), embeddings.float())


def read_training_target(bundle: Bundle) -> TrainingTarget:
    """Read what a drafter is trained with, or raise CheckpointError if no drafter of the family can be."""
    manifest = bundle.manifest
    source = describe_shard_source(manifest)
    if manifest.family not in _DIFFERENCES:
        field = f"family of bundle {manifest.name}"
        remedy = "train draft heads with `lantern-rt train-drafter heads`"
        raise CheckpointError(field=field, found=manifest.family, expected=", ".join(_DIFFERENCES), remedy=remedy)
    config = _make_drafter_config(bundle)
    embeddings = torch.from_numpy(np.array(bundle.code_embeddings))
    code_offset = 0
    if manifest.condition.kind == "tokens":
        codes = embeddings
        embeddings = _read_weight(StoredWeights(bundle.path("condition")), "table.weight")
        code_offset = _find_code_offset(bundle, embeddings, codes)
    head = _read_weight(StoredWeights(bundle.path("target")), "head.weight").T.contiguous()
    fields = _make_config_fields(bundle, config)
    return TrainingTarget(manifest.name, source, config, head, embeddings, code_offset, fields)


def _read_weight(weights: StoredWeights, name: str) -> Tensor:
    return torch.from_numpy(weights.float32(name))


def _make_drafter_config(bundle: Bundle) -> DecoderConfig:
    manifest = bundle.manifest
    spec = manifest.target
    prefix = manifest.condition.prefix
    architecture = spec.architecture
    shared = ("num_heads", "intermediate_size", "norm_eps", "rope_base", "rotary", "rope_style", "prefix_rotation")
    config = DecoderConfig(
        **{name: getattr(architecture, name) for name in shared},
        hidden_size=spec.hidden_size,
        num_layers=1,
        num_kv_heads=spec.num_kv_heads,
        vocab_size=spec.vocab_size,
        grid=manifest.grid_rows,
        prefix=prefix - 1,  # the drafter's sequence begins with the token at position 1
        spare_positions=spec.max_positions - prefix - manifest.codes_per_image,
        final_norm=False,
        query_key_norm=architecture.head_norm_eps is not None,
    )
    return replace(config, **_DIFFERENCES[manifest.family])


def _find_code_offset(bundle: Bundle, token_table: Tensor, code_embeddings: Tensor) -> int:
    # The token table may be stored in float16 while the code embeddings are float32.
    rounded = (
        code_embeddings.to(torch.float16).float()
        if not (token_table == code_embeddings[0]).all(1).any()
        else code_embeddings
    )
    for start in torch.nonzero((token_table == rounded[0]).all(1)).flatten().tolist():
        if torch.equal(token_table[start : start + len(code_embeddings)], rounded):
            return int(start)
    raise CheckpointError(
        "the embeddings of its codes are not consecutive in its token table", field=f"bundle {bundle.manifest.name}"
    )


def _make_config_fields(bundle: Bundle, config: DecoderConfig) -> dict[str, Any]:
    condition = bundle.manifest.condition
    if bundle.manifest.family == "anole":
        return {
            "architectures": ["ChameleonForConditionalGeneration"],
            "model_type": "chameleon",
            "max_position_embeddings": config.num_rope_positions - config.spare_positions + 1,
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
