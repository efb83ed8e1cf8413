"""The random numbers of one image: functions of its seed and a position, so that none of them has a state to keep.

The token at position t is the arg-max of log p + g, where g is standard Gumbel noise that depends on seed and t alone:
an exact draw from p (the Gumbel-max trick), and the same one whoever computes p. Drafts are made with the same noise on
the drafter's distribution q, and accepted if they are the target's choice (drafter-invariant speculative decoding,
Daliri, Musco, Suresh 2024). The k best of log q + g are k draws without replacement (Gumbel top-k).

The numbers are specified in docs/sampling.md and belong to the format `FORMAT`: they never change within it.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from .engine import Floats

FORMAT: Literal["philox4x64-gumbel-1"] = "philox4x64-gumbel-1"
_GUMBEL, _DECISIONS = 0, 1  # uses


class Noise:
    """The numbers of the image with this seed, 0 .. 2^64 - 1."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._kept: dict[int, Floats] = {}

    def gumbel(self, position: int, size: int) -> Floats:
        """Standard Gumbel noise at a position, float32 `[size]`; the first numbers do not depend on `size`.

        Code c gets -log(-log((x + 1/2) / 2^32)), rounded once, with x the c-th 32-bit number of the stream, the lower
        half of each 64 bits first. Kept until `forget`: target and drafts ask for the same.
        """
        kept = self._kept.get(position)
        if kept is None or len(kept) < size:
            words = self._stream(position, _GUMBEL).random_raw((size + 1) // 2)
            uniform = words.astype("<u8").view("<u4")[:size].astype(np.float64)
            uniform += 0.5
            uniform *= 2.0**-32
            kept = self._kept[position] = -np.log(-np.log(uniform)).astype(np.float32)
        return kept[:size]

    def decisions(self, position: int) -> np.random.Generator:
        """Uniform numbers for relaxed acceptance at a position, independent of its Gumbel noise; from the start."""
        return np.random.Generator(self._stream(position, _DECISIONS))

    def forget(self, before: int) -> None:
        """Let go of the noise at positions that are decided."""
        self._kept = {position: noise for position, noise in self._kept.items() if position >= before}

    def _stream(self, position: int, use: int) -> np.random.Philox:
        return np.random.Philox(key=self.seed, counter=(use << 128) + (position << 64))
