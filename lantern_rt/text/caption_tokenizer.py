"""Prompts as token ids, by a bundle's `tokenizer.json` and the `tokenizers` library.

For bundles whose condition is of kind `text`: any text goes, and text that is too long is cut, as the published
programs do. Both libraries this needs (`tokenizers`, and `ftfy` for cleaning) are in the extra `text`, and imported
when a tokenizer is read.

Does not know graphs, or on which side ids are padded.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import BundleError, EngineError, RequestError
from .captions import clean_caption

_FILE_LIMIT = 1 << 26  # bytes


@dataclass(frozen=True)
class CaptionTokenizer:
    """A tokenizer of the `tokenizers` library, with how prompts are cleaned before; None leaves them as they are."""

    library: Any
    cleaning: Literal["llamagen"] | None

    def encode(self, prompt: str, slots: int) -> NDArray[np.int64]:
        """Token ids `[n]`, 1 <= n <= `slots`, special tokens included; what does not fit is left out."""
        text = prompt if self.cleaning is None else clean_caption(prompt)
        if not text.strip():
            raise RequestError(
                "prompt: found nothing in it that this model was trained on (links, symbols and Chinese characters are "
                "left out), expected a description in English"
            )
        encoding = self.library.encode(text, add_special_tokens=False)
        encoding.truncate(slots - self.library.num_special_tokens_to_add(False))
        ids = np.array(self.library.post_process(encoding).ids, np.int64)
        if not 1 <= len(ids) <= slots:
            raise BundleError(f"tokenizer.json: made {len(ids)} tokens of a prompt, expected 1 .. {slots}")
        return ids


def read_caption_tokenizer(path: Path, cleaning: Literal["llamagen"] | None) -> CaptionTokenizer:
    """Read a `tokenizer.json`; errors as those of `load_tokenizer`."""
    return CaptionTokenizer(load_tokenizer(path, ["tokenizers"] + (["ftfy"] if cleaning else [])), cleaning)


def load_tokenizer(path: Path, needed: list[str]) -> Any:
    """The library's tokenizer; EngineError if a needed library is missing, BundleError if the file is no tokenizer."""
    if missing := [name for name in needed if not _importable(name)]:
        raise EngineError(
            f"prompts of this bundle need {' and '.join(missing)}; install with `pip install 'lantern-rt[text]'`"
        )
    from tokenizers import Tokenizer

    try:
        if (size := path.stat().st_size) > _FILE_LIMIT:
            raise ValueError(f"{size:,} bytes")
        library = Tokenizer.from_str(path.read_text("utf-8"))
    except Exception as error:  # the library raises plain Exception
        brief = " ".join(str(error).split())[:160]
        raise BundleError(f"{path}: expected a tokenizer, found {brief}; export the bundle again") from error
    library.no_truncation()
    library.no_padding()
    return library


def _importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True
