"""Random numbers of one image, which depend only on the seed of the image and on a position.

The token at position t is the arg-max of log p + g. Here p is the target's distribution, and g is standard Gumbel noise
that depends only on the seed and t. This token is an exact sample from p (Gumbel-max trick), and the same sample in
every method that computes p. Draft tokens are chosen with the same noise and the drafter's distribution q. They are
accepted if they equal the target's token (drafter-invariant speculative decoding, Daliri, Musco, Suresh 2024). The k
tokens with the highest log q + g are k samples from q without replacement (Gumbel top-k).

docs/seeds.md specifies the random numbers of the format `FORMAT`. They never change for this format.
"""

from __future__ import annotations

import threading
from typing import Literal

import numpy as np

from .engine import Floats

FORMAT: Literal["philox4x64-gumbel-1"] = "philox4x64-gumbel-1"
_GUMBEL = 0  # purpose of the random streams for Gumbel noise
_DECISIONS = 1  # purpose of the random streams for relaxed acceptance
GROUP_SIZE = 16  # number of positions whose noise is generated together, which is faster
# Number of codes whose noise is computed at once. Larger arrays would not stay in the processor's cache.
CHUNK_SIZE = 512


class Noise:
    """Random numbers of one image, which depend on the seed of the image (0 .. 2^64 - 1).

    The methods are for one thread, except `prepare_noise_group`, which other threads may call at the same time.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        # Not a `cached_property`: in Python 3.11, it takes a lock that all images share. If another thread holds the
        # lock while the process forks, it stays locked in the new process.
        self._gumbel_streams = _PhiloxStreams(seed, _GUMBEL)
        self._acceptance_streams = _PhiloxStreams(seed, _DECISIONS)
        self._lock = threading.Lock()
        self._groups: dict[int, Floats] = {}  # {group: noise}, float32 `[GROUP_SIZE, vocab_size]`

    def gumbel(self, first_position: int, num_positions: int, vocab_size: int) -> Floats:
        """Generate standard Gumbel noise.

        The noise of code c at position t is -log(-log((x + 1/2) / 2^32)), rounded once. Here x is the 32-bit number
        with index 16 c + t mod 16 in the random stream of group t div 16. Of each 64 bits, the lower half comes first.
        The noise of a code does not depend on `vocab_size`. Groups are stored until `discard_noise_before` deletes
        them, because target and drafts need the same noise.

        Args:
            first_position: first position, from 0.
            num_positions: number of positions.
            vocab_size: number of codes in the codebook.

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
        """Generate and store the noise of a group of `GROUP_SIZE` positions, so that `gumbel` is faster later."""
        self._get_noise_group(group, vocab_size)

    def acceptance_rng(self, position: int) -> np.random.Generator:
        """Return the generator of the random numbers of relaxed acceptance at a position.

        These numbers do not depend on the Gumbel noise. Every call returns the same generator object, set to the first
        number of the position. So a caller must read all numbers of one position before the next call.
        """
        return self._acceptance_streams.seek_stream(position)

    def discard_noise_before(self, position: int) -> None:
        # The loop needs a copy of the keys, because it deletes entries.
        for group in tuple(self._groups):
            if group < position // GROUP_SIZE:
                del self._groups[group]

    def _get_noise_group(self, group: int, vocab_size: int) -> Floats:
        noise = self._groups.get(group)
        if noise is None or noise.shape[1] < vocab_size:
            with self._lock:  # the random streams of all groups use one generator
                noise = self._groups.get(group)  # another thread may have generated it meanwhile
                if noise is None or noise.shape[1] < vocab_size:
                    noise = self._groups[group] = self._generate_noise_group(group, vocab_size)
        return noise[:, :vocab_size]

    def _generate_noise_group(self, group: int, vocab_size: int) -> Floats:
        bits = self._gumbel_streams.seek_stream(group).bit_generator
        noise = np.empty((GROUP_SIZE, vocab_size), np.float32)
        for start in range(0, vocab_size, CHUNK_SIZE):
            codes = min(CHUNK_SIZE, vocab_size - start)
            # A 64-bit number contains two 32-bit numbers. The conversion to little-endian puts the lower half first on
            # every processor.
            numbers = bits.random_raw(codes * GROUP_SIZE // 2).astype("<u8", copy=False).view("<u4")
            uniform = np.add(numbers, 0.5, dtype=np.float64)  # 0.5 keeps the noise finite for 0
            uniform *= 2.0**-32
            np.log(uniform, out=uniform)
            np.negative(uniform, out=uniform)
            np.log(uniform, out=uniform)
            noise[:, start : start + codes] = uniform.reshape(codes, GROUP_SIZE).T  # codes come first in the stream
        np.negative(noise, out=noise)
        return noise


class _PhiloxStreams:
    """Philox4x64-10 random streams with key (seed, 0) and initial counter (0, index, purpose, 0).

    The counter is increased before each block of numbers. All streams use one generator object, whose state is set for
    each stream. A new generator for each stream would be slower: it asks the system for a seed that is not needed. This
    took 70 to 96 us in a decode, and 8 us in a loop (measured here).
    """

    def __init__(self, seed: int, purpose: int) -> None:
        self._bits = np.random.Philox(key=seed, counter=purpose << 128)
        self._generator = np.random.Generator(self._bits)
        self._state = self._bits.state

    def seek_stream(self, index: int) -> np.random.Generator:
        self._state["state"]["counter"][1] = index
        self._bits.state = self._state
        return self._generator
