"""Chameleon targets: folders in the layout of Hugging Face, whose text and image tokens share one vocabulary.

`vocabulary_map` in config.json names the image token of each code: `IMGIMG`, the code's decimal digits as letters (A is
0, J is 9), `Z`. Only the head's rows of these tokens are exported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ...bundle.conditions import TokenLayout
from ...inputs import format_value
from ..checkpoints.files import Config, list_names
from ..checkpoints.folders import Checkpoint
from ..graph.conditions import Condition, token_condition
from ..model import Model
from ..models.decoder import Decoder
from ..models.eagle import read_drafter
from ..models.llama import decoder_config, load_decoder, rename_llama
from ..models.vq_checkpoints import VQGAN
from .common import image_model

_DIGITS = str.maketrans("ABCDEFGHIJ", "0123456789")
CHAMELEON = "ChameleonForConditionalGeneration"
LUMINA = "ChameleonXLLMXForConditionalGeneration"
_LUMINA_FIELD = "mask_image_logits"  # only configurations of Lumina-mGPT have this field
PROMPT_TOKENS = ("<s>", "<reserved08706>", "<racm3:break>")  # start, end of turn, begin of image
_VQ_PREFIX = "model.vqmodel."  # image encoder, which the VQGAN's files contain with the decoder
_NAMES = {"embed.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight"}
# Fields with equal values in config.json of the drafter and of its target.
_SHARED = ("model_type", "vocabulary_map", *(f"{name}_token_id" for name in ("bos", "eos", "boi", "eoi", "image")))


@dataclass(frozen=True)
class Chameleon:
    """A target to read.

    Args:
        checkpoint: folder with tokenizer.json and weights.
        config: configuration of the folder.
        codes: token ids of the codes; code c is token `codes[c]`.
        names: token ids of the other tokens in prompts and images, by name.
        grid: grid rows of an image.
        max_image_tokens: number of tokens of the longest image; 0 for `grid * grid`.
        limits_positions: `limits_positions` of `decoder_config`.
    """

    checkpoint: Checkpoint
    config: Config
    codes: range
    names: Mapping[str, int]
    layout: TokenLayout
    grid: int
    max_image_tokens: int = 0
    limits_positions: bool = True

    def read(self) -> tuple[Decoder, Tensor, Condition]:
        """Return the decoder, the embeddings of all tokens `[tokens, hidden_size]`, and the condition.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        checkpoint = self.checkpoint
        tokenizer = checkpoint.tokenizer()
        checkpoint.read(keep=lambda name: not name.startswith(_VQ_PREFIX))
        rename_llama(checkpoint, "model.", _NAMES)
        highest = max(self.codes.stop - 1, *self.names.values())
        for name in _NAMES:
            rows = checkpoint.shape(name)[0]
            if rows <= highest:
                expected = f"more, as config.json has tokens up to {highest}"
                raise checkpoint.error(name, found=f"{rows} rows", expected=expected)
        sizes = decoder_config(
            checkpoint,
            self.config,
            len(self.codes),
            self.grid,
            max_image_tokens=self.max_image_tokens,
            limits_positions=self.limits_positions,
        )
        decoder, embeddings = load_decoder(checkpoint, sizes, self.codes)
        return decoder, embeddings, token_condition(embeddings, sizes.prefix, self.layout, tokenizer, self.names)

    def bundle(self, vqgan: VQGAN, drafter: Path | None, extra_tokens: int = 0, **fields: Any) -> Model:
        """Return the contents of a bundle with a VQGAN.

        Args:
            vqgan: the image tokenizer.
            drafter: folder of the drafter, None without a drafter.
            extra_tokens: number of tokens after the codes, up to the end-of-row token.
            fields: other arguments of `image_model`.

        Raises:
            CheckpointError: a file is missing or damaged, or the drafter is of another target.
        """
        decoder, embeddings, condition = self.read()
        offset = self.codes.start
        loaded_drafter = None
        if drafter is not None:
            shared = {name: (value,) for name in _SHARED if (value := self.config.get(name)) is not None}
            progress = self.checkpoint.progress
            loaded_drafter = read_drafter(drafter, decoder, len(embeddings), shared, progress, code_offset=offset)
        return image_model(
            decoder=decoder,
            # A drafter computes token ids as `code_offset` + index in this table, so the table may skip no token.
            code_embeddings=embeddings[offset : self.codes.stop + extra_tokens],
            condition=condition,
            vq=vqgan.vq,
            sources=[*self.checkpoint.sources, *vqgan.sources],
            drafter=loaded_drafter,
            **fields,
        )


def chameleon_config(checkpoint: Checkpoint, architecture: str, repository: str) -> Config:
    """Read config.json and check the model class.

    Args:
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


def read_vocabulary(config: Config, needed: Sequence[str]) -> tuple[range, Mapping[str, int]]:
    """Return the token ids of the codes in `vocabulary_map` of config.json, and token ids by the names in `needed`.

    Raises:
        CheckpointError: the configuration has no codes with consecutive ids, or lacks a name.
    """
    names = config.get("vocabulary_map")
    if not isinstance(names, dict) or any(type(token) is not int or token < 0 for token in names.values()):
        raise config.error("vocabulary_map", expected="token ids by names, image tokens included")
    if missing := [name for name in needed if name not in names]:
        raise config.error("vocabulary_map", f"lacks {list_names(missing)}")
    codes = {name: re.fullmatch("IMGIMG([A-J]+)Z", name) for name in names}
    tokens = {int(code[1].translate(_DIGITS)): names[name] for name, code in codes.items() if code}
    first = tokens.get(0, 0)
    count = len(tokens)
    if count < 2 or any(tokens.get(code) != first + code for code in range(count)):
        expected = "image tokens of codes 0, 1, ... with consecutive ids"
        raise config.error("vocabulary_map", found=f"{count} image tokens (IMGIMG..Z)", expected=expected)
    return range(first, first + count), {name: names[name] for name in needed}
