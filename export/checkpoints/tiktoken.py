"""Tokenizers in tiktoken's format (lines of a token in base 64 and its rank) as a `tokenizer.json`."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...inputs import require_library, short
from .files import read_text, refusal, refusing


@refusing
def convert_tiktoken(path: Path, pattern: str, special: Sequence[str]) -> bytes:
    """The content of a `tokenizer.json`, by the converter of transformers.

    Args:
        path: the file of ranks.
        pattern: what parts a text, after it is composed (Unicode NFC).
        special: tokens that have the ids behind the ranks.

    Raises:
        CheckpointError: the file holds no ranks 0, 1, ... of tokens that contain all bytes.
        EngineError: transformers is not installed.
    """
    require_library("transformers", str(path), "export")
    from tokenizers import normalizers
    from transformers.convert_slow_tokenizer import TikTokenConverter

    converter: Any = TikTokenConverter(path, pattern, extra_special_tokens=special)  # type: ignore[no-untyped-call]
    converter.load_tiktoken_bpe = _read_ranks  # the library's own reader needs the package tiktoken
    tokenizer = converter.converted()
    tokenizer.normalizer = normalizers.NFC()
    return str(tokenizer.to_str()).encode()


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for line in read_text(path).splitlines():
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise refusal(path, found=short(line), expected="a token in base 64 and its rank") from error
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([byte]) not in ranks for byte in range(256)):
        raise refusal(path, problem="expected the ranks 0, 1, ..., each once, and all bytes among the tokens")
    return ranks
