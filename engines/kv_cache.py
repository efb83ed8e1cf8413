"""Keys and values in NumPy buffers, past first: `[columns, rows, num_kv_heads, head_dim]`.

The first `past_length` columns of a buffer are contiguous whatever the number of rows, so ONNX Runtime reads them
in place; the usual rows-first layout would be copied at every pass. Buffers start as zeros and only ever
receive what a graph computed, so that columns no node may see are finite and weigh exactly nothing.

Does not know graphs, nor which node was accepted and why.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..runtime.engine import Ints

Halves = NDArray[np.float32] | NDArray[np.float16]

# Spans are multiples of this. ONNX Runtime's softmax sums columns in SIMD lanes, by column number modulo
# the lanes (16 with AVX-512). When new nodes start at a multiple of 64, a row's sums are formed in the
# same order however long the other rows of the batch are and however many nodes the pass has.
SPAN_STEP = 64


def round_up(number: int, step: int = SPAN_STEP) -> int:
    """The next multiple of `step`."""
    return -(-number // step) * step


@dataclass
class KVCache:
    """The committed keys and values of `rows` sequences, and the passes that were run for them.

    `tensors` are key 0, value 0, key 1, ... `passes` and `seconds` count the engine's work on this cache:
    one request has one cache per engine, so they are the request's own.
    """

    tensors: list[Halves]
    lengths: Ints
    capacity: int
    passes: int = field(default=0, compare=False)
    seconds: float = field(default=0.0, compare=False)

    @classmethod
    def empty(
        cls, rows: int, capacity: int, layers: int, num_kv_heads: int, head_dim: int, dtype: type[np.floating]
    ) -> KVCache:
        """A cache without entries. Memory is taken from the system only as columns are written."""
        shape = (round_up(max(1, capacity)), rows, num_kv_heads, head_dim)
        return cls(_slices(2 * layers, shape, dtype), np.zeros(rows, np.int64), capacity)

    def past_length(self) -> int:
        """Columns that a pass reads: the longest row, rounded up to the next `SPAN_STEP`.

        Never 0: ONNX Runtime's fused matrix product divides by the number of columns and dies (SIGFPE).
        """
        return round_up(max(1, int(self.lengths.max(initial=0))))

    def past(self, past_length: int) -> list[Halves]:
        """The first `past_length` columns of every tensor: contiguous views, no copies."""
        return [tensor[:past_length] for tensor in self.tensors]

    def append(self, new_kv: list[Halves], accepted_indices: list[Ints]) -> None:
        """Append nodes `accepted_indices[r]` of `new_kv [nodes, rows, num_kv_heads, head_dim]` to each row r."""
        rows, start, pick = len(self.lengths), int(self.lengths[0]), accepted_indices[0]
        end = start + len(pick)
        alike = len(accepted_indices) == rows and all(
            other is pick or np.array_equal(other, pick) for other in accepted_indices
        )
        if alike and end <= self.capacity and self.lengths.tolist() == [start] * rows:
            for tensor, new in zip(self.tensors, new_kv, strict=True):
                new.take(pick, 0, tensor[start:end], "clip")  # "raise" would copy twice
            self.lengths = self.lengths + len(pick)
            return
        counts = self.check_picks(accepted_indices)
        if not counts.any():
            return
        row = np.repeat(np.arange(rows), counts)
        node = np.concatenate(accepted_indices)
        column = np.concatenate([np.arange(n) + start for n, start in zip(counts, self.lengths, strict=True)])
        source, target = node * rows + row, column * rows + row
        for tensor, new in zip(self.tensors, new_kv, strict=True):
            entry = tensor.shape[2:]
            tensor.reshape(-1, *entry)[target] = new.reshape(-1, *entry)[source]
        self.lengths = self.lengths + counts

    def check_picks(self, accepted_indices: list[Ints]) -> Ints:
        """Nodes to append per row, int64 `[rows]`; ValueError if they do not fit."""
        counts = np.array([len(pick) for pick in accepted_indices], np.int64)
        if len(accepted_indices) != len(self.lengths) or (self.lengths + counts > self.capacity).any():
            raise ValueError(
                f"{len(accepted_indices)} rows of {counts} entries do not fit lengths {self.lengths}, {self.capacity}"
            )
        return counts

    def truncate(self, lengths: Ints) -> None:
        """Forget everything past `lengths[r]` in each row r; the columns keep their (finite) numbers."""
        if (lengths > self.lengths).any() or (lengths < 0).any():
            raise ValueError(f"lengths {lengths} are no truncation of {self.lengths}")
        self.lengths = np.array(lengths, np.int64)

    def keep_rows(self, rows: Ints) -> None:
        """Keep only these rows, in this order; one copy of what they hold."""
        self.lengths = self.lengths[rows]
        used = self.past_length()
        columns, _, *entry = self.tensors[0].shape
        kept = _slices(len(self.tensors), (columns, len(rows), *entry), self.tensors[0].dtype.type)
        for tensor, narrower in zip(self.tensors, kept, strict=True):
            narrower[:used] = tensor[:used, rows]
        self.tensors = kept


def _slices(count: int, shape: tuple[int, ...], dtype: type[np.floating]) -> list[Halves]:
    """`count` tensors of zeros out of one block.

    NumPy asks for huge pages where a block has 4 MB or more, which Linux hands out with 40 times fewer page faults:
    appending to twelve layers of width 768 took a third of the time.
    """
    return list(np.zeros((count, *shape), dtype))
