"""Keys and values of committed nodes: how many each row has (`CacheRows`), and NumPy buffers of them (`KVCache`).

Buffers are past first, `[columns, rows, num_kv_heads, head_dim]`: the first `past_length` columns are contiguous, so
ONNX Runtime reads them in place; the usual rows-first layout would be copied at every pass. Buffers start as zeros and
only ever receive what a graph computed, so that columns no node may see are finite and add nothing to any sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ..errors import EngineError
from ..runtime.engine import Cache, Ints
from .host import available_memory

Halves = NDArray[np.float32] | NDArray[np.float16]

# Past lengths are multiples of this. ONNX Runtime's softmax sums columns in SIMD lanes, by column number modulo their
# number (16 with AVX-512). When new nodes start at a multiple of 64, a row's sums are formed in the same order however
# long the other rows of the batch are and however many nodes the pass has.
SPAN_STEP = 64


def round_up(number: int, step: int = SPAN_STEP) -> int:
    """The next multiple of `step`."""
    return -(-number // step) * step


@dataclass
class CacheRows:
    """How much of a cache is filled, wherever it is kept, and the passes that were run for it (`passes`).

    lengths: entries per row, int64 `[rows]`. capacity: entries that a row may have.
    """

    lengths: Ints
    capacity: int
    passes: int = field(default=0, kw_only=True)

    @classmethod
    def require(cls, cache: Cache) -> Self:
        """The cache, if it is of this kind. Raises: TypeError on that of another engine."""
        if not isinstance(cache, cls):
            raise TypeError(f"a cache of another engine: {type(cache).__name__}")
        return cache

    @property
    def columns(self) -> int:
        """Columns that memory is taken for."""
        return round_up(max(1, self.capacity))

    def past_length(self) -> int:
        """Columns that a pass reads: the longest row, rounded up to the next `SPAN_STEP`.

        Never 0: ONNX Runtime's fused matrix product divides by the number of columns and dies (SIGFPE).
        """
        return round_up(max(1, *self.lengths.tolist()))

    def extended_lengths(self, accepted_indices: list[Ints]) -> Ints:
        """Lengths once nodes `accepted_indices[r]` of row r are appended. Raises: ValueError if they do not fit."""
        counts, before = [len(indices) for indices in accepted_indices], self.lengths.tolist()
        lengths = [length + count for length, count in zip(before, counts, strict=False)]  # a few: NumPy takes longer
        if len(counts) != len(before) or max(lengths, default=0) > self.capacity:
            raise ValueError(f"{len(counts)} rows of {counts} entries do not fit {before}, {self.capacity}")
        return np.array(lengths, np.int64)

    def select(self, rows: Ints) -> None:
        """Keep only these rows, in this order."""
        self.lengths = self.lengths[rows]

    def join(self, other: Self) -> None:
        """Count the rows of another cache among one's own; the larger capacity is for all."""
        self.lengths = np.concatenate([self.lengths, other.lengths])
        self.capacity = max(self.capacity, other.capacity)

    def truncate(self, lengths: Ints) -> None:
        """Forget everything past `lengths[r]` in each row r; the columns keep their (finite) numbers."""
        if (lengths > self.lengths).any() or (lengths < 0).any():
            raise ValueError(f"lengths {lengths} are no truncation of {self.lengths}")
        self.lengths = np.array(lengths, np.int64)


@dataclass
class KVCache(CacheRows):
    """Keys and values in the host's memory; `tensors` are key 0, value 0, key 1, ..."""

    tensors: list[Halves]

    @classmethod
    def empty(
        cls, rows: int, capacity: int, layers: int, num_kv_heads: int, head_dim: int, dtype: type[np.floating]
    ) -> KVCache:
        """A cache without entries. Memory is taken from the system only as columns are written.

        Raises: EngineError: there is less memory than it takes when full.
        """
        cache = cls(np.zeros(rows, np.int64), capacity, [])
        shape = 2 * layers, cache.columns, rows, num_kv_heads, head_dim
        size = prod(shape) * np.dtype(dtype).itemsize
        free = available_memory()
        try:
            if size > free:
                raise MemoryError
            # One block for all, for which NumPy asks for huge pages: 40 times fewer page faults.
            cache.tensors = list(np.zeros(shape, dtype))
        except MemoryError as error:  # also of a limit that nobody tells
            raise EngineError(
                f"keys and values of {rows} rows of {cache.columns:,} tokens need {size / 2**30:.1f} GiB",
                field="memory",
                found=f"{free / 2**30:.1f} GiB free",
                remedy="draw fewer images at once",
            ) from error
        return cache

    def past(self, past_length: int) -> list[Halves]:
        """The first `past_length` columns of every tensor: contiguous views, no copies."""
        return [tensor[:past_length] for tensor in self.tensors]

    def append(self, new_kv: list[Halves], accepted_indices: list[Ints]) -> None:
        """Append nodes `accepted_indices[r]` of `new_kv [nodes, rows, num_kv_heads, head_dim]` to each row r."""
        before, lengths, first = self.lengths.tolist(), self.extended_lengths(accepted_indices), accepted_indices[0]
        alike = all(one is first or np.array_equal(one, first) for one in accepted_indices)
        if alike and before.count(before[0]) == len(before):
            start, end = before[0], before[0] + len(first)
            for tensor, new in zip(self.tensors, new_kv, strict=True):
                new.take(first, 0, tensor[start:end], "clip")  # "raise" would copy twice
        else:
            row = np.repeat(np.arange(len(lengths)), lengths - self.lengths)
            column = np.concatenate([np.arange(start, end) for start, end in zip(before, lengths, strict=True)])
            source, target = (place * len(lengths) + row for place in (np.concatenate(accepted_indices), column))
            for tensor, new in zip(self.tensors, new_kv, strict=True):
                entry = tensor.shape[2:]
                tensor.reshape(-1, *entry)[target] = new.reshape(-1, *entry)[source]
        self.lengths = lengths

    def keep_rows(self, rows: Ints) -> None:
        """Keep only these rows, in this order; one copy of what they hold."""
        self._gather([(self, rows)], self.capacity)
        self.select(rows)

    def extend(self, other: Cache) -> None:
        """Take in the rows of another cache; one copy of what both hold."""
        added = KVCache.require(other)
        self._gather([(self, slice(None)), (added, slice(None))], max(self.capacity, added.capacity))
        self.join(added)

    def _gather(self, parts: Sequence[tuple[KVCache, Ints | slice]], capacity: int) -> None:
        """Hold these rows of caches. Nothing is changed if they do not fit."""
        (*_, heads, width), kind, layers = self.tensors[0].shape, self.tensors[0].dtype.type, len(self.tensors) // 2
        count = sum(len(cache.lengths[rows]) for cache, rows in parts)
        gathered, first = KVCache.empty(count, capacity, layers, heads, width, kind).tensors, 0
        for cache, rows in parts:
            lengths = cache.lengths[rows]
            used, end = round_up(int(lengths.max(initial=0))), first + len(lengths)
            for tensor, own in zip(gathered, cache.tensors, strict=True):
                tensor[:used, first:end] = own[:used, rows]
            first = end
        self.tensors = gathered
