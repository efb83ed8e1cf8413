"""Anole and other Chameleon models: a Hugging Face folder, a VQGAN and, if there is one, LANTERN's EAGLE drafter.

Chameleon reads and writes one vocabulary of text and image tokens. Image tokens are named in config.json's
`vocabulary_map`: `IMGIMG`, the code's decimal digits as letters (A is 0, J is 9), `Z`. Only their rows of the head
are kept. A prompt is `<s>`, the text, end of turn, begin of image; the unconditional row is `<s>`, begin of image.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ...bundle.manifest import TokenLayout
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
CHAMELEON, LUMINA = "ChameleonForConditionalGeneration", "ChameleonXLLMXForConditionalGeneration"
_REPOSITORIES = {CHAMELEON: "leloy/Anole-7b-v0.1-hf", LUMINA: "Alpha-VLLM/Lumina-mGPT-7B-768"}
_MARK = "mask_image_logits"  # a field of Lumina-mGPT's configurations
PROMPT_TOKENS = ("<s>", "<reserved08706>", "<racm3:break>")  # start, end of turn, begin of image
_VQ_PREFIX = "model.vqmodel."  # the image encoder inside the folder: the VQGAN's files have it whole
_NAMES = {"embed.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight"}
# Fields that a drafter's config.json shares with its target's.
_SHARED = ("model_type", "vocabulary_map", *(f"{name}_token_id" for name in ("bos", "eos", "boi", "eoi", "image")))
# LANTERN's settings for Anole: guidance 3, the 2000 likeliest codes, top-p before top-k.
_SAMPLING = Sampling(cfg_scale=3.0, top_k=2000, filter_order="top-p, top-k")


class Chameleon(NamedTuple):
    """A target taken apart. `embeddings [tokens, hidden_size]` of all tokens; code c is token `codes[c]`."""

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
    """The model of a Chameleon folder with its VQGAN.

    Args:
        target: config.json, tokenizer.json and weights.
        vq: a folder with vqgan.ckpt and vqgan.yaml, or the .ckpt.
        drafter: a folder in LANTERN's layout.
        grid: rows of codes, by default those of the VQGAN's own resolution.
        lora: merged into the target.

    Raises: CheckpointError, RequestError.
    """
    check_grid(grid)
    Checkpoint(target).model_config(_REPOSITORIES[CHAMELEON], "chameleon")  # before anything large is read
    image = read_vqgan(vq, progress)
    rows = grid or image.grid
    if rows is None:
        raise CheckpointError(field="grid", found="nothing, and no .yaml beside the .ckpt", expected="rows of codes")
    if image.grid not in (None, rows):
        raise CheckpointError(field="grid", found=str(rows), expected=f"{image.grid}, as in the .yaml of vq, or none")
    model = read_chameleon(target, rows, lora=lora, progress=progress)
    return chameleon_model(model, image, drafter, progress, family="anole", sampling=_SAMPLING)


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
) -> Chameleon:
    """The decoder in a Hugging Face folder.

    Args:
        folder: config.json, tokenizer.json and weights.
        grid: rows of codes of its pictures.
        architecture: the class in transformers that the model is expected to be of.
        tokens: names that its pictures and prompts need.
        layout: of prompts, by the ids of all names.
        max_image_tokens: of the longest picture, where that is not grid * grid.
        lora: merged into the weights.
        progress: how much of the weights is read.

    Raises:
        CheckpointError: it is another model.
    """
    checkpoint = Checkpoint(folder, progress=progress, adapters=lora)
    config = checkpoint.model_config(_REPOSITORIES[architecture], "chameleon")
    tokenizer = checkpoint.tokenizer()
    usual = LUMINA if _MARK in config.values else CHAMELEON
    configured = config.get("architectures", [usual])
    if configured != [architecture] or usual != architecture:
        found = f"{format_value(configured)} {'with' if usual == LUMINA else 'without'} {_MARK}"
        remedy = "family anole takes Anole, family lumina Lumina-mGPT"
        raise config.error("architectures", found=found, expected=f"a {architecture}", remedy=remedy)
    codes, names = _read_vocabulary(config, tokens)
    checkpoint.read(keep=lambda name: not name.startswith(_VQ_PREFIX))
    rename_llama(checkpoint, "model.", _NAMES)
    highest = max(codes.stop - 1, *(names[name] for name in tokens))
    for name in _NAMES:
        rows = checkpoint.shape(name)[0]
        if rows <= highest:
            expected = f"more, as config.json has tokens up to {highest}"
            raise checkpoint.error(name, found=f"{rows} rows", expected=expected)
    with without_weights():
        # Lumina-mGPT's own program turns queries and keys at any position, whatever config.json has.
        bounded = architecture == CHAMELEON
        sizes = decoder_config(checkpoint, config, len(codes), grid, max_image_tokens=max_image_tokens, bounded=bounded)
        decoder = Decoder(sizes)
    embeddings, head = checkpoint.weights.pop("embed.weight"), checkpoint.weights["head.weight"]
    checkpoint.weights["head.weight"] = head[codes.start : codes.stop]
    checkpoint.load_strict(decoder)
    named_tokens = {name: names[name] for name in tokens}
    condition = token_condition(embeddings, decoder.config.prefix, layout(names), tokenizer, named_tokens)
    return Chameleon(decoder, embeddings, codes, condition, checkpoint.sources, names, config)


def chameleon_model(
    target: Chameleon, image: VQGAN, drafter: Path | None, progress: Progress, further: int = 0, **fields: Any
) -> Model:
    """A bundle's model of a target, its image tokenizer and the drafter in a folder.

    further: tokens behind those of codes that pictures contain; fields: as of `image_model`. Raises: CheckpointError.
    """
    drafting = None
    if drafter is not None:
        fits = {name: (value,) for name in _SHARED if (value := target.config.get(name)) is not None}
        tokens, first = len(target.embeddings), target.codes.start
        drafting = read_drafter(drafter, target.decoder, tokens, fits, progress, code_offset=first)
    return image_model(
        decoder=target.decoder,
        # A drafter embeds tokens as far behind the first code as they are here, so none in between is left out.
        code_embeddings=target.embeddings[target.codes.start : target.codes.stop + further],
        condition=target.condition,
        vq=image.vq,
        sources=[*target.sources, *image.sources],
        drafting=drafting,
        **fields,
    )


def _read_vocabulary(config: Config, needed: Sequence[str]) -> tuple[range, Mapping[str, int]]:
    """The token of every code, and all tokens by name, the needed ones among them."""
    names = config.get("vocabulary_map")
    if not isinstance(names, dict) or any(type(token) is not int or token < 0 for token in names.values()):
        raise config.error("vocabulary_map", expected="token ids by names, those of codes among them")
    if missing := [name for name in needed if name not in names]:
        raise config.error("vocabulary_map", f"lacks {listing(missing)}")
    codes = {name: re.fullmatch("IMGIMG([A-J]+)Z", name) for name in names}
    tokens = {int(code[1].translate(_DIGITS)): names[name] for name, code in codes.items() if code}
    first, count = tokens.get(0, 0), len(tokens)
    if count < 2 or any(tokens.get(code) != first + code for code in range(count)):
        expected = "those of the codes 0, 1, ... with ids in a row"
        raise config.error("vocabulary_map", found=f"{count} image tokens (IMGIMG..Z)", expected=expected)
    return range(first, first + count), names
