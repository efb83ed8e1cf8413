"""Freed device memory, kept for whoever asks for the same size next.

Decodes of the same shapes ask for the same sizes in the same order, so they find the same addresses: what was captured
at them for one request (CUDA graphs) serves the next. What a block holds is left as it is.

Does not know what blocks are for.
"""

from __future__ import annotations

from ...errors import EngineError
from .cuda_memory import Block, DeviceMemory

MOST_KEPT = 8  # a cache, its narrower successors in a batch, and a few sizes of scratch memory


class BlockPool:
    """Hands out blocks; keeps the `most` freed last, and none of them rather than run out of memory."""

    def __init__(self, memory: DeviceMemory, most: int = MOST_KEPT) -> None:
        self._memory, self._most = memory, most
        self._used: dict[int, Block] = {}
        self._kept: dict[int, Block] = {}  # by address, the one freed last at the end

    def allocate(self, size: int) -> int:
        """The address of `size` bytes, those of a freed block of that size if there is one."""
        with self._memory.lock:
            fitting = [address for address, block in list(self._kept.items()) if block.size == size]
            block = self._kept.pop(fitting[-1], None) if fitting else None
            if block is None:  # also if garbage was collected meanwhile, which frees blocks
                block = self._new(size)
            self._used[block.address] = block
            return block.address

    def free(self, address: int) -> None:
        """Keep what `allocate` gave; the oldest beyond `most` go back to the device."""
        with self._memory.lock:
            self._kept[address] = self._used.pop(address)
            for oldest in list(self._kept)[: -self._most]:
                self._kept.pop(oldest, None)

    def _new(self, size: int) -> Block:
        try:
            return Block(self._memory, size)
        except EngineError:
            if not self._kept:
                raise
            self._kept.clear()
            return Block(self._memory, size)
