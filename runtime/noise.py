"""The random numbers of one image: functions of its seed and a position, so that none of them has a state to keep.

The token at position t is the arg-max of log p + g, where g is standard Gumbel noise that depends on seed and t alone:
an exact draw from p (the Gumbel-max trick), and the same one whoever computes p. Drafts are made with the same noise on
the drafter's distribution q, and accepted if they are the target's choice (drafter-invariant speculative decoding,
Daliri, Musco, Suresh 2024). The k best of log q + g are k draws without replacement (Gumbel top-k).

The numbers are specified in docs/seeds.md and belong to the format `FORMAT`: they never change within it.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import numpy as np

from .engine import Floats

FORMAT: Literal["philox4x64-gumbel-1"] = "philox4x64-gumbel-1"
_GUMBEL, _DECISIONS = 0, 1  # uses
GROUP_SIZE = 16  # positions whose noise is made together, which costs a third
CHUNK_SIZE = 512  # codes at a time, which stay in a processor's cache


class Noise:
    """The numbers of the image with this seed, 0 .. 2^64 - 1."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._groups: dict[int, Floats] = {}  # by group: [GROUP_SIZE, size]

    def gumbel(self, first: int, count: int, size: int) -> Floats:
        """Standard Gumbel noise at the `count` positions from `first`, float32 `[count, size]`.

        Code c at position t gets -log(-log((x + 1/2) / 2^32)), rounded once, where x is number 16 c + t mod 16 of the
        stream of group t div 16: 32-bit numbers, the lower half of each 64 bits first. The numbers of a code do not
        depend on `size`. Groups are kept until `forget`: target and drafts ask for the same.
        """
        group, start = divmod(first, GROUP_SIZE)
        if start + count <= GROUP_SIZE:
            return self._group(group, size)[start : start + count]
        parts = [self._group(one, size) for one in range(group, (first + count - 1) // GROUP_SIZE + 1)]
        return np.concatenate(parts)[start : start + count]

    def decisions(self, position: int) -> np.random.Generator:
        """Uniform numbers for relaxed acceptance at a position, independent of its Gumbel noise; from the start.

        It is the same generator for all positions: take what one needs before asking for the next.
        """
        return self._decisions.at(position)

    def forget(self, before: int) -> None:
        """Let go of groups of which all positions are decided."""
        while self._groups and (first := min(self._groups)) < before // GROUP_SIZE:
            del self._groups[first]

    def _group(self, group: int, size: int) -> Floats:
        kept = self._groups.get(group)
        if kept is None or kept.shape[1] < size:
            bits = self._noise.at(group).bit_generator
            kept = self._groups[group] = np.empty((GROUP_SIZE, size), np.float32)
            for start in range(0, size, CHUNK_SIZE):
                codes = min(CHUNK_SIZE, size - start)
                numbers = bits.random_raw(codes * GROUP_SIZE // 2).astype("<u8", copy=False).view("<u4")
                uniform = np.add(numbers, 0.5, dtype=np.float64)
                uniform *= 2.0**-32
                np.log(uniform, out=uniform)
                np.negative(uniform, out=uniform)
                np.log(uniform, out=uniform)
                kept[:, start : start + codes] = uniform.reshape(codes, GROUP_SIZE).T
            np.negative(kept, out=kept)
        return kept[:, :size]

    @cached_property
    def _noise(self) -> _Streams:
        return _Streams(self.seed, _GUMBEL)

    @cached_property
    def _decisions(self) -> _Streams:
        return _Streams(self.seed, _DECISIONS)


class _Streams:
    """Philox4x64-10 with key (seed, 0) from counter (0, index, use, 0) on, which is raised before each block.

    One generator that is moved about: a new one asks the system for a seed that is not used, and took 70 to 96 us in
    a decode, 8 in a loop (measured here).
    """

    def __init__(self, seed: int, use: int) -> None:
        self._bits = np.random.Philox(key=seed, counter=use << 128)
        self._generator, self._state = np.random.Generator(self._bits), self._bits.state

    def at(self, index: int) -> np.random.Generator:
        """The generator, moved to where the stream of `index` begins."""
        self._state["state"]["counter"][1] = index
        self._bits.state = self._state
        return self._generator
