"""EAGLE drafter with random weights for the small Lumina-mGPT of the tests."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def save_random_drafter(folder: Path) -> None:
    """Save a drafter with random weights for the small Lumina-mGPT, as a checkpoint in the layout of LANTERN."""
    up_shape = (112, 64)
    down_shape = (64, 112)
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (518, 64), "fc.weight": (64, 128), "fc.bias": (64,)}
    layer = {f"self_attn.{part}_proj.weight": (64, 64) for part in "qkvo"}
    layer |= {f"self_attn.{part}_norm.{kind}": (1, 16) for part in "qk" for kind in ("weight", "bias")}
    layer |= {"mlp.gate_proj.weight": up_shape, "mlp.up_proj.weight": up_shape, "mlp.down_proj.weight": down_shape}
    shapes |= {f"layers.0.{name}": shape for name, shape in layer.items()}
    shapes |= {f"layers.0.{name}_layernorm.weight": (64,) for name in ("input", "post_attention")}
    generator = torch.Generator().manual_seed(0)
    folder.mkdir()
    weights = {name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    sizes = {"hidden_size": 64, "intermediate_size": 112, "num_attention_heads": 4, "num_hidden_layers": 1}
    config = {"model_type": "chameleon", "vocab_size": 518, "rms_norm_eps": 1e-5, **sizes}
    (folder / "config.json").write_text(json.dumps(config))
