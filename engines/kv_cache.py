"""KV caches: the base class of all caches (`BaseKVCache`), and a cache in NumPy arrays on the host (`KVCache`).

Arrays have the shape `[columns, rows, num_kv_heads, head_dim]`. The first `past_length` columns are therefore
contiguous, and ONNX Runtime reads them in place. With the usual order, rows first, every pass would copy them. Arrays
start as zeros and receive only outputs of a graph. Masked columns are therefore finite, and add 0 to any sum.
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

CacheArray = NDArray[np.float32] | NDArray[np.float16]

# The number of cache columns that a pass reads is a multiple of `COLUMN_STEP`. ONNX Runtime's softmax sums columns in
# SIMD lanes (16 lanes with AVX-512): column c in lane c modulo the number of lanes. When new nodes start at a
# multiple of 64, the order of summation in a row depends neither on other rows nor on the number of nodes.
COLUMN_STEP = 64


def round_up(number: int, step: int = COLUMN_STEP) -> int:
    return -(-number // step) * step


@dataclass
class BaseKVCache:
    """Base class of KV caches, with the number of entries of each row. Subclasses store the entries."""

    lengths: Ints  # number of entries of each row, int64 `[rows]`
    capacity: int  # maximum number of entries of a row
    num_passes: int = field(default=0, kw_only=True)

    @classmethod
    def require_instance(cls, cache: Cache) -> Self:
        """Return `cache` if this kind of engine made it, else raise TypeError."""
        if not isinstance(cache, cls):
            raise TypeError(f"the cache is from another engine: {type(cache).__name__}")
        return cache

    @property
    def num_columns(self) -> int:
        return round_up(max(1, self.capacity))

    def past_length(self) -> int:
        """Return the number of cache columns that a pass reads: the length of the longest row, rounded up.

        It is never 0, because ONNX Runtime's fused matmul would divide by 0 and crash (SIGFPE).
        """
        return round_up(max(1, *self.lengths.tolist()))

    def compute_extended_lengths(self, accepted_indices: list[Ints]) -> Ints:
        """Return the lengths of rows after accepted nodes are appended, or raise ValueError if they do not fit."""
        counts = [len(indices) for indices in accepted_indices]
        before = self.lengths.tolist()
        lengths = [length + count for length, count in zip(before, counts, strict=False)]  # faster than NumPy
        if len(counts) != len(before) or max(lengths, default=0) > self.capacity:
            raise ValueError(f"{counts} entries do not fit into rows of lengths {before} and capacity {self.capacity}")
        return np.array(lengths, np.int64)

    def select_rows(self, rows: Ints) -> None:
        self.lengths = self.lengths[rows]

    def append_rows(self, cache: Self) -> None:
        self.lengths = np.concatenate([self.lengths, cache.lengths])
        self.capacity = max(self.capacity, cache.capacity)

    def truncate(self, lengths: Ints) -> None:
        """Keep only the first `lengths[r]` entries of each row r, without clearing memory."""
        if (lengths > self.lengths).any() or (lengths < 0).any():
            raise ValueError(f"rows of lengths {self.lengths} cannot be truncated to {lengths}")
        self.lengths = np.array(lengths, np.int64)


@dataclass
class KVCache(BaseKVCache):
    """KV cache in NumPy arrays."""

    # Keys of layer 0, values of layer 0, keys of layer 1, ...; `[columns, rows, num_kv_heads, head_dim]`.
    tensors: list[CacheArray]
    position_vectors: dict[int, list[CacheArray]] = field(default_factory=dict)  # of `PositionVectors`

    @classmethod
    def empty(
        cls, rows: int, capacity: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype: type[np.floating]
    ) -> KVCache:
        """Create a cache without entries, or raise EngineError if less memory is available than the full cache needs.

        The operating system provides memory as columns are written.
        """
        cache = cls(np.zeros(rows, np.int64), capacity, [])
        shape = 2 * num_layers, cache.num_columns, rows, num_kv_heads, head_dim
        size = prod(shape) * np.dtype(dtype).itemsize
        free = available_memory()
        try:
            if size > free:
                raise MemoryError
            # All tensors are in one array. NumPy requests huge pages for it: 40 times fewer page faults.
            cache.tensors = list(np.zeros(shape, dtype))
        except MemoryError as error:  # NumPy raises it, too, under limits that cannot be queried
            raise EngineError(
                f"keys and values of {rows} rows of {cache.num_columns:,} tokens need {size / 2**30:.1f} GiB",
                field="memory",
                found=f"{free / 2**30:.1f} GiB free",
                remedy="generate fewer images at once",
            ) from error
        return cache

    def append(self, new_kv: list[CacheArray], accepted_indices: list[Ints]) -> None:
        """Append keys and values of accepted nodes; tensors of `new_kv` are `[nodes, rows, num_kv_heads, head_dim]`."""
        before = self.lengths.tolist()
        lengths = self.compute_extended_lengths(accepted_indices)
        first = accepted_indices[0]
        same_nodes = all(indices is first or np.array_equal(indices, first) for indices in accepted_indices)
        # If all rows have equal lengths and accept the same nodes, the columns to write are one contiguous block.
        if same_nodes and before.count(before[0]) == len(before):
            start = before[0]
            end = start + len(first)
            for tensor, new in zip(self.tensors, new_kv, strict=True):
                new.take(first, 0, tensor[start:end], "clip")  # the default mode, "raise", would copy twice
        else:
            row = np.repeat(np.arange(len(lengths)), lengths - self.lengths)
            column = np.concatenate([np.arange(start, end) for start, end in zip(before, lengths, strict=True)])
            # Indices in the flattened first two axes of `new_kv [nodes, rows, ...]` and of tensors [columns, rows, ...]
            source = np.concatenate(accepted_indices) * len(lengths) + row
            target = column * len(lengths) + row
            for tensor, new in zip(self.tensors, new_kv, strict=True):
                entry = tensor.shape[2:]
                tensor.reshape(-1, *entry)[target] = new.reshape(-1, *entry)[source]
        self.lengths = lengths

    def keep_rows(self, rows: Ints) -> None:
        self._copy_rows([(self, rows)], self.capacity)
        self.select_rows(rows)

    def extend(self, cache: Cache) -> None:
        added = KVCache.require_instance(cache)
        self._copy_rows([(self, slice(None)), (added, slice(None))], max(self.capacity, added.capacity))
        self.append_rows(added)

    def forbid_memory_reuse(self) -> None:
        """No other cache reuses the memory."""

    def _copy_rows(self, sources: Sequence[tuple[KVCache, Ints | slice]], capacity: int) -> None:
        """Replace the tensors by copies of rows of several caches. If memory is insufficient, nothing changes."""
        *_, heads, width = self.tensors[0].shape
        dtype = self.tensors[0].dtype.type
        layers = len(self.tensors) // 2
        count = sum(len(cache.lengths[rows]) for cache, rows in sources)
        gathered = KVCache.empty(count, capacity, layers, heads, width, dtype).tensors
        first = 0
        for cache, rows in sources:
            lengths = cache.lengths[rows]
            used = round_up(int(lengths.max(initial=0)))
            end = first + len(lengths)
            for target, source in zip(gathered, cache.tensors, strict=True):
                target[:used, first:end] = source[:used, rows]
            first = end
        self.tensors = gathered
