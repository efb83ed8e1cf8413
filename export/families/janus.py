"""Janus and Janus-Pro as transformers saves them: one folder with language model, generation head and image tokenizer.

A Llama decoder whose pictures have a vocabulary of their own: codes go in through an embedding and a small network
(folded into one table here) and come out of a head with a hidden layer. Prompts are chat turns; the unconditional row
is the prompt with padding for its text. LANTERN has no drafter for it.

Does not know how graphs and bundles are written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...bundle.manifest import TokenLayout
from ...errors import CheckpointError
from ...methods import Sampling
from ..checkpoints.deferred import without_weights
from ..checkpoints.files import Weights, config_float, config_int, count_blocks, fill, read_config, shape_of
from ..checkpoints.folders import find_weights, read_weight_files
from ..models.decoder import Decoder
from ..models.hf_decoder import decoder_sizes, rename_layers
from ..models.llamagen_vq import fill_vq
from ..models.vqgan import rename_vqgan
from ..writer import check_output, write_bundle
from .common import Model, export_model, find_tokenizer, token_condition

_LANGUAGE, _VQ, _HEAD = "model.language_model.", "model.vqmodel.", "model.generation_head."
_TEXT, _CODES, _ALIGNER = (
    f"{_LANGUAGE}embed_tokens.weight",
    "model.generation_embeddings.weight",
    "model.generation_aligner.",
)
_UNUSED = ("model.vision_model.", "model.aligner.", "lm_head.")  # for reading pictures and writing text
_HEAD_NAMES = {
    f"head.{ours}.{part}": f"{_HEAD}{theirs}.{part}"
    for ours, theirs in (("first", "proj_out"), ("second", "vision_head"))
    for part in ("weight", "bias")
}
_TEMPLATE = "<|User|>: {prompt}\n\n<|Assistant|>:"


def export_janus(
    target: Path,
    output: Path,
    *,
    name: str | None = None,
    force: bool = False,
    origins: Mapping[Path, str] | None = None,
    progress: Callable[[str], None] | None = None,
    write: Callable[..., Path] = write_bundle,
) -> Path:
    """Export a Janus folder; returns the bundle's folder. `origins` and `write`: as in `export_model`."""
    check_output(output, force)
    if progress:
        progress("reading checkpoint")
    model = read_janus(target)
    return export_model(model, output, name=name, force=force, origins=origins, progress=progress, write=write)


def read_janus(folder: Path) -> Model:
    """The model in a folder with config.json, generation_config.json, tokenizer.json and weights."""
    path, generation_path = folder / "config.json", folder / "generation_config.json"
    config, generation = read_config(path), read_config(generation_path)
    if config.get("model_type") != "janus":
        raise CheckpointError(f"{path}: model_type is {config.get('model_type')!r}, expected 'janus'")
    text, vision, vq = (_section(config, name, path) for name in ("text_config", "vision_config", "vq_config"))
    if vq.get("hidden_act", "gelu") != "gelu":
        raise CheckpointError(f"{path}: vq_config.hidden_act is {vq['hidden_act']!r}, expected 'gelu'")
    pixels, patch = config_int(vision, "image_size", path), config_int(vision, "patch_size", path)
    if pixels is None or patch is None:
        raise CheckpointError(f"{path}: vision_config lacks image_size or patch_size, which tell the rows of codes")
    found = find_weights(folder)
    weights = read_weight_files(found, keep=lambda weight: not weight.startswith(_UNUSED))
    codes = shape_of(weights, _CODES, 2, folder)[0]
    sizes = decoder_sizes(text, path, weights, folder, _LANGUAGE, codes, grid=pixels // patch)
    sizes = replace(sizes, head_hidden=shape_of(weights, _HEAD_NAMES["head.first.weight"], 2, folder)[0])
    images, shown = rename_vqgan(_take(weights, _VQ), coarsest_first=True)
    image = fill_vq(images, folder, {ours: _VQ + theirs for ours, theirs in shown.items()}, unit_encoding=False)
    code_embeddings = _fold_codes(weights.pop(_CODES), _take(weights, _ALIGNER), folder)
    text_embeddings = weights.pop(_TEXT)
    named, shown = rename_layers(weights, _LANGUAGE, sizes.num_layers, sizes.hidden_size, folder)
    back = {theirs: ours for ours, theirs in _HEAD_NAMES.items()}
    with without_weights():
        decoder = Decoder(sizes)
    fill(decoder, {back.get(weight, weight): tensor for weight, tensor in named.items()}, folder, shown | _HEAD_NAMES)
    tokenizer = find_tokenizer(folder)
    sources = [("target", file) for file in found.all_files]
    sources += [("target_config", path), ("generation_config", generation_path), ("tokenizer", tokenizer)]
    return Model(
        family="janus",
        decoder=decoder,
        code_embeddings=code_embeddings,
        condition=token_condition(text_embeddings, sizes.prefix, _layout(generation, generation_path), tokenizer),
        vq=image,
        sampling=Sampling(cfg_scale=config_float(generation, "guidance_scale", 5.0, generation_path)),
        sources=sources,
    )


def _section(config: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    section = config.get(name)
    if not isinstance(section, Mapping):
        raise CheckpointError(f"{path}: has no {name}, expected one as transformers writes it")
    return section


def _take(weights: Weights, prefix: str) -> Weights:
    """Remove the weights with a prefix and return them without it."""
    return {name.removeprefix(prefix): weights.pop(name) for name in list(weights) if name.startswith(prefix)}


def _fold_codes(codes: Tensor, aligner: Weights, folder: Path) -> Tensor:
    """What the language model reads for each code, `[codes, width]`: the small network applied to every code."""
    layers = ["fc1", *(f"hidden_layers.{i}" for i in range(count_blocks(aligner, "hidden_layers.")))]
    wanted = {f"{layer}.{part}" for layer in layers for part in ("weight", "bias")}
    if aligner.keys() != wanted:
        raise CheckpointError(f"{folder}: {_ALIGNER} has {sorted(aligner)}, expected {sorted(wanted)}")
    codes = codes.float()
    with torch.no_grad():
        for i, layer in enumerate(layers):
            weight, bias = (aligner[f"{layer}.{part}"].float() for part in ("weight", "bias"))
            codes = F.linear(F.gelu(codes) if i else codes, weight, bias)
    return codes


def _layout(generation: Mapping[str, Any], path: Path) -> TokenLayout:
    """Prompt as chat turn between start of text and begin of image; unconditional, padding in place of the turn."""
    extra = generation.get("generation_kwargs")
    ids = dict(generation) | (dict(extra) if isinstance(extra, Mapping) else {})
    names = ("bos_token_id", "pad_token_id", "boi_token_id")
    if missing := [name for name in names if type(ids.get(name)) is not int]:
        raise CheckpointError(
            f"{path}: has no {', '.join(missing)}; give the folder that transformers' Janus loads from"
        )
    start, padding, begin = (ids[name] for name in names)
    return TokenLayout(template=_TEMPLATE, before=(start,), after=(begin,), uncond_fill=padding)
