"""A `tokenizer.json` of Hugging Face's tokenizers beside a checkpoint, checked to belong to it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer

from ...checks import brief
from ...errors import CheckpointError

TOKENIZER = "tokenizer.json"
_CURE = "give the model's own tokenizer"


def find_tokenizer(folder: Path) -> Path:
    """The `tokenizer.json` of a checkpoint's folder. Raises: CheckpointError if there is none."""
    path = folder / TOKENIZER
    if not path.is_file():
        raise CheckpointError(f"{folder}: has no {TOKENIZER}; download it into that folder, prompts need it")
    return path


def read_tokenizer(path: Path, rows: int, named: Mapping[str, int] | None = None) -> Tokenizer:
    """The tokenizer of a model that embeds `rows` token ids, some of them under the names `named`.

    Raises: CheckpointError if it cannot be read, gives ids that the model does not embed, or other ids than `named`.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
        tokens = tokenizer.get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{path}: expected a tokenizer in JSON, found {brief(error)}") from error
    name, highest = max(tokens.items(), key=lambda item: item[1])
    if highest >= rows:
        raise CheckpointError(f"{path}: token {name!r} has id {highest}, but the model embeds {rows} tokens; {_CURE}")
    for name, wanted in (named or {}).items():
        if tokens.get(name) != wanted:
            found = f"id {tokens[name]}" if name in tokens else "no id"
            raise CheckpointError(f"{path}: token {name!r} has {found}, but the model's is {wanted}; {_CURE}")
    return tokenizer
