"""VQGAN tokenizers in taming-transformers' layout: `vqgan.yaml` with `vqgan.ckpt`, as Chameleon, Anole and Lumina have.

The modules are LlamaGen's (`llamagen_vq.py`); only names of weights and the use of the codebook differ. Sizes
come from the weights; the configuration is read for the size of pictures, and checked against the weights.

Does not know transformers, prompts or how codes are chosen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from ...errors import CheckpointError
from ..checkpoints.files import Weights, config_int, count_blocks, read_weights
from .llamagen_vq import LlamaGenVQ, fill_vq

_CODEBOOK = "quantize.embedding.weight"
_LOSS = "loss."  # weights of the training loss, of no use here
_RENAMES = (
    (r"\.down\.(\d+)\.block\.", r".conv_blocks.\1.res."),
    (r"\.down\.(\d+)\.", r".conv_blocks.\1."),
    (r"\.up\.(\d+)\.block\.", r".conv_blocks.\1.res."),
    (r"\.up\.(\d+)\.", r".conv_blocks.\1."),
    (r"\.mid\.block_1\.", ".mid.0."),
    (r"\.mid\.attn_1\.", ".mid.1."),
    (r"\.mid\.block_2\.", ".mid.2."),
)


@dataclass(frozen=True)
class VQGANFiles:
    """A tokenizer, the files it came from, and the rows of codes of the pictures it was trained on, if known."""

    vq: LlamaGenVQ
    files: list[Path]
    grid: int | None


def read_vqgan(path: Path) -> VQGANFiles:
    """The tokenizer in a folder with `vqgan.ckpt` and `vqgan.yaml`, or in a .ckpt file with its .yaml beside it."""
    checkpoint = path / "vqgan.ckpt" if path.is_dir() else path
    if not checkpoint.is_file():
        raise CheckpointError(f"{path}: expected a folder with vqgan.ckpt and vqgan.yaml, or a .ckpt file")
    weights = {name: weight for name, weight in read_weights(checkpoint).items() if not name.startswith(_LOSS)}
    if _CODEBOOK not in weights or not count_blocks(weights, "encoder.down."):
        raise CheckpointError(
            f"{checkpoint}: has no {_CODEBOOK} with encoder.down.0, so it is no VQGAN in taming-transformers' layout"
        )
    named, shown = rename_vqgan(weights)
    vq = fill_vq(named, checkpoint, shown, unit_decoding=False, unit_encoding=False)
    settings = checkpoint.with_suffix(".yaml")
    if not settings.is_file():
        return VQGANFiles(vq, [checkpoint], None)
    return VQGANFiles(vq, [checkpoint, settings], _grid(settings, vq))


def rename_vqgan(weights: Weights, coarsest_first: bool = False) -> tuple[Weights, dict[str, str]]:
    """Weights under LlamaGen's names, and the map from these to the given names.

    `coarsest_first`: whether the decoder's levels are numbered as they run; taming numbers them the other way.
    """
    levels = count_blocks(weights, "decoder.up.")
    named: Weights = {}
    shown: dict[str, str] = {}
    for name, weight in weights.items():
        ours = name
        for pattern, replacement in _RENAMES:
            ours = re.sub(pattern, replacement, ours)
        if name.startswith("decoder.up.") and not coarsest_first:
            ours = re.sub(r"conv_blocks\.(\d+)", lambda found: f"conv_blocks.{levels - 1 - int(found[1])}", ours)
        named[ours], shown[ours] = weight, name
    return named, shown


def _grid(path: Path, vq: LlamaGenVQ) -> int:
    """Rows of codes; CheckpointError where the configuration contradicts the weights."""
    parameters = _parameters(path)
    sizes = parameters.get("ddconfig")
    if not isinstance(sizes, Mapping):
        raise CheckpointError(f"{path}: expected the model's sizes under model.params.ddconfig, found none")
    config = vq.config
    known = {"n_embed": config.codes, "embed_dim": config.code_width}
    for name, found in known.items():
        if config_int(parameters, name, path) not in (None, found):
            raise CheckpointError(f"{path}: {name} is {parameters[name]}, but the weights have {found}")
    known = {"z_channels": config.latent_width, "ch": config.encoder_stem, "num_res_blocks": config.blocks}
    for name, found in known.items():
        if config_int(sizes, name, path) not in (None, found):
            raise CheckpointError(f"{path}: {name} is {sizes[name]}, but the weights have {found}")
    pixels = config_int(sizes, "resolution", path)
    if pixels is None or pixels % config.scale:
        raise CheckpointError(f"{path}: resolution is {pixels}, expected a multiple of {config.scale} pixels")
    return pixels // config.scale


def _parameters(path: Path) -> Mapping[str, Any]:
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise CheckpointError(f"{path}: expected YAML, found {' '.join(str(error).split())[:100]}") from error
    for name in ("model", "params"):
        content = content.get(name) if isinstance(content, Mapping) else None
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path}: expected the model's parameters under model.params, found none")
    return content
