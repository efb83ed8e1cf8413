"""Optional engine interface: sample tokens on the device that holds the logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..methods import Sampling
from .engine import Floats, Ints
from .noise import Noise


class SamplingRequest(NamedTuple):
    """Nodes of one sequence to sample after, and the settings."""

    rows: slice  # batch rows of the sequence, the conditional row first
    nodes: Ints  # nodes whose logits are read in each of these rows, int64 `[rows, count]`
    sampling: Sampling
    noise: Noise | None  # the sequence's noise; None: choose the most probable codes
    positions: Ints  # positions that the noise depends on, int64 `[count]`
    guidance_scales: Floats  # guidance scales, float32 `[count]`; not used with one row


class DeviceLogits(ABC):
    """Logits `[rows, nodes, vocab_size]` on a device that also applies guidance and filters, and samples."""

    @abstractmethod
    def __getitem__(self, key: Any, /) -> Any:
        """Return the logits at `key`, which NumPy rules interpret."""

    @abstractmethod
    def supports_sampling(self, sampling: Sampling) -> bool:
        """Return whether the device can sample with these settings."""

    @abstractmethod
    def sample_top_codes(self, requests: Sequence[SamplingRequest], count: int) -> list[tuple[Ints, Floats]]:
        """Return the `count` codes with the highest log p + noise at each node of each request.

        Returns:
            For each request the codes and their log p + noise, both `[nodes, count]`, as `sampling.find_top_codes`. The
            best score of a node whose logits contain NaN or infinity is NaN or infinite.
        """
