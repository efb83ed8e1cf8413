"""Prompts of any text as token ids, by a bundle's `tokenizer.json` and the `tokenizers` library."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import BundleError, RequestError
from ..inputs import format_value, read_plain_file, reading
from .captions import clean_caption

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FILE_LIMIT = 1 << 26  # bytes


@dataclass(frozen=True)
class CaptionTokenizer:
    """For conditions of kind `text`: cleaned first, unless `cleaning` is None; too long a text is cut."""

    library: Tokenizer
    cleaning: Literal["llamagen"] | None

    def encode(self, prompt: str, slots: int) -> NDArray[np.int64]:
        """Token ids `[n]`, 1 <= n <= `slots`, special tokens included; what does not fit is left out."""
        text = prompt if self.cleaning is None else clean_caption(prompt)
        if not text.strip():
            found = "nothing in it that this model was trained on (links, symbols and Chinese characters are left out)"
            raise RequestError(field="prompt", found=found, expected="a description in English")
        with _working():
            encoding = self.library.encode(text, add_special_tokens=False)
            encoding.truncate(slots - self.library.num_special_tokens_to_add(False))
            ids = np.array(self.library.post_process(encoding).ids, np.int64)
        if not 1 <= len(ids) <= slots:
            raise BundleError(field="tokenizer.json", found=f"{len(ids)} tokens of a prompt", expected=f"1 .. {slots}")
        return ids


@dataclass(frozen=True)
class TemplateTokenizer:
    """For conditions of kind `tokens`: each prompt replaces `{prompt}` in `template`; too long a text is refused.

    `{size}` stands for the name of the picture's size: ask one `for_size`.
    """

    library: Tokenizer
    template: str = "{prompt}"

    def for_size(self, name: str) -> TemplateTokenizer:
        """The tokenizer of prompts for pictures of this size."""
        return replace(self, template=self.template.replace("{size}", name))

    def encode(self, prompt: str, slots: int) -> NDArray[np.int64]:
        """Ids of the prompt's own text, int64 `[1 .. slots]`. Raises: RequestError: it has none, or more."""
        with _working():
            ids = self.library.encode(self.template.replace("{prompt}", prompt), add_special_tokens=False).ids
        if not ids:
            raise RequestError(field="prompt", found="no token in it", expected="a few words")
        if len(ids) > slots:
            raise RequestError(field="prompt", found=f"{len(ids):,} tokens", expected=f"at most {slots:,}")
        return np.array(ids, np.int64)


def _working() -> AbstractContextManager[None]:
    return reading(Path("tokenizer.json"), "a tokenizer that works", BundleError, "export the bundle again")


def _check_template(text: str) -> None:
    """Raises: ValueError: a template puts in tokens that it does not know, which the library would die of."""
    processor = json.loads(text).get("post_processor") or {}
    for one in processor.get("processors", [processor]):
        pieces = [*one.get("single", []), *one.get("pair", [])]
        names = {piece["SpecialToken"]["id"] for piece in pieces if "SpecialToken" in piece}
        if unknown := names - one.get("special_tokens", {}).keys():
            raise ValueError(f"token {format_value(min(unknown))} in its template, which does not say what that is")


def load_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer that neither cuts nor pads. Raises: BundleError: the file is none."""
    from tokenizers import Tokenizer

    with reading(path, "a tokenizer", BundleError, "export the bundle again"):
        text = read_plain_file(path, _FILE_LIMIT).decode()
        _check_template(text)
        library = Tokenizer.from_str(text)
    library.no_truncation()
    library.no_padding()
    return library
