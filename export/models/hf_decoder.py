"""Llama-style decoders as Hugging Face's transformers writes them: sizes from config.json, names of layers' weights.

Chameleon, Janus's language model and LANTERN's drafters are such decoders: positions are a plain sequence, and
the two halves of a head turn together.

Does not know vocabularies, prompts or graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ..checkpoints.deferred import joined
from ..checkpoints.files import Weights, config_float, config_int, count_blocks, shape_of
from .decoder import DecoderConfig

_LONGEST_PROMPT = 2048  # tokens; a request's prompt has at most 2000 characters

_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.out.weight": "self_attn.o_proj.weight",
    "attention.query_norm.weight": "self_attn.q_norm.weight",
    "attention.query_norm.bias": "self_attn.q_norm.bias",
    "attention.key_norm.weight": "self_attn.k_norm.weight",
    "attention.key_norm.bias": "self_attn.k_norm.bias",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn.gate.weight": "mlp.gate_proj.weight",
    "ffn.up.weight": "mlp.up_proj.weight",
    "ffn.down.weight": "mlp.down_proj.weight",
}


def decoder_sizes(
    config: Mapping[str, Any], path: Path, weights: Weights, place: Path, prefix: str, vocabulary: int, grid: int
) -> DecoderConfig:
    """Sizes of the decoder whose layers are `<prefix>layers.*`, from its configuration, checked against the weights.

    `vocabulary` and `grid` count the codes and their rows. Prompts may fill what the codes leave of
    `max_position_embeddings`, up to 2048 tokens. Raises CheckpointError for what the decoder cannot do.
    """
    layer = f"{prefix}layers.0."
    intermediate_size, width = shape_of(weights, layer + "mlp.gate_proj.weight", 2, place)
    known = {
        "hidden_size": width,
        "num_hidden_layers": count_blocks(weights, prefix + "layers."),
        "intermediate_size": intermediate_size,
    }
    for name, found in known.items():
        if config_int(config, name, path) not in (None, found):
            raise CheckpointError(f"{path}: {name} is {config[name]}, but the weights have {found}")
    heads = config_int(config, "num_attention_heads", path)
    if heads is None or width % heads or width // heads % 2 or config.get("head_dim") not in (None, width // heads):
        raise CheckpointError(
            f"{path}: {heads} heads (num_attention_heads, head_dim) do not fit the width {width}, expected equal parts"
        )
    num_kv_heads = config_int(config, "num_key_value_heads", path) or heads
    rows = shape_of(weights, layer + "self_attn.k_proj.weight", 2, place)[0]
    if heads % num_kv_heads or rows != num_kv_heads * (width // heads):
        raise CheckpointError(
            f"{path}: {num_kv_heads} key heads (num_key_value_heads) of {width // heads} numbers do not fit {heads} "
            f"heads and the {rows} rows of k_proj"
        )
    if config.get("hidden_act", "silu") != "silu" or config.get("swin_norm"):
        raise CheckpointError(f"{path}: hidden_act must be silu and swin_norm off; this decoder has nothing else")
    positions = config_int(config, "max_position_embeddings", path)
    if positions is None or positions < grid**2 + 2:
        raise CheckpointError(
            f"{path}: max_position_embeddings is {positions}, expected more than the {grid**2} codes of an image"
        )
    return DecoderConfig(
        hidden_size=width,
        num_layers=known["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=num_kv_heads,
        intermediate_size=intermediate_size,
        vocab_size=vocabulary,
        grid=grid,
        prefix=min(positions - grid**2, _LONGEST_PROMPT),
        norm_eps=config_float(config, "rms_norm_eps", 1e-6, path),
        rope_base=rope_base(config, path),
        rotary="sequence",
        rope_style="half",
        query_key_norm=layer + "self_attn.q_norm.weight" in weights,
    )


def rope_base(config: Mapping[str, Any], path: Path) -> float:
    """Base of the rotary frequencies; newer configurations have it under `rope_parameters`."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default")) if isinstance(scaling, Mapping) else scaling
    if kind != "default":
        raise CheckpointError(f"{path}: rotary positions are of type {kind!r}, expected plain ones (default)")
    return config_float(scaling if "rope_theta" in scaling else config, "rope_theta", 10000.0, path)


def rename_layers(weights: Weights, prefix: str, layers: int, width: int, path: Path) -> tuple[Weights, dict[str, str]]:
    """Weights with the layers' and the final norm's under our names, and the map from our names to the file's.

    Queries, keys and values become one weight; other names are left as they are. CheckpointError if a layer lacks
    one of the three, or has another width.
    """
    shown = {"norm.weight": f"{prefix}norm.weight"}
    for i in range(layers):
        shown |= {f"layers.{i}.{ours}": f"{prefix}layers.{i}.{theirs}" for ours, theirs in _NAMES.items()}
    back = {theirs: ours for ours, theirs in shown.items()}
    left = dict(weights)
    renamed: Weights = {}
    for i in range(layers):
        parts = [f"{prefix}layers.{i}.self_attn.{part}_proj.weight" for part in "qkv"]
        for name in parts:
            if shape_of(weights, name, 2, path)[1] != width:
                raise CheckpointError(
                    f"{path}: weight {name} has shape {list(weights[name].shape)}, expected [.., {width}]"
                )
        renamed[f"layers.{i}.attention.qkv.weight"] = joined([left.pop(name) for name in parts])
    return renamed | {back.get(name, name): tensor for name, tensor in left.items()}, shown
