"""Tokenizers of free text, from a bundle's `tokenizer.json` and the `tokenizers` library."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from ..bundle.files import Bundle
from ..errors import BundleError, RequestError
from ..inputs import convert_read_errors, format_value, read_regular_file
from .captions import clean_caption
from .prompt_tokenizer import PromptTokenizer
from .words import read_word_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FILE_LIMIT = 1 << 26  # Maximum size of a tokenizer file in bytes.


@dataclass(frozen=True)
class CaptionTokenizer(PromptTokenizer):
    """Tokenizer of prompts for conditions of kind `text`, which truncates long prompts. `cleaning`: rules, or None."""

    hf_tokenizer: Tokenizer
    cleaning: Literal["llamagen"] | None

    def has_id(self, token_id: int) -> bool:
        return self.hf_tokenizer.id_to_token(token_id) is not None

    def encode(self, prompt: str, max_tokens: int) -> NDArray[np.int64]:
        """Return the token ids of a prompt, int64 `[n]`, 1 <= n <= `max_tokens`; further tokens are dropped."""
        text = prompt if self.cleaning is None else clean_caption(prompt)
        if not text.strip():
            actual = "only text that this model ignores (such as links, symbols and Chinese characters)"
            raise RequestError(field="prompt", found=actual, expected="a description in English")
        with _convert_tokenizer_errors():
            encoding = self.hf_tokenizer.encode(text, add_special_tokens=False)
            encoding.truncate(max_tokens - self.hf_tokenizer.num_special_tokens_to_add(False))
            ids = np.array(self.hf_tokenizer.post_process(encoding).ids, np.int64)
        if not 1 <= len(ids) <= max_tokens:
            raise BundleError(
                field="tokenizer.json", found=f"{len(ids)} tokens of a prompt", expected=f"1 .. {max_tokens}"
            )
        return ids


@dataclass(frozen=True)
class TemplateTokenizer(PromptTokenizer):
    """Tokenizer of prompts in a template, for conditions of kind `tokens`, which raises an error for long prompts."""

    hf_tokenizer: Tokenizer

    def has_id(self, token_id: int) -> bool:
        return self.hf_tokenizer.id_to_token(token_id) is not None

    def encode(self, prompt: str, max_tokens: int) -> NDArray[np.int64]:
        with _convert_tokenizer_errors():
            ids = self.hf_tokenizer.encode(prompt, add_special_tokens=False).ids
        if not ids:
            raise RequestError(field="prompt", found="no tokens", expected="a few words")
        if len(ids) > max_tokens:
            raise RequestError(field="prompt", found=f"{len(ids):,} tokens", expected=f"at most {max_tokens:,}")
        return np.array(ids, np.int64)


def _convert_tokenizer_errors() -> AbstractContextManager[None]:
    return convert_read_errors(Path("tokenizer.json"), "a valid tokenizer", BundleError, "export the bundle again")


def _check_post_processor(text: str) -> None:
    """Raise ValueError if the post-processor inserts an undefined token, which would crash the library."""
    processor = json.loads(text).get("post_processor") or {}
    for step in processor.get("processors", [processor]):
        pieces = [*step.get("single", []), *step.get("pair", [])]
        names = {piece["SpecialToken"]["id"] for piece in pieces if "SpecialToken" in piece}
        if unknown := names - step.get("special_tokens", {}).keys():
            raise ValueError(f"token {format_value(min(unknown))} of the post-processor is not defined")


def parse_tokenizer(json_bytes: bytes, keeps_truncation: bool = False) -> Tokenizer:
    """Parse a `tokenizer.json` without the settings for padding, dropout and (unless `keeps_truncation`) truncation.

    They are for training, and would change the tokens of prompts.
    """
    from tokenizers import Tokenizer

    text = json_bytes.decode()
    _check_post_processor(text)
    library = Tokenizer.from_str(text)
    library.no_padding()
    if not keeps_truncation:
        library.no_truncation()
    if hasattr(library.model, "dropout"):
        library.model.dropout = None
    return library


def load_tokenizer(path: Path) -> Tokenizer:
    with convert_read_errors(path, "a tokenizer", BundleError, "export the bundle again"):
        return parse_tokenizer(read_regular_file(path, _FILE_LIMIT))


def load_bundle_tokenizer(bundle: Bundle) -> PromptTokenizer | None:
    """Load the tokenizer of a bundle; return None if the bundle takes no prompts."""
    condition = bundle.manifest.condition
    if condition.kind == "text":
        return CaptionTokenizer(load_tokenizer(bundle.path("tokenizer")), condition.cleaning)
    if condition.layout is not None:
        return TemplateTokenizer(load_tokenizer(bundle.path("tokenizer")))
    if condition.kind == "words":
        return replace(read_word_tokenizer(bundle.path("tokenizer")), example_prompts=tuple(bundle.example_prompts))
    return None
