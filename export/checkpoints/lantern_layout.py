"""LANTERN's own layout of LlamaGen transformers, told in the official names.

LANTERN publishes LlamaGen as a Hugging Face folder: `config.json` with Llama's field names and weights with
Llama's names, queries, keys and values apart. Here both become what LlamaGen's own files hold, so that one
reader (`llamagen_gpt.py`) serves both; the names of the file are kept for messages.

Does not know graphs or modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from .deferred import joined
from .files import Weights, count_blocks, shape_of

MARKS = ("model.cls_embedding.uncond_embedding", "model.cls_embedding.embedding_table.weight")

_NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "cls_embedding.embedding_table.weight": "model.cls_embedding.embedding_table.weight",
    "cls_embedding.uncond_embedding": "model.cls_embedding.uncond_embedding",
    "cls_embedding.cap_proj.fc1.weight": "model.cls_embedding.cap_proj.fc1.weight",
    "cls_embedding.cap_proj.fc2.weight": "model.cls_embedding.cap_proj.fc2.weight",
}
_LAYER_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
}
_FIELDS = {  # the official argument, and the field of LANTERN's config.json
    "dim": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "ffn_hidden": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "model_type": "input_type",
}
_SAME = ("vocab_size", "block_size", "cls_token_num", "num_classes", "caption_dim", "rope_base")
_INPUT_TYPES = {"c2i": "c2i", "t2i": "t2i", "t2i2": "t2i"}  # t2i2: stage II
_NORM_EPS = 1e-6  # of Llama's configuration where the file does not say


def is_lantern_layout(weights: Mapping[str, Any]) -> bool:
    """Whether these are the weights of LlamaGen in LANTERN's layout."""
    return any(name in weights for name in MARKS)


def official_weights(weights: Weights, path: Path) -> tuple[Weights, dict[str, str]]:
    """Weights under official names, and the map from those names to the file's.

    Queries, keys and values `[heads * head_dim, width]` of a layer become one `wqkv`. Names that are not known
    are left as they are. Raises CheckpointError if a layer lacks one of the three.
    """
    shown = dict(_NAMES)
    left = dict(weights)
    official: Weights = {}
    for i in range(count_blocks(weights, "model.layers.")):
        at = f"model.layers.{i}"
        shown |= {f"layers.{i}.{ours}": f"{at}.{theirs}" for ours, theirs in _LAYER_NAMES.items()}
        shown[f"layers.{i}.attention.wqkv.weight"] = f"{at}.self_attn.{{q,k,v}}_proj.weight"
        parts = [f"{at}.self_attn.{part}_proj.weight" for part in "qkv"]
        widths = {shape_of(weights, name, 2, path)[1] for name in parts}
        if len(widths) > 1:
            shapes = ", ".join(str(list(weights[name].shape)) for name in parts)
            raise CheckpointError(f"{path}: {at}.self_attn has projections {shapes}, expected them of one width")
        official[f"layers.{i}.attention.wqkv.weight"] = joined([left.pop(name) for name in parts])
    back = {theirs: ours for ours, theirs in shown.items()}
    # Written by some versions beside the weights; it follows from the configuration.
    left = {name: tensor for name, tensor in left.items() if not name.endswith(".rotary_emb.inv_freq")}
    return official | {back.get(name, name): tensor for name, tensor in left.items()}, shown


def official_arguments(config: Mapping[str, Any], path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """A `config.json`'s fields as official arguments, and the map from those to the file's fields."""
    arguments = {name: config[name] for name in _SAME if name in config}
    arguments |= {ours: config[theirs] for ours, theirs in _FIELDS.items() if theirs in config}
    kind = arguments.get("model_type")
    if kind is not None:
        if kind not in _INPUT_TYPES:
            raise CheckpointError(f"{path}: input_type is {kind!r}, expected one of {', '.join(_INPUT_TYPES)}")
        arguments["model_type"] = _INPUT_TYPES[kind]
    return {"norm_eps": _NORM_EPS} | arguments, _FIELDS
