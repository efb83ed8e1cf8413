"""Tokenizers in tiktoken's format (lines of a token in base 64 and its rank) as a `tokenizer.json`.

tiktoken merges the neighbours that together have the lowest rank. So all ways to part a token in two become merges, in
the order of ranks; they give the same ids.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from pathlib import Path

from ...errors import CheckpointError
from .files import read_text, refusing

# Bytes as the characters by which byte-level tokenizers know them: those that print, then others from 256 on.
_PRINTED = [byte for byte in range(256) if 33 <= byte <= 126 or 161 <= byte != 173]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
_CHARACTERS = {byte: chr(byte) for byte in _PRINTED} | {byte: chr(256 + i) for i, byte in enumerate(_OTHERS)}


@refusing
def tokenizer_of_ranks(path: Path, pattern: str, special: Iterable[str]) -> bytes:
    """The content of a `tokenizer.json` for composed Unicode (NFC), which is parted by a pattern.

    special: the names of tokens that have the ids behind the ranks. Raises: CheckpointError.
    """
    ranks: dict[bytes, int] = {}
    try:
        for line in read_text(path).splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    except ValueError as error:
        raise CheckpointError(f"{path}: found {line[:40]!r}, expected a token in base 64 and its rank") from error
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([byte]) not in ranks for byte in range(256)):
        raise CheckpointError(f"{path}: expected the ranks 0, 1, ..., each once, and all bytes among the tokens")
    vocabulary = {token: "".join(_CHARACTERS[byte] for byte in token) for token in sorted(ranks, key=ranks.__getitem__)}
    parted = ((token[:i], token[i:]) for token in vocabulary for i in range(1, len(token)))
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": name, "special": True, **plain} for i, name in enumerate(special, len(ranks))
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, by_bytes]},
        "decoder": by_bytes,
        "model": {
            "type": "BPE",
            "ignore_merges": True,
            "vocab": {name: ranks[token] for token, name in vocabulary.items()},
            "merges": [[vocabulary[a], vocabulary[b]] for a, b in parted if a in ranks and b in ranks],
        },
    }
    return json.dumps(content, ensure_ascii=False).encode()
