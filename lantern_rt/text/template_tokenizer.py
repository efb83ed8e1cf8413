"""Prompts as the ids of their own text, for conditions of kind `tokens`: text that is too long is refused, not cut.

What comes before and after the text is the manifest's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from ..errors import RequestError
from .caption_tokenizer import load_tokenizer


@dataclass(frozen=True)
class TemplateTokenizer:
    """A tokenizer of the `tokenizers` library; each prompt replaces `{prompt}` in `template`."""

    library: Tokenizer
    template: str

    def encode(self, prompt: str, slots: int) -> NDArray[np.int64]:
        """Ids of a prompt, int64 `[1 .. slots]`; RequestError if it has none, or more."""
        ids = self.library.encode(self.template.replace("{prompt}", prompt), add_special_tokens=False).ids
        if not ids:
            raise RequestError("prompt: found no token in it, expected a few words")
        if len(ids) > slots:
            raise RequestError(f"prompt: found {len(ids):,} tokens, expected at most {slots:,}; shorten it")
        return np.array(ids, np.int64)


def read_template_tokenizer(path: Path, template: str = "{prompt}") -> TemplateTokenizer:
    """Read a `tokenizer.json`; errors as those of `load_tokenizer`."""
    return TemplateTokenizer(load_tokenizer(path), template)
