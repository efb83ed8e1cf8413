"""Encoding of captions as a fixed number of word ids. The bundle's `tokenizer.json` has the same ids."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from .vocabulary import vocabulary

SLOTS = 24
PAD = 0
UNKNOWN = 1
WORDS = ("<pad>", "<unk>", *vocabulary())
WORD_IDS = {word: i for i, word in enumerate(WORDS)}


def encode_caption(caption: str) -> NDArray[np.int64]:
    """Return the word ids of a caption, int64 `[24]`, padded on the right; words after the 24th are dropped."""
    words = re.findall(r"[a-z]+", caption.lower())[:SLOTS]
    ids = np.full(SLOTS, PAD, np.int64)
    ids[: len(words)] = [WORD_IDS.get(word, UNKNOWN) for word in words]
    return ids
