"""Random numbers of one image: functions of its seed and a position, without a state.

The token at position t is the arg-max of log p + g, where g is standard Gumbel noise that depends only on seed and t.
It is an exact sample from p (the Gumbel-max trick), and the same sample in every method that computes p. Drafts use the
same noise with the drafter's distribution q, and are accepted if they equal the target's choice (drafter-invariant
speculative decoding, Daliri, Musco, Suresh 2024). The k best of log q + g are k samples without replacement (Gumbel
top-k).

docs/seeds.md specifies the numbers, which belong to the format `FORMAT` and never change within it.
"""

from __future__ import annotations

import threading
from functools import cached_property
from typing import Literal

import numpy as np

from .engine import Floats

FORMAT: Literal["philox4x64-gumbel-1"] = "philox4x64-gumbel-1"
_GUMBEL = 0  # stream for Gumbel noise
_DECISIONS = 1  # stream for relaxed acceptance
GROUP_SIZE = 16  # number of positions whose noise is made at once, which is faster
CHUNK_SIZE = 512  # number of codes whose noise is made at once; larger arrays do not stay in the processor's cache


class Noise:
    """Random numbers of the image with a seed, 0 .. 2^64 - 1. Other threads may call `prepare_noise_group`."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._lock = threading.Lock()
        self._groups: dict[int, Floats] = {}  # group -> noise, float32 `[GROUP_SIZE, size]`

    def gumbel(self, first_position: int, num_positions: int, vocab_size: int) -> Floats:
        """Generate standard Gumbel noise.

        Code c at position t gets -log(-log((x + 1/2) / 2^32)), rounded once. Here x is number 16 c + t mod 16 of the
        stream of group t div 16: 32-bit numbers, the lower half of each 64 bits first. The numbers of a code do not
        depend on `vocab_size`. Groups are stored until `discard_noise_before` is called: target and drafts need the
        same noise.

        Args:
            num_positions: number of positions.
            vocab_size: number of codes.

        Returns:
            Noise, float32 `[num_positions, vocab_size]`.
        """
        group, start = divmod(first_position, GROUP_SIZE)
        if start + num_positions <= GROUP_SIZE:
            return self._get_noise_group(group, vocab_size)[start : start + num_positions]
        last_group = (first_position + num_positions - 1) // GROUP_SIZE
        groups = [self._get_noise_group(index, vocab_size) for index in range(group, last_group + 1)]
        return np.concatenate(groups)[start : start + num_positions]

    def prepare_noise_group(self, group: int, vocab_size: int) -> None:
        """Generate and store a group's noise ahead of `gumbel`.

        Args:
            group: index of a group of `GROUP_SIZE` positions.
            vocab_size: number of codes.
        """
        self._get_noise_group(group, vocab_size)

    def acceptance_rng(self, position: int) -> np.random.Generator:
        """Return the uniform numbers of relaxed acceptance at a position, independent of its Gumbel noise.

        Every call starts with the first number. All positions share one generator object: take all numbers of one
        position before the next call.
        """
        return self._acceptance_streams.seek(position)

    def discard_noise_before(self, position: int) -> None:
        """Delete stored groups whose positions are all smaller than `position`."""
        for group in tuple(self._groups):
            if group < position // GROUP_SIZE:
                del self._groups[group]

    def _get_noise_group(self, group: int, vocab_size: int) -> Floats:
        noise = self._groups.get(group)
        if noise is None or noise.shape[1] < vocab_size:
            with self._lock:
                noise = self._groups.get(group)  # another thread may have generated it meanwhile
                if noise is None or noise.shape[1] < vocab_size:
                    noise = self._groups[group] = self._generate_noise_group(group, vocab_size)
        return noise[:, :vocab_size]

    def _generate_noise_group(self, group: int, vocab_size: int) -> Floats:
        bits = self._gumbel_streams.seek(group).bit_generator
        noise = np.empty((GROUP_SIZE, vocab_size), np.float32)
        for start in range(0, vocab_size, CHUNK_SIZE):
            codes = min(CHUNK_SIZE, vocab_size - start)
            # A 64-bit number holds two 32-bit numbers, the lower half first whatever the processor's byte order.
            numbers = bits.random_raw(codes * GROUP_SIZE // 2).astype("<u8", copy=False).view("<u4")
            uniform = np.add(numbers, 0.5, dtype=np.float64)  # so that the noise is finite
            uniform *= 2.0**-32
            np.log(uniform, out=uniform)
            np.negative(uniform, out=uniform)
            np.log(uniform, out=uniform)
            noise[:, start : start + codes] = uniform.reshape(codes, GROUP_SIZE).T  # the stream is code by code
        np.negative(noise, out=noise)
        return noise

    @cached_property
    def _gumbel_streams(self) -> _PhiloxStreams:
        return _PhiloxStreams(self.seed, _GUMBEL)

    @cached_property
    def _acceptance_streams(self) -> _PhiloxStreams:
        return _PhiloxStreams(self.seed, _DECISIONS)


class _PhiloxStreams:
    """Philox4x64-10 streams with key (seed, 0) and initial counter (0, index, use, 0), increased before each block.

    All streams share one generator, whose state is set for each. A new generator asks the system for a seed that it
    does not use, and took 70 to 96 us in a decode, 8 us in a loop (measured here).
    """

    def __init__(self, seed: int, purpose: int) -> None:
        self._bits = np.random.Philox(key=seed, counter=purpose << 128)
        self._generator = np.random.Generator(self._bits)
        self._state = self._bits.state

    def seek(self, index: int) -> np.random.Generator:
        """Return the generator at the start of the stream `index`."""
        self._state["state"]["counter"][1] = index
        self._bits.state = self._state
        return self._generator
