"""Keys and values in device memory: one block per cache, tensors at equal distances in it.

So are all new ones of a pass: one two-dimensional copy moves some entries of every tensor of every layer at once, and
appending costs as many copies as there are runs of accepted nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ...runtime.engine import Cache, Floats, Ints
from ..kv_cache import CacheRows
from .cuda import Block, CudaMemory, Scratch


class NewKV(NamedTuple):
    """New keys and values on the device: tensors `[nodes, rows, num_kv_heads, head_dim]`, `stride` bytes apart.

    number: of the pass, for they are overwritten by the next one on the same cache.
    """

    address: int
    stride: int
    number: int


class BlockCache(CacheRows):
    """A cache in device memory, by address; all of it is taken at once, and starts as zeros.

    count: tensors, keys and values of every layer, `[columns, rows, num_kv_heads, head_dim]`. entry: bytes of one
    node's keys (or values) of one row. scratch: for inputs and outputs of passes on this cache.
    """

    def __init__(self, memory: CudaMemory, rows: int, capacity: int, count: int, entry: int) -> None:
        super().__init__(np.zeros(rows, np.int64), capacity)
        self.memory, self.count, self.entry, self.scratch = memory, count, entry, Scratch(memory)
        self._take_block()

    def _take_block(self) -> None:
        self.block = Block(self.memory, self.count * self.stride)
        self.memory.zero(self.block.address, self.block.size)  # columns that no node may see must be finite

    @property
    def stride(self) -> int:
        """Bytes from one tensor to the next; a multiple of 256, as there are a multiple of 64 columns."""
        return self.columns * len(self.lengths) * self.entry

    def addresses(self) -> list[int]:
        """Where each tensor begins."""
        return [self.block.address + i * self.stride for i in range(self.count)]

    def append(self, new_kv: NewKV, accepted_indices: list[Ints]) -> None:
        """Append nodes `accepted_indices[r]` of `new_kv` to each row r."""
        sources, targets, lengths = self.places(accepted_indices)
        self.check_number(new_kv.number)
        entry, stride, start = self.entry, self.stride, self.block.address
        for source, target, length in runs(sources, targets):
            new = new_kv.address + source * entry
            self.memory.copy2d(start + target * entry, stride, new, new_kv.stride, length * entry, self.count)
        self.lengths = lengths

    def keep_rows(self, rows: Ints) -> None:
        """Keep only these rows, in this order; one copy of what they hold."""
        entry, before, old, old_pitch = self.entry, self.block, self.addresses(), len(self.lengths) * self.entry
        self.lengths, pitch = self.lengths[rows], len(rows) * self.entry
        self._take_block()
        for source, target, length in runs(rows, np.arange(len(rows))):
            for start, goal in zip(old, self.addresses(), strict=True):
                places = goal + target * entry, pitch, start + source * entry, old_pitch
                self.memory.copy2d(*places, length * entry, self.past_length())
        del before  # given back after the copies, in the order of the stream

    def extend(self, other: Cache) -> None:
        """Take in the rows of another cache; one copy of what both hold."""
        added = BlockCache.own(other)
        parts = [(one.addresses(), len(one.lengths) * one.entry, one.past_length()) for one in (self, added)]
        before = self.block, added.block
        self.join(added)
        self._take_block()
        place, pitch = 0, len(self.lengths) * self.entry
        for addresses, width, used in parts:
            for start, goal in zip(addresses, self.addresses(), strict=True):
                self.memory.copy2d(goal + place, pitch, start, width, width, used)
            place += width
        del before  # given back after the copies, in the order of the stream

    def check_number(self, number: int) -> None:
        """Raises: ValueError unless `number` is the last pass on this cache: its outputs have been overwritten."""
        if number != self.passes:
            raise ValueError(f"outputs of pass {number} on this cache, expected those of its last, {self.passes}")


class DeviceRows:
    """Rows `[rows, nodes, width]` on the device. Indexing the first two axes copies just those rows, as float32.

    padded_nodes: nodes per row in memory, of which the first `nodes` count.
    """

    def __init__(
        self, cache: BlockCache, address: int, dtype: type[np.generic], shape: tuple[int, int, int], padded_nodes: int
    ) -> None:
        rows, nodes, self._width = shape
        self._cache, self._number, self._address, self._dtype = cache, cache.passes, address, np.dtype(dtype)
        self._places = np.arange(rows)[:, None] * padded_nodes + np.arange(nodes)

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
