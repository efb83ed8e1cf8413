"""Keys and values of committed nodes: the number of entries of each row (`BaseKVCache`), and NumPy buffers (`KVCache`).

Buffers have the shape `[columns, rows, num_kv_heads, head_dim]`: the first `past_length` columns are contiguous, so
ONNX Runtime reads them in place. With rows first, as usual, every pass would copy them. Buffers start as zeros and
only receive outputs of a graph, so masked columns are finite and add nothing to any sum.
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

# Past lengths are multiples of this. ONNX Runtime's softmax sums columns in SIMD lanes (16 with AVX-512): column c in
# lane c modulo the number of lanes. When new nodes start at a multiple of 64, the order of a row's sums does not depend
# on the lengths of other rows or on the number of nodes in the pass.
COLUMN_STEP = 64


def round_up(number: int, step: int = COLUMN_STEP) -> int:
    """Return the smallest multiple of `step` that is at least `number`."""
    return -(-number // step) * step


@dataclass
class BaseKVCache:
    """Lengths of a cache's rows; base class of caches, which determine where entries are stored.

    Args:
        lengths: entries per row, int64 `[rows]`.
        capacity: maximum number of entries of a row.
        num_passes: number of forward passes run on the cache.
    """

    lengths: Ints
    capacity: int
    num_passes: int = field(default=0, kw_only=True)

    @classmethod
    def require_instance(cls, cache: Cache) -> Self:
        """Return the cache if this engine made it. Raises: TypeError: another engine made it."""
        if not isinstance(cache, cls):
            raise TypeError(f"the cache is from another engine: {type(cache).__name__}")
        return cache

    @property
    def num_columns(self) -> int:
        """The number of allocated columns."""
        return round_up(max(1, self.capacity))

    def past_length(self) -> int:
        """Return the number of columns that a pass reads: the longest row, rounded up to a multiple of `COLUMN_STEP`.

        The number is never 0: ONNX Runtime's fused matmul divides by the number of columns and crashes (SIGFPE).
        """
        return round_up(max(1, *self.lengths.tolist()))

    def compute_extended_lengths(self, accepted_indices: list[Ints]) -> Ints:
        """Return the lengths after nodes `accepted_indices[r]` are appended to row r. Raises: ValueError: no space."""
        counts = [len(indices) for indices in accepted_indices]
        before = self.lengths.tolist()
        lengths = [length + count for length, count in zip(before, counts, strict=False)]  # faster than NumPy
        if len(counts) != len(before) or max(lengths, default=0) > self.capacity:
            raise ValueError(f"{counts} entries do not fit into rows of lengths {before} and capacity {self.capacity}")
        return np.array(lengths, np.int64)

    def select_rows(self, rows: Ints) -> None:
        """Keep only the given rows, in the given order."""
        self.lengths = self.lengths[rows]

    def append_rows(self, cache: Self) -> None:
        """Append the rows of another cache; all rows get the larger of both capacities."""
        self.lengths = np.concatenate([self.lengths, cache.lengths])
        self.capacity = max(self.capacity, cache.capacity)

    def truncate(self, lengths: Ints) -> None:
        """Remove the entries of each row r after the first `lengths[r]`; memory is not cleared."""
        if (lengths > self.lengths).any() or (lengths < 0).any():
            raise ValueError(f"rows of lengths {self.lengths} cannot be truncated to {lengths}")
        self.lengths = np.array(lengths, np.int64)


@dataclass
class KVCache(BaseKVCache):
    """Keys and values in the host's memory; `tensors` are key 0, value 0, key 1, ..."""

    tensors: list[CacheArray]

    @classmethod
    def empty(
        cls, rows: int, capacity: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype: type[np.floating]
    ) -> KVCache:
        """Create a cache without entries; the system provides its memory when columns are written.

        Args:
            capacity: maximum number of entries of a row.
            num_kv_heads: number of heads of keys and values.
            dtype: type of keys and values.

        Raises:
            EngineError: less memory is available than the full cache needs.
        """
        cache = cls(np.zeros(rows, np.int64), capacity, [])
        shape = 2 * num_layers, cache.num_columns, rows, num_kv_heads, head_dim
        size = prod(shape) * np.dtype(dtype).itemsize
        free = available_memory()
        try:
            if size > free:
                raise MemoryError
            # A single block for all tensors, for which NumPy requests huge pages: 40 times fewer page faults.
            cache.tensors = list(np.zeros(shape, dtype))
        except MemoryError as error:  # also raised by limits that cannot be queried
            raise EngineError(
                f"keys and values of {rows} rows of {cache.num_columns:,} tokens need {size / 2**30:.1f} GiB",
                field="memory",
                found=f"{free / 2**30:.1f} GiB free",
                remedy="generate fewer images at once",
            ) from error
        return cache

    def past_views(self, past_length: int) -> list[CacheArray]:
        """Return views of the first `past_length` columns of every tensor, contiguous and without copies."""
        return [tensor[:past_length] for tensor in self.tensors]

    def append(self, new_kv: list[CacheArray], accepted_indices: list[Ints]) -> None:
        """Append nodes `accepted_indices[r]` of `new_kv [nodes, rows, num_kv_heads, head_dim]` to each row r."""
        before = self.lengths.tolist()
        lengths = self.compute_extended_lengths(accepted_indices)
        first = accepted_indices[0]
        same_nodes = all(indices is first or np.array_equal(indices, first) for indices in accepted_indices)
        if same_nodes and before.count(before[0]) == len(before):  # one contiguous target, as for a batch of chains
            start = before[0]
            end = start + len(first)
            for tensor, new in zip(self.tensors, new_kv, strict=True):
                new.take(first, 0, tensor[start:end], "clip")  # "raise" would copy twice
        else:
            row = np.repeat(np.arange(len(lengths)), lengths - self.lengths)
            column = np.concatenate([np.arange(start, end) for start, end in zip(before, lengths, strict=True)])
            # `new_kv` is [nodes, rows, ...] and a tensor [columns, rows, ...]: indices in their flat first two axes
            source = np.concatenate(accepted_indices) * len(lengths) + row
            target = column * len(lengths) + row
            for tensor, new in zip(self.tensors, new_kv, strict=True):
                entry = tensor.shape[2:]
                tensor.reshape(-1, *entry)[target] = new.reshape(-1, *entry)[source]
        self.lengths = lengths

    def keep_rows(self, rows: Ints) -> None:
        """Keep only the given rows, in the given order; entries are copied once."""
        self._copy_rows([(self, rows)], self.capacity)
        self.select_rows(rows)

    def extend(self, cache: Cache) -> None:
        """Append the rows of another cache; entries of both are copied once."""
        added = KVCache.require_instance(cache)
        self._copy_rows([(self, slice(None)), (added, slice(None))], max(self.capacity, added.capacity))
        self.append_rows(added)

    def forbid_memory_reuse(self) -> None:
        """Leave the memory to the system: no other cache reuses it."""

    def _copy_rows(self, sources: Sequence[tuple[KVCache, Ints | slice]], capacity: int) -> None:
        """Replace the tensors by copies of rows of caches; change nothing if memory is insufficient."""
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
