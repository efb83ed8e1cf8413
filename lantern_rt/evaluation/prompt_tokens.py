"""Prompts as the token ids that a graph beside the model reads: by a `tokenizer.json`, or by a bundle's own words.

Does not know pictures or graphs, only how many tokens one takes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ..bundle.files import Bundle
from ..checks import brief
from ..errors import EngineError, RequestError
from ..text.words import read_tokenizer
from .statistics import Ints

Tokens = tuple[Ints, Ints]  # ids and attention mask, [length] each
Tokenize = Callable[[str], Tokens]
_OPTION = "agreement-tokenizer"


def file_tokens(path: Path, length: int | None) -> Tokenize:
    """By a `tokenizer.json` with its own special tokens, truncation and padding; needs the library `tokenizers`.

    length: how many ids a prompt must have; None leaves that to the file.
    """
    if importlib.util.find_spec("tokenizers") is None:
        raise EngineError(f"{_OPTION} needs tokenizers; install with `pip install 'lantern-rt[text]'`")
    from tokenizers import Tokenizer

    try:
        library = Tokenizer.from_str(path.read_text("utf-8"))
    except Exception as error:  # the library raises plain Exception
        raise RequestError(f"{_OPTION} {path}: no tokenizer.json that can be read ({brief(error)})") from error
    if length is not None:
        if library.padding is None:
            raise RequestError(
                f"{_OPTION} {path}: found no padding in it, but the graph takes {length} tokens; export the graph with "
                "an open length, or save the tokenizer after its enable_padding()"
            )
        library.enable_padding(**{**library.padding, "length": length, "pad_to_multiple_of": None})
        cut = library.truncation or {"max_length": length}
        library.enable_truncation(**{**cut, "max_length": min(length, cut["max_length"])})

    def tokenize(prompt: str) -> Tokens:
        encoding = library.encode(prompt)
        if not encoding.ids:
            raise RequestError(f"{_OPTION} {path}: found no token in {prompt!r}")
        return np.array(encoding.ids, np.int64), np.array(encoding.attention_mask, np.int64)

    return tokenize


def bundle_tokens(bundle: Bundle, length: int | None) -> Tokenize:
    """By the word list of a bundle, padded with 0 to `length`, by default as long as the model reads them.

    RequestError where the bundle's tokens are those of its own text encoder: no other graph is likely to know them.
    """
    condition = bundle.manifest.condition
    if condition.kind != "words":
        raise RequestError(
            f"{_OPTION}: bundle {bundle.manifest.name} has no word list of its own; give the tokenizer.json that "
            "belongs to --agreement"
        )
    words = read_tokenizer(bundle.path("tokenizer"))

    def tokenize(prompt: str) -> Tokens:
        ids = words.encode(prompt, length or condition.prefix)
        return ids, (ids != 0).astype(np.int64)

    return tokenize
