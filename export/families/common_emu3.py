"""What Emu3 and Emu3.5 share: tokenizer, token ids of codes, image sizes in prompts, and the contents of a bundle."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers

from ...bundle.conditions import TokenLayout
from ...bundle.manifest import Size
from ...inputs import format_value, require_library, split_lines
from ...methods import Sampling
from ..checkpoints.deferred import defer_concatenation
from ..checkpoints.files import (
    Config,
    make_file_error,
    read_text,
    read_tokenizer,
    wrap_reader_errors,
)
from ..checkpoints.folders import Checkpoint
from ..graph.conditions import make_token_condition
from ..model import BundleContents
from ..models.llama import load_llama_decoder, make_decoder_config, rename_llama_weights
from ..models.llamagen_vq import LlamaGenVQ
from .common import build_image_model, encode_text, make_size

START = "<|extra_203|>"
BEGIN = "<|image start|>"
_IMAGE = "<|image token|>"
_ROW_END = "<|extra_200|>"
# Fields of the published configuration with the ids of these tokens.
_FIELDS = {START: "bos_token_id", BEGIN: "boi_token_id", _IMAGE: "img_token_id", _ROW_END: "eol_token_id"}
_VISUAL_PREFIX = "<|visual token "
_VISUAL = _VISUAL_PREFIX + "{:06}|>"
_RANKS = "emu3.tiktoken"
_VISION = "emu3_vision_tokens.txt"
TOKENIZER_FILES = (_RANKS, _VISION)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Defaults of the configuration classes.
_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 9216,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}


def is_emu35_config(config: Config) -> bool:
    """Return whether a configuration belongs to Emu3.5, whose heads are together wider than the hidden states."""
    values = config.with_defaults(_DEFAULTS).values
    return "head_dim" in values and values["head_dim"] * values["num_attention_heads"] != values["hidden_size"]


def build_emu3_model(
    target: Checkpoint,
    config: Config,
    tokenizer_file: tuple[Path, bytes | None],
    vq: LlamaGenVQ,
    *,
    grids: Sequence[tuple[int, int]],
    make_layout: Callable[[Tokenizer], TokenLayout],
    sampling: Sampling,
    prefix: str = "model.",
    head_name: str = "lm_head.weight",
) -> BundleContents:
    """Return the contents of a bundle, from a target whose weights were read and the result of `find_tokenizer`.

    `grids` are rows and columns of the image sizes, the default first. `prefix` and `head_name` are names of the
    decoder's weights.
    """
    path, tokenizer_json = tokenizer_file
    names = {"embed.weight": f"{prefix}embed_tokens.weight", "head.weight": head_name}
    rename_llama_weights(target, prefix, names)
    num_tokens = min(target.get_shape(name)[0] for name in names)
    tokenizer = read_tokenizer(path, num_tokens, read_special_token_ids(config), tokenizer_json)
    codes = find_visual_token_ids(path, tokenizer)
    longest = max(rows * (columns + 1) - 1 for rows, columns in grids)
    text = (config.get_section("text_config") if config.get("text_config") else config).with_defaults(_DEFAULTS)
    sizes = make_decoder_config(target, text, len(codes), grids[0][0], max_image_tokens=longest)
    decoder, embeddings = load_llama_decoder(target, sizes, codes)
    (row_end,) = encode_text(tokenizer, _ROW_END)
    layout = make_layout(tokenizer)
    return build_image_model(
        decoder=decoder,
        code_embeddings=defer_concatenation([embeddings[codes.start : codes.stop], embeddings[row_end : row_end + 1]]),
        condition=make_token_condition(embeddings, sizes.prefix, layout, path, tokenizer_json=tokenizer_json),
        vq=vq,
        sampling=sampling,
        sizes=[make_emu3_image_size(tokenizer, *grid, vq.config.pixels_per_cell) for grid in grids],
        default_grid=grids[0],
        row_end=len(codes),
    )


def make_emu3_image_size(tokenizer: Tokenizer, rows: int, columns: int, pixels_per_cell: int) -> Size:
    """Return an image size with the tokens that describe it at the end of a prompt."""
    return make_size(rows, columns, pixels_per_cell, tokens=encode_text(tokenizer, f"{rows}*{columns}{_IMAGE}"))


def find_tokenizer(checkpoint: Checkpoint) -> tuple[Path, bytes | None]:
    """Return the path of the tokenizer's file, and its content as `tokenizer.json`; None if the file is one already."""
    if not (checkpoint.path / _RANKS).is_file():
        return checkpoint.find_tokenizer_path(), None
    path = checkpoint.require_file(_RANKS, "tokenizer")
    vision = split_lines(read_text(checkpoint.require_file(_VISION, "tokenizer")))
    return path, convert_tiktoken(path, _PATTERN, (*_SPECIAL, *vision))


def read_special_token_ids(config: Config) -> dict[str, int]:
    """Return the ids that a configuration gives to special tokens and codes, by name of the token."""
    names = config.get("vocabulary_map", {})
    if not isinstance(names, Mapping):
        raise config.make_error("vocabulary_map", expected="token ids by name of the token")
    ids = {name: config.get(field) for name, field in _FIELDS.items() if config.get(field) is not None}
    return ids | {name: token for name, token in names.items() if name in _FIELDS or name.startswith(_VISUAL_PREFIX)}


def find_visual_token_ids(path: Path, tokenizer: Tokenizer) -> range:
    """Return the token ids of all codes. Raises CheckpointError if they are not consecutive."""
    tokens = tokenizer.get_vocab(with_added_tokens=True)
    first = tokens.get(_VISUAL.format(0))
    count = sum(name.startswith(_VISUAL_PREFIX) for name in tokens)
    if missing := [name for name in _FIELDS if name not in tokens]:
        raise make_file_error(path, problem=f"lacks {', '.join(missing)}", remedy="give the model's own tokenizer")
    if first is None or any(tokens.get(_VISUAL.format(code)) != first + code for code in range(count)):
        raise make_file_error(
            path, found=f"{count} visual tokens", expected="tokens of codes 0, 1, ... with consecutive ids"
        )
    return range(first, first + count)


@wrap_reader_errors
def convert_tiktoken(path: Path, split_pattern: str, special_tokens: Sequence[str]) -> bytes:
    """Convert a tiktoken file, of tokens in base 64 and their ranks, to the content of a `tokenizer.json`.

    `split_pattern` splits a text after Unicode normalisation (NFC). The ids of special tokens follow the ranks.
    """
    require_library("transformers", str(path), "export")
    from transformers.convert_slow_tokenizer import TikTokenConverter

    converter: Any = TikTokenConverter(path, split_pattern, extra_special_tokens=special_tokens)  # type: ignore[no-untyped-call]
    converter.load_tiktoken_bpe = _read_token_ranks  # the default reader needs the package tiktoken
    tokenizer = converter.converted()
    tokenizer.normalizer = normalizers.NFC()
    return str(tokenizer.to_str()).encode()


def _read_token_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for line in split_lines(read_text(path)):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise make_file_error(path, found=format_value(line), expected="a token in base 64 and its rank") from error
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([byte]) not in ranks for byte in range(256)):
        raise make_file_error(
            path, problem="expected the ranks 0, 1, ..., each exactly once, and a token for every byte"
        )
    return ranks
