"""Optional interface of engines that sample tokens on the device that holds the logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..methods import Sampling
from .engine import Floats, Ints
from .noise import Noise


class SamplingRequest(NamedTuple):
    """Request to sample tokens after nodes of one sequence."""

    # Batch rows and nodes of each token's conditional and unconditional logits, int64 `[2, count]`; equal if unguided.
    rows: Ints
    nodes: Ints
    sampling: Sampling  # temperature and filters
    noise: Noise | None  # noise of the sequence; None: the most probable codes are chosen
    positions: Ints  # position of the noise for each token, int64 `[count]`
    guidance_scales: Floats  # guidance scale for each token, float32 `[count]`


class DeviceLogits(ABC):
    """Logits `[rows, nodes, vocab_size]` on a device that also applies guidance and filters, and samples."""

    @abstractmethod
    def __getitem__(self, key: Any, /) -> Any:
        """Return the logits at `key`, with the indexing rules of NumPy."""

    @abstractmethod
    def supports_sampling(self, sampling: Sampling) -> bool:
        """Return whether the device can sample with these settings."""

    @abstractmethod
    def sample_top_codes(self, requests: Sequence[SamplingRequest], count: int) -> list[tuple[Ints, Floats]]:
        """Return the `count` codes with the highest scores at each node of each request.

        The score of a code is its log-probability plus its noise.

        Returns:
            For each request the codes and their scores, both `[nodes, count]`, best first as in
            `sampling.find_top_codes`. If the logits of a node contain NaN or infinity, all scores of the node are NaN
            or infinite.
        """
