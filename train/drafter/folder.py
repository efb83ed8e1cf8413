"""Writing of a trained drafter as a folder in LANTERN's layout: config.json and model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from ...export.models.decoder import DecoderConfig
from ...export.models.eagle import EagleDrafter
from ...export.models.llama import LAYER_NAMES
from ...output.files import write_folder_atomically

MARKER = "config.json"


def save_drafter(drafter: EagleDrafter, output: Path, config_fields: Mapping[str, Any], force: bool = False) -> None:
    """Write a drafter as a folder, completely or not at all; `config_fields` are those that are not sizes."""
    weights = convert_to_lantern_weights(drafter)
    config = {**make_lantern_config(drafter.config, drafter.embed.num_embeddings), **config_fields}
    with write_folder_atomically(output, force, MARKER) as folder:
        (folder / "model.safetensors").write_bytes(save(weights, {"format": "pt"}))
        (folder / MARKER).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


def make_lantern_config(config: DecoderConfig, vocab_size: int) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": vocab_size,
    }


def convert_to_lantern_weights(drafter: EagleDrafter) -> dict[str, Tensor]:
    """Return the weights in float32, by LANTERN's names, without the output layer, which is the target's."""
    weights: dict[str, Tensor] = {}
    sizes = drafter.config
    for name, weight in drafter.state_dict().items():
        stored = weight.detach().float().cpu().contiguous()
        prefix, _, rest = name.partition(".")
        if prefix == "head":
            continue
        if prefix != "layers":
            weights[name.replace("embed.", "embed_tokens.")] = stored
            continue
        number, _, part = rest.partition(".")
        if part == "attention.qkv.weight":  # LANTERN stores queries, keys and values in separate matrices
            heads = [sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads]
            rows = stored.split([count * sizes.head_dim for count in heads])
            for projection, matrix in zip(("query", "key", "value"), rows, strict=True):
                weights[f"layers.{number}.{LAYER_NAMES[f'attention.{projection}.weight']}"] = matrix.clone()
        else:
            weights[f"layers.{number}.{LAYER_NAMES[part]}"] = stored
    return weights
