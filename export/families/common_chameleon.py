"""Chameleon targets, in folders with the layout of Hugging Face; text and image tokens share one vocabulary.

`vocabulary_map` in config.json has the name of each code's image token: `IMGIMG`, the decimal digits of the code as
letters (A is 0, J is 9), and `Z`. Of the output head, only the rows of these tokens are exported.
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
from ..checkpoints.files import Config, format_names
from ..checkpoints.folders import Checkpoint
from ..graph.conditions import PromptCondition, make_token_condition
from ..model import BundleContents
from ..models.decoder import Decoder
from ..models.eagle import read_drafter
from ..models.llama import load_llama_decoder, make_decoder_config, rename_llama_weights
from ..models.llamagen_vq import LlamaGenVQ
from .common import build_image_model

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
class ChameleonTarget:
    """Chameleon target whose weights have not been read yet."""

    checkpoint: Checkpoint  # folder with tokenizer.json and weights
    config: Config
    code_token_ids: range  # token ids of the codes; code c is token `code_token_ids[c]`
    special_token_ids: Mapping[str, int]  # token ids of the other tokens in prompts and images, by name
    prompt_layout: TokenLayout
    grid_rows: int  # number of grid rows of the default image
    max_image_tokens: int = 0  # number of tokens of the longest image; 0: `grid_rows * grid_rows`
    has_position_limit: bool = True  # whether `max_position_embeddings` of the configuration limits a sequence

    def load_decoder_and_condition(self) -> tuple[Decoder, Tensor, PromptCondition]:
        """Read the decoder, the embeddings of all tokens `[tokens, hidden_size]`, and the prompt condition."""
        checkpoint = self.checkpoint
        tokenizer = checkpoint.find_tokenizer_path()
        checkpoint.read_weights(name_filter=lambda name: not name.startswith(_VQ_PREFIX))
        rename_llama_weights(checkpoint, "model.", _NAMES)
        highest = max(self.code_token_ids.stop - 1, *self.special_token_ids.values())
        for name in _NAMES:
            rows = checkpoint.get_shape(name)[0]
            if rows <= highest:
                expected = f"more, as config.json has tokens up to {highest}"
                raise checkpoint.make_error(name, found=f"{rows} rows", expected=expected)
        sizes = make_decoder_config(
            checkpoint,
            self.config,
            len(self.code_token_ids),
            self.grid_rows,
            max_image_tokens=self.max_image_tokens,
            has_position_limit=self.has_position_limit,
        )
        decoder, embeddings = load_llama_decoder(checkpoint, sizes, self.code_token_ids)
        return (
            decoder,
            embeddings,
            make_token_condition(embeddings, sizes.prefix, self.prompt_layout, tokenizer, self.special_token_ids),
        )

    def build_model(
        self, vq: LlamaGenVQ, drafter: Path | None, num_extra_tokens: int = 0, **fields: Any
    ) -> BundleContents:
        """Read the target and its drafter, and return the contents of a bundle with a VQGAN.

        `num_extra_tokens` are the tokens after the codes, up to the end-of-row token. `fields` are for
        `build_image_model`.
        """
        decoder, embeddings, condition = self.load_decoder_and_condition()
        offset = self.code_token_ids.start
        loaded_drafter = None
        if drafter is not None:
            shared = {name: (value,) for name in _SHARED if (value := self.config.get(name)) is not None}
            progress = self.checkpoint.progress
            loaded_drafter = read_drafter(drafter, decoder, len(embeddings), shared, progress, code_offset=offset)
        return build_image_model(
            decoder=decoder,
            # A drafter computes token ids as `code_offset` + index in this table, so the table may skip no token.
            code_embeddings=embeddings[offset : self.code_token_ids.stop + num_extra_tokens],
            condition=condition,
            vq=vq,
            drafter=loaded_drafter,
            **fields,
        )


def read_chameleon_config(checkpoint: Checkpoint, architecture: str, repository: str) -> Config:
    """Read config.json and check the model class `architecture`, as in `repository` on the hub."""
    config = checkpoint.read_model_config(repository, "chameleon")
    config = config.with_defaults({"rms_norm_eps": 1e-5})  # the default of transformers' class
    detected = LUMINA if _LUMINA_FIELD in config.values else CHAMELEON
    configured = config.get("architectures", [detected])
    if configured != [architecture] or detected != architecture:
        contents = f"{format_value(configured)} {'with' if detected == LUMINA else 'without'} {_LUMINA_FIELD}"
        remedy = "family anole takes Anole, family lumina Lumina-mGPT"
        raise config.make_error("architectures", found=contents, expected=f"a {architecture}", remedy=remedy)
    return config


def read_token_ids(config: Config, required_names: Sequence[str]) -> tuple[range, Mapping[str, int]]:
    """Return the ids of codes, which must be consecutive, and of `required_names`, from `vocabulary_map`."""
    names = config.get("vocabulary_map")
    if not isinstance(names, dict) or any(type(token) is not int or token < 0 for token in names.values()):
        raise config.make_error("vocabulary_map", expected="token ids by names, image tokens included")
    if missing := [name for name in required_names if name not in names]:
        raise config.make_error("vocabulary_map", f"lacks {format_names(missing)}")
    codes = {name: re.fullmatch("IMGIMG([A-J]{1,9})Z", name) for name in names}
    tokens = {int(code[1].translate(_DIGITS)): names[name] for name, code in codes.items() if code}
    first = tokens.get(0, 0)
    count = len(tokens)
    if count < 2 or any(tokens.get(code) != first + code for code in range(count)):
        expected = "image tokens of codes 0, 1, ... with consecutive ids"
        raise config.make_error("vocabulary_map", found=f"{count} image tokens (IMGIMG..Z)", expected=expected)
    return range(first, first + count), {name: names[name] for name in required_names}
