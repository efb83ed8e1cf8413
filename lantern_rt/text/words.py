"""Tokenizer of captions that have only known words, from the word list in a bundle's `tokenizer.json`.

The file is a WordLevel tokenizer of the `tokenizers` library with ids 0 .. n - 1: `<pad>`, `<unk>`, then words of the
letters a to z. Only the word list is used. An unknown word raises an error instead of becoming `<unk>`. Otherwise the
image would lack the meaning of the word without notice. For the same reason, other letters and digits count as words.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import cached_property
from heapq import nlargest
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, StrictInt, field_validator

from ..errors import BundleError, RequestError
from ..inputs import convert_read_errors, format_value, read_regular_file
from .prompt_tokenizer import PromptTokenizer

PAD = "<pad>"
UNKNOWN = "<unk>"
# Remedy in errors about unknown words: a published model that accepts any words, and the size of its download.
ANY_WORDS = 'any words: `lantern-rt run janus-pro-1b "..."`, which downloads at most 4.2 GB'
ANY_WORDS_SERVED = "any words: serve another model, as by `lantern-rt serve janus-pro-1b`"
_WORD = re.compile(r"[^\W_]+")
_FILE_LIMIT = 1 << 24  # Maximum size of a tokenizer file in bytes.
_MAX_NAMED = 3  # Maximum number of unknown words in an error message.


@dataclass(frozen=True)
class WordTokenizer(PromptTokenizer):
    """Tokenizer of prompts that have only known words. `word_ids`: id of every word and special token."""

    word_ids: dict[str, int]
    example_prompts: tuple[str, ...] = ()

    @cached_property
    def words(self) -> tuple[str, ...]:
        return tuple(sorted(self.word_ids.keys() - {PAD, UNKNOWN}))

    def encode(self, prompt: str, max_tokens: int) -> NDArray[np.int64]:
        """Convert a prompt to word ids, int64 `[max_tokens]`, padded with 0. Upper case and punctuation are ignored."""
        words = _WORD.findall(prompt.lower())
        if not words:
            expected = f"1 to {max_tokens} words such as {', '.join(self.words[:3])}"
            raise RequestError(field="prompt", found="no words", expected=expected)
        extra = len(words) - max_tokens
        if extra > 0:
            actual = f"{len(words)} words"
            raise RequestError(field="prompt", found=actual, expected=f"at most {max_tokens}", remedy=f"remove {extra}")
        unknown = [word for word in dict.fromkeys(words) if word not in self.word_ids]
        if unknown:
            raise self._make_unknown_words_error(unknown)
        return np.array([self.word_ids[word] for word in words] + [0] * -extra, np.int64)

    def has_id(self, token_id: int) -> bool:
        return token_id < len(self.word_ids)

    def find_nearest_examples(self, prompt: str) -> list[str]:
        """Return the three example prompts that share the most words with a prompt."""
        words = {*_WORD.findall(prompt.lower())}
        return nlargest(
            3, self.example_prompts, key=lambda example: (len(words.intersection(example.split())), -len(example))
        )

    def _make_unknown_words_error(self, unknown_words: list[str]) -> RequestError:
        named = []
        for word in unknown_words[:_MAX_NAMED]:
            similar = [known for known in self.words if abs(len(known) - len(word)) < 2 < len(known)]
            close = " or ".join(difflib.get_close_matches(word[:40], similar, n=3))
            named.append(format_value(word) + (f" (did you mean {close}?)" if close else ""))
        more = f" and {len(unknown_words) - _MAX_NAMED} more" if len(unknown_words) > _MAX_NAMED else ""
        actual = f"unknown word{'s' * (len(unknown_words) > 1)} {', '.join(named)}{more}"
        longer = [word for word in " ".join(self.example_prompts).split() if len(word) > 3]
        listed = f", such as {', '.join([*dict.fromkeys(longer)][:3])}" if longer else f": {', '.join(self.words)}"
        expected = f"words among the {len(self.words)} that this model knows{listed}"
        remedy = f"`lantern-rt inspect BUNDLE --words` lists them; {ANY_WORDS}"
        return RequestError(field="prompt", found=actual, expected=expected, remedy=remedy)


class _WordLevelModel(BaseModel):
    type: Literal["WordLevel"]
    unk_token: Literal["<unk>"]
    vocab: dict[str, StrictInt]

    @field_validator("vocab", mode="after")
    @classmethod
    def _check_word_list(cls, word_ids: dict[str, int]) -> dict[str, int]:
        if sorted(word_ids.values()) != list(range(len(word_ids))):
            raise ValueError("expected the ids 0, 1, ..., each once")
        first, second, *words = [*sorted(word_ids, key=word_ids.__getitem__), "", ""]
        if (first, second) != (PAD, UNKNOWN) or len(word_ids) < 3:
            raise ValueError(f"expected {PAD} with id 0, {UNKNOWN} with id 1, then words")
        if not all(re.fullmatch("[a-z]+", word) for word in words[:-2]):
            raise ValueError("expected words of letters a to z")
        return word_ids


class _TokenizerFile(BaseModel):
    model: _WordLevelModel


def read_word_tokenizer(path: Path) -> WordTokenizer:
    with convert_read_errors(path, "a tokenizer of known words", BundleError, "export the bundle again"):
        text = read_regular_file(path, _FILE_LIMIT)
        # not with the library `tokenizers`, which would take 5 MB of memory
        return WordTokenizer(_TokenizerFile.model_validate_json(text).model.vocab)
