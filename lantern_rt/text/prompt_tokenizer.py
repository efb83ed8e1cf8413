"""Base class of the tokenizers of prompts."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray


class PromptTokenizer(ABC):
    @property
    def words(self) -> tuple[str, ...]:
        """The known words; empty: any text is valid."""
        return ()

    @abstractmethod
    def has_id(self, token_id: int) -> bool: ...

    @abstractmethod
    def encode(self, prompt: str, max_tokens: int) -> NDArray[np.int64]:
        """Return the token ids of a prompt, int64 `[n]`, 1 <= n <= `max_tokens`."""

    def find_nearest_examples(self, prompt: str) -> list[str]:
        """Return valid prompts that are similar to an invalid one."""
        return []
