"""Functions that the families of Emu3 share: tokenizer, token ids of codes, and image sizes in prompts."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers

from ...bundle.manifest import Size
from ...inputs import format_value, require_library, split_lines
from ..checkpoints.files import Config, make_file_error, read_text, wrap_reader_errors
from ..checkpoints.folders import Checkpoint

START = "<|extra_203|>"
BEGIN = "<|image start|>"
IMAGE = "<|image token|>"
ROW_END = "<|extra_200|>"
# Fields of the published configuration with the ids of these tokens.
FIELDS = {START: "bos_token_id", BEGIN: "boi_token_id", IMAGE: "img_token_id", ROW_END: "eol_token_id"}
_VISUAL_PREFIX = "<|visual token "
_VISUAL = _VISUAL_PREFIX + "{:06}|>"
RANKS = "emu3.tiktoken"
VISION = "emu3_vision_tokens.txt"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Defaults of the configuration classes.
DEFAULTS = {
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
    values = config.with_defaults(DEFAULTS).values
    return "head_dim" in values and values["head_dim"] * values["num_attention_heads"] != values["hidden_size"]


def make_emu3_image_size(tokenizer: Tokenizer, rows: int, columns: int, pixels_per_cell: int) -> Size:
    """Return an image size with the tokens that describe the size at the end of a prompt.

    Args:
        tokenizer: tokenizer of the model.
        rows: number of grid rows.
        columns: number of grid columns.
        pixels_per_cell: height and width of a cell in pixels.
    """
    tokens = encode_text(tokenizer, f"{rows}*{columns}{IMAGE}")
    return Size(name=f"{columns * pixels_per_cell}x{rows * pixels_per_cell}", rows=rows, columns=columns, tokens=tokens)


def encode_text(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Return the token ids of a text, which may contain special tokens such as `<|image start|>`."""
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)


def find_tokenizer(checkpoint: Checkpoint) -> tuple[Path, bytes | None]:
    """Find the tokenizer of a checkpoint.

    Returns:
        The path of the tokenizer's file, and its content converted to `tokenizer.json`. The content is None if the file
        is a `tokenizer.json` already.
    """
    if not (checkpoint.path / RANKS).is_file():
        return checkpoint.find_tokenizer_path(), None
    path = checkpoint.require_file(RANKS, "tokenizer")
    vision = split_lines(read_text(checkpoint.require_file(VISION, "tokenizer")))
    return path, convert_tiktoken(path, _PATTERN, (*_SPECIAL, *vision))


def read_special_token_ids(config: Config) -> dict[str, int]:
    """Return the ids that a configuration gives to special tokens and codes, by name of the token.

    Args:
        config: config.json in the layout of transformers or in the published layout.
    """
    names = config.get("vocabulary_map", {})
    if not isinstance(names, Mapping):
        raise config.make_error("vocabulary_map", expected="token ids by name of the token")
    ids = {name: config.get(field) for name, field in FIELDS.items() if config.get(field) is not None}
    return ids | {name: token for name, token in names.items() if name in FIELDS or name.startswith(_VISUAL_PREFIX)}


def find_visual_token_ids(path: Path, tokenizer: Tokenizer) -> range:
    """Return the token ids of all codes.

    Args:
        path: file of the tokenizer, for error messages.
        tokenizer: tokenizer of the model.

    Raises:
        CheckpointError: the ids are not consecutive, or a special token is missing.
    """
    tokens = tokenizer.get_vocab(with_added_tokens=True)
    first = tokens.get(_VISUAL.format(0))
    count = sum(name.startswith(_VISUAL_PREFIX) for name in tokens)
    if missing := [name for name in FIELDS if name not in tokens]:
        raise make_file_error(path, problem=f"lacks {', '.join(missing)}", remedy="give the model's own tokenizer")
    if first is None or any(tokens.get(_VISUAL.format(code)) != first + code for code in range(count)):
        raise make_file_error(
            path, found=f"{count} visual tokens", expected="tokens of codes 0, 1, ... with consecutive ids"
        )
    return range(first, first + count)


@wrap_reader_errors
def convert_tiktoken(path: Path, split_pattern: str, special_tokens: Sequence[str]) -> bytes:
    """Convert a tiktoken file to the content of a `tokenizer.json`.

    Args:
        path: file whose lines have a token in base 64 and the rank of the token.
        split_pattern: regular expression that splits a text, after Unicode normalisation (NFC).
        special_tokens: special tokens. Their ids follow the ids of the other tokens, which are the ranks.

    Raises:
        CheckpointError: the ranks are not 0, 1, ..., or a byte is not a token.
        EngineError: transformers is not installed.
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
