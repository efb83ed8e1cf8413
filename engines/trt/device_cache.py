"""Keys and values in device memory: one block per cache, tensors `[rows, num_kv_heads, columns, head_dim]` in it.

A pass writes its nodes after those that a row holds. Of a chain they are then in their places; accepted nodes of a tree
move down, one copy for every run of them in all heads of all layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from ...runtime.engine import Cache, Floats, Ints, Pass
from ..columns import Lying, fill_up, words
from ..contracts import Array
from ..kv_cache import CacheRows, round_up
from .cuda import Block, CudaMemory, Lines


class Layout(NamedTuple):
    """What all caches of a plan have in common. tensors: keys and values of every layer. entry: bytes of a head's."""

    tensors: int
    heads: int
    columns: int
    entry: int

    @property
    def row(self) -> int:
        """Bytes of a row in one tensor."""
        return self.heads * self.columns * self.entry


class BlockCache(CacheRows):
    """A cache in device memory, by address; all of it is taken at once, and starts as zeros.

    written: where the last pass wrote the first node of each row, int64 `[rows]`; None once that means nothing.
    """

    def __init__(self, memory: CudaMemory, rows: int, capacity: int, layout: Layout) -> None:
        super().__init__(np.zeros(rows, np.int64), capacity)
        self.memory, self.layout = memory, layout
        self.written: Ints | None = None
        self.block = Block(memory, layout.tensors * self.stride)
        memory.zero(self.block.address, self.block.size)  # columns that no node may see must be finite

    @property
    def columns(self) -> int:
        """Columns of every cache of the plan."""
        return self.layout.columns

    @property
    def stride(self) -> int:
        """Bytes from one tensor to the next; a multiple of 256, as there are a multiple of 64 columns."""
        return len(self.lengths) * self.layout.row

    def addresses(self) -> list[int]:
        """Where each tensor begins."""
        return [self.block.address + i * self.stride for i in range(self.layout.tensors)]

    def span(self, nodes: int) -> int:
        """Columns that a pass over so many nodes of every row reads."""
        return round_up(int(self.lengths.max(initial=0)) + nodes)

    def encode(self, batch: Pass, padded: int) -> dict[str, Array]:
        """A pass in the graph's tensors, but for what its nodes read; says in `written` where they go.

        Rows are filled up to so many nodes, which see the first column and nobody sees.
        """
        rows, nodes = batch.positions.shape
        past, span = batch.attention_mask.shape[2] - nodes, self.span(nodes)
        seen, row, known = np.zeros((rows, padded, span), bool), np.arange(rows)[:, None, None], min(past, span)
        seen[:, :nodes, :known] = batch.attention_mask[:, :, :known]
        own = self.lengths[:, None, None] + np.arange(nodes)  # columns of the new nodes
        seen[row, np.arange(nodes)[:, None], own] = batch.attention_mask[:, :, past:]
        seen[:, nodes:, 0] = True  # a softmax over nothing could give what is no number
        self.written = write = self.lengths.copy()
        return {"position_ids": fill_up(batch.positions, padded), "write": write, "seen": words(seen)}

    def append(self, new_kv: Ints, accepted_indices: list[Ints]) -> None:
        """Keep nodes `accepted_indices[r]`, in rising order, of each row r; new_kv: where the last pass wrote.

        Raises: ValueError if they do not fit, or another pass has been run since.
        """
        if new_kv is not self.written:
            raise ValueError("keys and values of a pass that was not the last one on this cache")
        lengths, row = self.grown(accepted_indices), 0
        if any((np.diff(nodes) <= 0).any() for nodes in accepted_indices):
            raise ValueError(f"accepted nodes {accepted_indices}, expected them in rising order")
        sources = [tuple((start + nodes).tolist()) for start, nodes in zip(new_kv, accepted_indices, strict=True)]
        for (length, source), alike in groupby(zip(self.lengths.tolist(), sources, strict=True)):
            count = len(list(alike))
            self._move(row, count, np.array(source, np.int64), length)
            row += count
        self.lengths, self.written = lengths, None

    def _move(self, row: int, count: int, source: Ints, target: int) -> None:
        """Copy columns `source` of `count` rows to those from `target` on, which do not lie behind them.

        A run is copied in parts no longer than it moves: a copy must not read what it writes.
        """
        tensors, heads, columns, entry = self.layout
        start, lines = self.block.address + row * self.layout.row, len(self.lengths) * heads
        for begin, goal, length in runs(source, target + np.arange(len(source))):
            for done in range(0, length, begin - goal) if begin > goal else ():
                to, at = (Lines(start + (place + done) * entry, columns * entry, lines) for place in (goal, begin))
                self.memory.copy(to, at, min(begin - goal, length - done) * entry, count * heads, tensors)

    def keep_rows(self, rows: Ints) -> None:
        """Keep only these rows, in this order; copied on the device."""
        self._gather([(self, rows)])

    def extend(self, other: Cache) -> None:
        """Take in the rows of another cache; copied on the device."""
        added = BlockCache.own(other)
        self.capacity = max(self.capacity, added.capacity)
        self._gather([(cache, np.arange(len(cache.lengths))) for cache in (self, added)])

    def _gather(self, parts: list[tuple[BlockCache, Ints]]) -> None:
        """Hold these rows of caches, in a block of one's own."""
        before = [(cache.block, cache.stride) for cache, _ in parts]  # given back in the order of the stream
        self.lengths = np.concatenate([cache.lengths[rows] for cache, rows in parts])
        row, tensors = self.layout.row, self.layout.tensors
        self.block, self.written, place = Block(self.memory, tensors * self.stride), None, 0
        for (block, stride), (_, rows) in zip(before, parts, strict=True):
            for source, target, length in runs(rows, place + np.arange(len(rows))):
                goal = Lines(self.block.address + target * row, self.stride, tensors)
                self.memory.copy(goal, Lines(block.address + source * row, stride, tensors), length * row, tensors)
            place += len(rows)


class DeviceRows(Lying):
    """Rows `[rows, nodes, width]` of an output on the device. Indexing the first two axes copies just those rows.

    shape: in memory, of which the first `nodes` of every row count.
    """

    def __init__(self, memory: CudaMemory, block: Block, dtype: str, shape: tuple[int, int, int], nodes: int) -> None:
        rows, self.stride, self._width = shape
        whole = (1, block.size // (self._width * np.dtype(dtype).itemsize), self._width)
        self.home, self.dtype, self.value = memory, dtype, (whole, block.address)
        self._memory, self._block = memory, block
        self._places = np.arange(rows * self.stride).reshape(rows, -1)[:, :nodes]

    def __getitem__(self, key: Any) -> Floats:
        places, width = np.asarray(self._places[key]), self._width
        found = np.empty((places.size, width), self.dtype)
        for source, target, length in runs(places.ravel(), np.arange(places.size)):
            self._memory.download(found[target : target + length], self._block.address + source * found.strides[0])
        self._memory.synchronise()
        chosen: Floats = found.reshape(*places.shape, width).astype(np.float32, copy=False)
        return chosen


def runs(source: Ints, target: Ints) -> Iterator[tuple[int, int, int]]:
    """Pairs of places as runs (source, target, length) in which both go up by one; targets go up throughout."""
    breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
    starts = np.concatenate([np.zeros(min(1, len(source)), np.int64), breaks])
    lengths = np.diff(np.append(starts, len(source)))
    return zip(source[starts].tolist(), target[starts].tolist(), lengths.tolist(), strict=True)
