"""Anole and other Chameleon models: a folder in the layout of Hugging Face, a VQGAN and perhaps LANTERN's drafter.

Text and image tokens share one vocabulary. `vocabulary_map` in config.json names the image token of each code:
`IMGIMG`, the code's decimal digits as letters (A is 0, J is 9), `Z`. Only the head's rows of these tokens are exported.
A prompt is `<s>`, the text, end of turn, begin of image; the unconditional row is `<s>`, begin of image.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ...bundle.conditions import TokenLayout
from ...engines.contracts import Progress
from ...errors import CheckpointError
from ...inputs import format_value
from ...methods import Sampling
from ..checkpoints.deferred import without_weights
from ..checkpoints.files import Config, listing, raises_checkpoint_error
from ..checkpoints.folders import Checkpoint
from ..checkpoints.lora import Adapter
from ..graph.conditions import Condition, token_condition
from ..model import Model
from ..models.decoder import Decoder
from ..models.eagle import read_drafter
from ..models.llama import decoder_config, rename_llama
from ..models.vq_checkpoints import VQGAN, read_vqgan
from ..progress import silent
from .common import check_grid, image_model

_DIGITS = str.maketrans("ABCDEFGHIJ", "0123456789")
CHAMELEON = "ChameleonForConditionalGeneration"
LUMINA = "ChameleonXLLMXForConditionalGeneration"
_REPOSITORIES = {CHAMELEON: "leloy/Anole-7b-v0.1-hf", LUMINA: "Alpha-VLLM/Lumina-mGPT-7B-768"}
_LUMINA_FIELD = "mask_image_logits"  # only configurations of Lumina-mGPT have this field
PROMPT_TOKENS = ("<s>", "<reserved08706>", "<racm3:break>")  # start, end of turn, begin of image
_VQ_PREFIX = "model.vqmodel."  # image encoder, which the VQGAN's files contain with the decoder
_NAMES = {"embed.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight"}
# Fields with equal values in config.json of the drafter and of its target.
_SHARED = ("model_type", "vocabulary_map", *(f"{name}_token_id" for name in ("bos", "eos", "boi", "eoi", "image")))
# LANTERN's settings for Anole: guidance 3, the 2000 likeliest codes, top-p before top-k.
_SAMPLING = Sampling(cfg_scale=3.0, top_k=2000, filter_order="top-p, top-k")


class Chameleon(NamedTuple):
    """Parts of a target.

    Args:
        decoder: decoder with the head's rows of the codes.
        embeddings: embeddings of all tokens, `[tokens, hidden_size]`.
        codes: token ids of the codes; code c is token `codes[c]`.
        condition: conversion of prompts to prefix rows.
        sources: files with roles.
        names: token ids by name.
        config: configuration file.
    """

    decoder: Decoder
    embeddings: Tensor
    codes: range
    condition: Condition
    sources: list[tuple[str, Path]]
    names: Mapping[str, int]
    config: Config


def _layout(names: Mapping[str, int]) -> TokenLayout:
    start, end, begin = (names[name] for name in PROMPT_TOKENS)
    return TokenLayout(before=(start,), after=(end, begin), uncond=(start, begin))


@raises_checkpoint_error
def read_anole(
    target: Path,
    vq: Path,
    *,
    drafter: Path | None = None,
    grid: int | None = None,
    lora: Sequence[Adapter] = (),
    progress: Progress = silent,
) -> Model:
    """Read Anole with its VQGAN.

    Args:
        target: folder with config.json, tokenizer.json and weights.
        vq: folder with vqgan.ckpt and vqgan.yaml, or the .ckpt file.
        drafter: folder in LANTERN's layout, None without a drafter.
        grid: grid rows, by default as many as the resolution in vqgan.yaml has.
        lora: adapters to merge into the target.
        progress: progress callback.

    Raises:
        CheckpointError: a file is missing or damaged, or belongs to another model.
        RequestError: `grid` is out of range.
    """
    check_grid(grid)
    Checkpoint(target).model_config(_REPOSITORIES[CHAMELEON], "chameleon")  # before large files are read
    vqgan = read_vqgan(vq, progress)
    rows = grid or vqgan.grid
    if rows is None:
        raise CheckpointError(
            field="grid", found="nothing, and no .yaml beside the .ckpt", expected="the number of grid rows"
        )
    if vqgan.grid not in (None, rows):
        raise CheckpointError(field="grid", found=str(rows), expected=f"{vqgan.grid}, as in the .yaml of vq, or none")
    model = read_chameleon(target, rows, lora=lora, progress=progress)
    return chameleon_model(model, vqgan, drafter, progress, family="anole", sampling=_SAMPLING)


@raises_checkpoint_error
def read_chameleon(
    folder: Path,
    grid: int,
    architecture: str = CHAMELEON,
    tokens: Sequence[str] = PROMPT_TOKENS,
    layout: Callable[[Mapping[str, int]], TokenLayout] = _layout,
    max_image_tokens: int = 0,
    lora: Sequence[Adapter] = (),
    progress: Progress = silent,
    vocabulary: tuple[range, Mapping[str, int]] | None = None,
) -> Chameleon:
    """Read a Chameleon target.

    Args:
        folder: folder with config.json, tokenizer.json and weights.
        grid: grid rows of an image.
        architecture: expected model class in transformers.
        tokens: names of the tokens in prompts and images, besides the codes.
        layout: function that returns the prompt layout for token ids by name.
        max_image_tokens: number of tokens of the longest image; 0 for `grid * grid`.
        lora: adapters to merge into the weights.
        progress: progress callback.
        vocabulary: token ids of the codes, and token ids by name; None: from `vocabulary_map` in config.json.

    Raises:
        CheckpointError: the folder has another model, or a file is missing or damaged.
    """
    checkpoint = Checkpoint(folder, progress=progress, adapters=lora)
    config = chameleon_config(checkpoint, architecture, _REPOSITORIES[architecture])
    tokenizer = checkpoint.tokenizer()
    codes, names = vocabulary or _read_vocabulary(config, tokens)
    checkpoint.read(keep=lambda name: not name.startswith(_VQ_PREFIX))
    rename_llama(checkpoint, "model.", _NAMES)
    highest = max(codes.stop - 1, *(names[name] for name in tokens))
    for name in _NAMES:
        rows = checkpoint.shape(name)[0]
        if rows <= highest:
            expected = f"more, as config.json has tokens up to {highest}"
            raise checkpoint.error(name, found=f"{rows} rows", expected=expected)
    with without_weights():
        # Lumina-mGPT's published program ignores `max_position_embeddings`: it computes rotations for all positions.
        limits_positions = architecture == CHAMELEON
        sizes = decoder_config(
            checkpoint, config, len(codes), grid, max_image_tokens=max_image_tokens, limits_positions=limits_positions
        )
        decoder = Decoder(sizes)
    embeddings = checkpoint.weights.pop("embed.weight")
    checkpoint.weights["head.weight"] = checkpoint.weights["head.weight"][codes.start : codes.stop]
    checkpoint.load_strict(decoder)
    named_tokens = {name: names[name] for name in tokens}
    condition = token_condition(embeddings, decoder.config.prefix, layout(names), tokenizer, named_tokens)
    return Chameleon(decoder, embeddings, codes, condition, checkpoint.sources, names, config)


def chameleon_config(checkpoint: Checkpoint, architecture: str, repository: str) -> Config:
    """Read config.json and check the model class.

    Args:
        checkpoint: the folder.
        architecture: expected model class in transformers.
        repository: repository on the hub with the expected layout.

    Raises:
        CheckpointError: the folder has another model.
    """
    config = checkpoint.model_config(repository, "chameleon")
    detected = LUMINA if _LUMINA_FIELD in config.values else CHAMELEON
    configured = config.get("architectures", [detected])
    if configured != [architecture] or detected != architecture:
        contents = f"{format_value(configured)} {'with' if detected == LUMINA else 'without'} {_LUMINA_FIELD}"
        remedy = "family anole takes Anole, family lumina Lumina-mGPT"
        raise config.error("architectures", found=contents, expected=f"a {architecture}", remedy=remedy)
    return config


def chameleon_model(
    target: Chameleon,
    vqgan: VQGAN,
    drafter: Path | None,
    progress: Progress,
    extra_tokens: int = 0,
    **fields: Any,
) -> Model:
    """Return the contents of a bundle with a Chameleon target.

    Args:
        target: the target.
        vqgan: the image tokenizer.
        drafter: folder of the drafter, None without a drafter.
        progress: progress callback.
        extra_tokens: number of tokens after the codes, up to the end-of-row token.
        fields: other arguments of `image_model`.

    Raises:
        CheckpointError: the drafter is damaged or of another target.
    """
    loaded_drafter = None
    if drafter is not None:
        shared = {name: (value,) for name in _SHARED if (value := target.config.get(name)) is not None}
        tokens = len(target.embeddings)
        offset = target.codes.start
        loaded_drafter = read_drafter(drafter, target.decoder, tokens, shared, progress, code_offset=offset)
    return image_model(
        decoder=target.decoder,
        # A drafter computes token ids as `code_offset` + index in this table, so the table may skip no token.
        code_embeddings=target.embeddings[target.codes.start : target.codes.stop + extra_tokens],
        condition=target.condition,
        vq=vqgan.vq,
        sources=[*target.sources, *vqgan.sources],
        drafter=loaded_drafter,
        **fields,
    )


def _read_vocabulary(config: Config, needed: Sequence[str]) -> tuple[range, Mapping[str, int]]:
    """Return the token ids of the codes and the token ids by name, which include the names in `needed`."""
    names = config.get("vocabulary_map")
    if not isinstance(names, dict) or any(type(token) is not int or token < 0 for token in names.values()):
        raise config.error("vocabulary_map", expected="token ids by names, image tokens included")
    if missing := [name for name in needed if name not in names]:
        raise config.error("vocabulary_map", f"lacks {listing(missing)}")
    codes = {name: re.fullmatch("IMGIMG([A-J]+)Z", name) for name in names}
    tokens = {int(code[1].translate(_DIGITS)): names[name] for name, code in codes.items() if code}
    first = tokens.get(0, 0)
    count = len(tokens)
    if count < 2 or any(tokens.get(code) != first + code for code in range(count)):
        expected = "image tokens of codes 0, 1, ... with consecutive ids"
        raise config.error("vocabulary_map", found=f"{count} image tokens (IMGIMG..Z)", expected=expected)
    return range(first, first + count), names
