"""A trained drafter's folder in LANTERN's layout: config.json, which also says what it is, and model.safetensors."""

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
from ...output.files import atomic_folder

MARKER = "config.json"


def save_drafter(drafter: EagleDrafter, output: Path, fields: Mapping[str, Any], force: bool = False) -> None:
    """Write a drafter's folder, whole or not at all.

    Args:
        drafter: its weights.
        output: the folder.
        fields: of config.json, besides sizes.
        force: replace a drafter's folder that is there.

    Raises:
        OutputError: it cannot be written.
    """
    weights = lantern_weights(drafter)
    config = {**lantern_config(drafter.config, drafter.embed.num_embeddings), **fields}
    with atomic_folder(output, force, MARKER) as folder:
        (folder / "model.safetensors").write_bytes(save(weights, {"format": "pt"}))
        (folder / MARKER).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


def lantern_config(config: DecoderConfig, tokens: int) -> dict[str, Any]:
    """Sizes as LANTERN's config.json has them."""
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
        "vocab_size": tokens,
    }


def lantern_weights(drafter: EagleDrafter) -> dict[str, Tensor]:
    """Weights by LANTERN's names, float32; the head is the target's and not among them."""
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
        if part == "attention.qkv.weight":
            heads = [sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads]
            rows = stored.split([count * sizes.head_dim for count in heads])
            own = dict(zip(("query", "key", "value"), rows, strict=True))
            weights |= {f"layers.{number}.{LAYER_NAMES[f'attention.{p}.weight']}": w.clone() for p, w in own.items()}
        else:
            weights[f"layers.{number}.{LAYER_NAMES[part]}"] = stored
    return weights
