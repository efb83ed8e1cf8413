"""Conversion of a bundle into a work folder, so that training can continue without the old checkpoints.

The bundle's weights are rounded to float16 or integers. The code tables have no feature map.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from lantern_rt.bundle.files import Bundle, open_bundle
from lantern_rt.bundle.weights import StoredWeights
from lantern_rt.export.models.decoder import DecoderConfig
from lantern_rt.export.models.eagle import EagleDrafter
from lantern_rt.export.writer import check_output_folder
from lantern_rt.train.drafter.folder import save_drafter

from .checkpoints import save_checkpoint
from .model import CONFIG, ScenesTarget
from .vq import VQ_SIZES, ScenesVQ


def restore_work_folder(bundle: Path | str, work_folder: Path, only_vq: bool = False) -> None:
    """Write `vq.pt`, `target.pt` and the folder `drafter` from a scenes bundle.

    Args:
        bundle: folder or name of a scenes bundle.
        work_folder: folder to write, which must not exist.
        only_vq: whether to write only `vq.pt`, for training a target of another size on the same codes.

    Raises:
        OutputError: the work folder exists.
    """
    check_output_folder(work_folder, force=False)
    opened = open_bundle(bundle)
    vq = _restore_vq(opened)
    save_checkpoint(work_folder / "vq.pt", {"model": vq.state_dict(), "config": asdict(vq.config)})
    if only_vq:
        return
    target = _restore_target(opened, vq.codebook)
    weights = {"model": target.state_dict(), "seen": 0, "config": asdict(target.config)}
    save_checkpoint(work_folder / "target.pt", weights | {"cfg_scale": opened.manifest.sampling.cfg_scale})
    save_drafter(_restore_drafter(opened, target.config), work_folder / "drafter", {})


def _read_graph_weights(bundle: Bundle, graph_name: str) -> dict[str, Tensor]:
    """Return the weights of a bundle's graph as float32 tensors, by name."""
    weights = StoredWeights(bundle.path(graph_name))
    names = (name for name, weight in weights.items() if weight.dtype and not name.endswith(".scales"))
    return {name: torch.from_numpy(weights.float32(name)) for name in names}


def _restore_vq(bundle: Bundle) -> ScenesVQ:
    graph_weights = {name.removeprefix("vq."): w for name, w in _read_graph_weights(bundle, "vq_encoder").items()}
    graph_weights |= _read_graph_weights(bundle, "vq_decoder")
    codebook = graph_weights["codebook"]
    vq = ScenesVQ(replace(VQ_SIZES[str(bundle.manifest.image_height)], codes=len(codebook)))
    networks = {name: w for name, w in graph_weights.items() if name.startswith(("encoder.", "decoder."))}
    table = {"codebook": codebook, "sums": codebook.clone(), "members": torch.ones(len(codebook))}
    vq.load_state_dict(networks | table)
    return vq


def _restore_target(bundle: Bundle, codebook: Tensor) -> ScenesTarget:
    spec = bundle.manifest.target
    graph_weights = _read_graph_weights(bundle, "target")
    config = replace(
        CONFIG,
        vocab_size=len(codebook),
        hidden_size=spec.hidden_size,
        num_layers=spec.num_layers,
        num_heads=spec.hidden_size // spec.head_dim,
        num_kv_heads=spec.num_kv_heads,
        intermediate_size=graph_weights["layers.0.ffn.gate.weight"].shape[1],
    )
    target = ScenesTarget(codebook, config)
    layers = {
        f"decoder.{name}": w
        for name, w in _convert_layer_weights(graph_weights, config.num_layers, config.head_dim).items()
    }
    embeds = _read_graph_weights(bundle, "condition")
    condition = {
        name: embeds[name].view_as(tensor)
        for name, tensor in target.named_parameters()
        if name in ("words.weight", "slots", "uncond_embedding")
    }
    tables = {
        "code_embedding": torch.from_numpy(bundle.code_embeddings.copy()),
        "code_head": graph_weights["head.weight"].T,
    }
    for part, table in tables.items():  # the learned rows hold the whole table, so the feature map is zero
        module = getattr(target, part)
        condition |= {
            f"{part}.rows": table,
            f"{part}.map": torch.zeros_like(module.map),
            f"{part}.features": module.features,
        }
    target.load_state_dict(layers | condition | {"decoder.norm.weight": graph_weights["norm.weight"]})
    return target


def _restore_drafter(bundle: Bundle, target_config: DecoderConfig) -> EagleDrafter:
    graph_weights = _read_graph_weights(bundle, "drafter")
    config = replace(target_config, num_layers=1, prefix=target_config.prefix - 1, input_norm=False, final_norm=False)
    drafter = EagleDrafter(config, nn.Linear(config.hidden_size, config.vocab_size, bias=False), bias=True)
    outer = {name: graph_weights[name] for name in ("embed.weight", "fc.bias")} | {
        name: graph_weights[name].T for name in ("fc.weight", "head.weight")
    }
    drafter.load_state_dict(_convert_layer_weights(graph_weights, 1, target_config.head_dim) | outer)
    return drafter


def _convert_layer_weights(graph_weights: dict[str, Tensor], num_layers: int, head_dim: int) -> dict[str, Tensor]:
    """Convert the weights of decoder layers from the ONNX graph's form to the form of the PyTorch modules.

    The graph's matrices are transposed, and its query weights are multiplied by the attention scale.
    """
    layer_weights = {}
    for i in range(num_layers):
        at = f"layers.{i}."
        qkv = graph_weights[f"{at}attention.qkv.weight"].T.clone()
        qkv[: qkv.shape[1]] *= head_dim**0.5  # the first `width` rows are the queries
        layer_weights[f"{at}attention.qkv.weight"] = qkv
        for name in ("attention.out", "ffn.gate", "ffn.up", "ffn.down"):
            layer_weights[f"{at}{name}.weight"] = graph_weights[f"{at}{name}.weight"].T
        norms = (f"{at}{name}.weight" for name in ("attention_norm", "ffn_norm"))
        layer_weights |= {name: graph_weights[name] for name in norms if name in graph_weights}
    return {name: weight.contiguous() for name, weight in layer_weights.items()}
