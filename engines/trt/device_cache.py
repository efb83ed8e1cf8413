"""Keys and values in device memory: one block per cache, tensors at equal distances in it.

Since all tensors of a cache, and all fresh ones of a pass, lie at equal distances, one two-dimensional copy moves
some entries of every tensor of every layer at once: appending costs as many copies as there are runs of accepted
nodes, however many layers there are.

Does not know graphs, nor which node was accepted and why.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...runtime.engine import Floats, Ints
from ..kv_cache import Halves, KVCache, round_up
from .cuda_memory import Allocator, Block, DeviceMemory


@dataclass(frozen=True)
class Fresh:
    """New keys and values on the device: tensors `[nodes, rows, num_kv_heads, head_dim]`, `stride` bytes apart.

    number: of the pass, for they are overwritten by the next one on the same cache.
    """

    address: int
    stride: int
    rows: int
    number: int


@dataclass(kw_only=True)
class BlockCache(KVCache):
    """The cache of `kv_cache.py` in device memory; `tensors` stays empty, passes bind addresses.

    entry: bytes of one node's keys (or values) of one row. count: tensors, keys and values of every layer.
    blocks: where its memory comes from. `scratch` is where passes on this cache keep their inputs and outputs, so that
    caches share nothing.
    """

    memory: DeviceMemory
    blocks: Allocator
    block: Block
    entry: int
    count: int
    scratch: Block | None = None

    @classmethod
    def zeros(
        cls,
        memory: DeviceMemory,
        rows: int,
        capacity: int,
        count: int,
        entry: int,
        blocks: Allocator | None = None,
    ) -> BlockCache:
        """A cache without entries; all its memory is taken at once, from `blocks` or else from the device."""
        blocks = memory if blocks is None else blocks
        cache = cls(
            tensors=[],
            lengths=np.zeros(rows, np.int64),
            capacity=capacity,
            memory=memory,
            blocks=blocks,
            block=Block(blocks, count * round_up(max(1, capacity)) * rows * entry),
            entry=entry,
            count=count,
        )
        memory.zero(cache.block.address, cache.block.size)  # columns that no node may see must be finite
        return cache

    @property
    def stride(self) -> int:
        """Bytes from one tensor to the next; a multiple of 256, as there are a multiple of 64 columns."""
        return round_up(max(1, self.capacity)) * len(self.lengths) * self.entry

    def addresses(self) -> list[int]:
        """Where each tensor begins."""
        return [self.block.address + i * self.stride for i in range(self.count)]

    def past(self, past_length: int) -> list[Halves]:
        """Not for device memory: passes bind addresses."""
        raise TypeError("a cache on a device has no NumPy views")

    def append(self, new_kv: Any, accepted_indices: list[Ints]) -> None:
        """Append nodes `accepted_indices[r]` of `new_kv` to each row r."""
        counts, rows = self.check_picks(accepted_indices), len(self.lengths)
        self.check_number(new_kv.number)
        row = np.repeat(np.arange(rows), counts)
        column = np.concatenate([np.arange(n) + start for n, start in zip(counts, self.lengths, strict=True)])
        for source, target, length in runs(np.concatenate(accepted_indices) * new_kv.rows + row, column * rows + row):
            self.memory.copy2d(
                self.block.address + target * self.entry,
                self.stride,
                new_kv.address + source * self.entry,
                new_kv.stride,
                length * self.entry,
                self.count,
            )
        self.lengths = self.lengths + counts

    def take_scratch(self, size: int) -> int:
        """The address of at least `size` bytes of scratch memory, the same until more is asked for than ever before.

        Sizes are powers of two: as decodes grow, addresses stay.
        """
        if self.scratch is None or self.scratch.size < size:
            self.scratch = None  # given back before more is taken
            self.scratch = Block(self.blocks, 1 << (size - 1).bit_length())
        return self.scratch.address

    def keep_rows(self, rows: Ints) -> None:
        """Keep only these rows, in this order; one copy of what they hold."""
        before, old, old_stride, old_rows = self.block, self.addresses(), self.stride, len(self.lengths)
        self.lengths = self.lengths[rows]
        self.block = Block(self.blocks, old_stride // old_rows * len(rows) * self.count)
        self.memory.zero(self.block.address, self.block.size)
        for source, target, length in runs(rows, np.arange(len(rows))):
            for start, goal in zip(old, self.addresses(), strict=True):
                self.memory.copy2d(
                    goal + target * self.entry,
                    len(rows) * self.entry,
                    start + source * self.entry,
                    old_rows * self.entry,
                    length * self.entry,
                    self.past_length(),
                )
        del before  # given back after the copies, in the order of the stream

    def check_number(self, number: int) -> None:
        """ValueError unless `number` is the last pass on this cache: its outputs have been overwritten."""
        if number != self.passes:
            raise ValueError(f"outputs of pass {number} on this cache, expected those of its last, {self.passes}")


class DeviceRows:
    """Rows `[rows, nodes, width]` on the device. Indexing the first two axes copies just those rows, as float32.

    stretched: nodes per row in memory, of which the first `nodes` count.
    """

    def __init__(
        self, cache: BlockCache, address: int, dtype: type[np.generic], shape: tuple[int, int, int], stretched: int
    ) -> None:
        rows, nodes, self._width = shape
        self._cache, self._number, self._address, self._dtype = cache, cache.passes, address, np.dtype(dtype)
        self._places = np.arange(rows)[:, None] * stretched + np.arange(nodes)

    def __getitem__(self, key: Any) -> Floats:
        self._cache.check_number(self._number)
        memory, row_bytes = self._cache.memory, self._width * self._dtype.itemsize
        places: Ints = np.asarray(self._places[key])
        found = np.empty((places.size, self._width), self._dtype)
        for source, target, length in runs(places.ravel(), np.arange(places.size)):
            memory.download(found[target : target + length], self._address + source * row_bytes)
        memory.synchronise()
        chosen: Floats = found.reshape(*places.shape, self._width).astype(np.float32, copy=False)
        return chosen


def runs(source: Ints, target: Ints) -> Iterator[tuple[int, int, int]]:
    """Pairs of places as runs (source, target, length) in which both go up by one; in the order of targets."""
    order = np.argsort(target, kind="stable")
    source, target = source[order], target[order]
    breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
    starts = np.concatenate([np.zeros(min(1, len(source)), np.int64), breaks])
    lengths = np.diff(np.append(starts, len(source)))
    return zip(source[starts].tolist(), target[starts].tolist(), lengths.tolist(), strict=True)
