"""A work folder from a bundle, so that training can go on where only the bundle is left.

Weights come back as the bundle has them, rounded to float16; code tables come back as plain rows.
"""

from __future__ import annotations

from pathlib import Path

import onnx
import torch
from onnx import numpy_helper
from torch import Tensor

from ...bundle import open_bundle
from ...export.bundle_writer import check_output
from .checkpoints import save_checkpoint
from .drafter import ScenesDrafter
from .model import ScenesTarget
from .vq import ScenesVQ


def restore_work(bundle: Path | str, work: Path) -> None:
    """Write `vq.pt`, `target.pt` and `drafter.pt` from a scenes bundle; refuses a work folder that is there."""
    check_output(work, force=False)
    opened = open_bundle(bundle)
    stored = {
        role: _weights(opened.path(role)) for role in ("target", "drafter", "condition", "vq_decoder", "vq_encoder")
    }

    vq = ScenesVQ()
    codebook = stored["vq_decoder"]["codebook"]
    encoder = {
        name.removeprefix("vq."): w for name, w in stored["vq_encoder"].items() if name.startswith("vq.encoder.")
    }
    decoder = {name: w for name, w in stored["vq_decoder"].items() if name.startswith("decoder.")}
    table = {"codebook": codebook, "sums": codebook.clone(), "members": torch.ones(len(codebook))}
    vq.load_state_dict(encoder | decoder | table)

    target = ScenesTarget(codebook)
    width = target.config.width
    layers = {
        f"decoder.{name}": w
        for name, w in _layers(stored["target"], target.config.layers, width // target.config.heads).items()
    }
    condition = {
        name: stored["condition"][name].view_as(tensor)
        for name, tensor in target.named_parameters()
        if name in ("words.weight", "slots", "uncond_embedding")
    }
    rows = {
        "code_embedding.rows": torch.from_numpy(opened.code_embeddings().copy()),
        "code_head.rows": stored["target"]["head.weight"].T,
        "decoder.norm.weight": stored["target"]["norm.weight"],
    }
    for part in ("code_embedding", "code_head"):
        rows[f"{part}.map"] = torch.zeros_like(getattr(target, part).map)
        rows[f"{part}.features"] = getattr(target, part).features
    target.load_state_dict(layers | condition | rows)

    drafter = ScenesDrafter()
    inner = {f"body.{name}": w for name, w in _layers(stored["drafter"], 1, width // target.config.heads).items()}
    kept = drafter.state_dict()
    outer = {
        "embed_tokens.weight": stored["drafter"]["embed.weight"],
        "fc.weight": stored["drafter"]["fc.weight"].T,
        "fc.bias": stored["drafter"]["fc.bias"],
    }
    drafter.load_state_dict(kept | inner | outer)

    save_checkpoint(work / "vq.pt", {"model": vq.state_dict()})
    save_checkpoint(work / "target.pt", {"model": target.state_dict(), "seen": 0})
    save_checkpoint(work / "drafter.pt", {"model": drafter.state_dict(), "seen": 0})


def _weights(path: Path) -> dict[str, Tensor]:
    """Float weights of a graph by name, as float32."""
    stored = {}
    for tensor in onnx.load(path).graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.dtype.kind == "f":
            stored[tensor.name.removesuffix(".half")] = torch.tensor(array, dtype=torch.float32)
    return stored


def _layers(stored: dict[str, Tensor], layers: int, head_width: int) -> dict[str, Tensor]:
    """Weights of decoder layers as the torch modules name and lay them out: the graph's are transposed, and its
    queries carry the attention scale."""
    found = {}
    for i in range(layers):
        at = f"layers.{i}."
        qkv = stored[f"{at}attention.qkv.weight"].T.clone()
        qkv[: qkv.shape[1]] *= head_width**0.5
        found[f"{at}attention.qkv.weight"] = qkv
        for name in ("attention.out", "ffn.gate", "ffn.up", "ffn.down"):
            found[f"{at}{name}.weight"] = stored[f"{at}{name}.weight"].T
        for name in ("attention_norm", "ffn_norm"):
            if f"{at}{name}.weight" in stored:
                found[f"{at}{name}.weight"] = stored[f"{at}{name}.weight"]
    return {name: weight.contiguous() for name, weight in found.items()}
