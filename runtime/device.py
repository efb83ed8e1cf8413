"""What an engine may do beyond the protocol where logits and hidden states stay on a device: draw codes there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..methods import Sampling
from .engine import Floats, Ints
from .noise import Noise


@dataclass(frozen=True)
class SampleRequest:
    """Where codes are to be drawn for one request, and how."""

    rows: slice  # of the pass, the conditional one first
    nodes: Ints  # where those rows have their logits, int64 `[sides, count]`
    sampling: Sampling  # how distributions are made of them
    noise: Noise | None  # the request's; None for the most probable codes
    positions: Ints  # whose noise it is, int64 `[count]`


class DeviceLogits(ABC):
    """Logits `[rows, nodes, vocab_size]` on a device that guides, filters and draws there."""

    @abstractmethod
    def __getitem__(self, key: Any, /) -> Any:
        """The rows at `key`, as NumPy would index them."""

    @abstractmethod
    def draws(self, sampling: Sampling) -> bool:
        """Whether the device can draw with these settings."""

    @abstractmethod
    def best(self, samples: Sequence[SampleRequest], most: int) -> list[tuple[Ints, Floats]]:
        """The `most` best codes of log p + noise, for each request.

        Returns:
            Codes, and their log-probabilities after the noise, both `[count, most]`, as `sampling.best_codes`.

        Raises:
            EngineError: the logits hold NaN or infinity.
        """
