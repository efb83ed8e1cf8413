"""Where the entries of a cache stand, and passes in the tensors of the two device layouts (`device_graph.py`)."""

from __future__ import annotations

from typing import Self

import numpy as np

from ..runtime.engine import Bools, Ints, Pass
from .contracts import Array
from .kv_cache import CacheRows, round_up

_NODES = (2, 4, 8, 16, 32, 64)  # passes have as many, or a multiple of the last, so that shapes repeat


class CacheColumns(CacheRows):
    """Which columns of a cache hold what.

    Either entries stand in any order: a pass writes its nodes into columns that are free, those that are accepted keep
    theirs, and appending is bookkeeping; the last column is for nodes that only fill up a shape, and never seen. Or
    they stand in order, in a number of columns that is given: a pass writes its nodes after those that a row holds, and
    accepted ones of a tree have to move.

    column_of: that of each entry, int64 `[rows, columns]`; past a row's length it means nothing. written: that of each
    node of the last pass, int64 `[rows, nodes]`; None: it means nothing any more.
    """

    def __init__(self, lengths: Ints, capacity: int, columns: int | None = None) -> None:
        super().__init__(lengths, capacity)
        self.in_order = columns is not None
        self.column_of = np.tile(np.arange(columns or round_up(capacity + 1)), (len(lengths), 1))
        self.written: Ints | None = None

    @property
    def columns(self) -> int:
        return int(self.column_of.shape[1])

    def select(self, rows: Ints) -> None:
        super().select(rows)
        self.column_of, self.written = self.column_of[rows], None

    def join(self, other: Self) -> None:
        super().join(other)
        both, columns = (self.column_of, other.column_of), max(self.columns, other.columns)
        self.column_of = np.concatenate([np.pad(own, ((0, 0), (0, columns - own.shape[1]))) for own in both])
        self.written = None

    def span(self, nodes: int) -> int:
        """Columns that a pass over so many nodes of every row reads."""
        return round_up(int(self.lengths.max(initial=0)) + nodes) if self.in_order else self.columns

    def free(self, nodes: int) -> Ints:
        """Columns for new nodes, int64 `[rows, nodes]`.

        The last column for nodes that find none: a request reserves columns for its own nodes, which come first;
        further ones only fill up its rows.
        """
        if self.in_order:
            return self.lengths[:, None] + np.arange(nodes)
        columns = np.full((len(self.lengths), nodes), self.columns - 1)
        for row, length in enumerate(self.lengths.tolist()):
            used = np.zeros(self.columns, bool)
            used[self.column_of[row, :length]] = True
            free = np.flatnonzero(~used)[:nodes]
            columns[row, : len(free)] = free
        return columns

    def encode(self, batch: Pass, padded: int) -> dict[str, Array]:
        """A pass in the graph's tensors, but for what its nodes read; says in `written` where they go.

        padded: nodes that rows are filled up to; nobody sees those, and they see the first column.
        """
        rows, nodes = batch.positions.shape
        row, past = np.arange(rows)[:, None], batch.attention_mask.shape[2] - nodes
        seen = np.zeros((rows, padded, self.span(nodes)), bool)
        for i, length in enumerate(self.lengths.tolist()):
            seen[i, :nodes][:, self.column_of[i, :length]] = batch.attention_mask[i, :, :length]
        self.written = written = self.free(nodes)
        seen[row[:, None], np.arange(nodes)[:, None], written[:, None]] = batch.attention_mask[:, :, past:]
        seen[:, nodes:, 0] = True  # a softmax over nothing could give what is no number
        write = np.full((rows, padded, 2), self.columns - 1)
        write[..., 0], write[:, :nodes, 1] = row, written
        starts = self.lengths.copy() if self.in_order else write
        return {"position_ids": pad_nodes(batch.positions, padded), "write": starts, "seen": pack_mask(seen)}

    def accept(self, new_kv: Ints, accepted_indices: list[Ints]) -> Ints:
        """Count nodes `accepted_indices[r]` of the last pass among row r's entries; new_kv: what it said it wrote.

        Returns: what has to move, int64 `[some, 3]`: row, from column, to column.
        Raises: ValueError if they do not fit, or another pass has been run since.
        """
        if new_kv is not self.written:
            raise ValueError("keys and values of a pass that was not the last one on this cache")
        lengths, moves = self.extended_lengths(accepted_indices), list[tuple[int, int, int]]()
        columns = [new_kv[row, nodes] for row, nodes in enumerate(accepted_indices)]
        if not self.in_order and any((own == self.columns - 1).any() for own in columns):
            raise ValueError("a node that only filled up its row")
        for row, (start, own) in enumerate(zip(self.lengths.tolist(), columns, strict=True)):
            if self.in_order:
                moves += [(row, at, start + i) for i, at in enumerate(own.tolist()) if at != start + i]
            else:
                self.column_of[row, start : start + len(own)] = own
        self.lengths, self.written = lengths, None if moves else self.written
        return np.array(moves, np.int64).reshape(-1, 3)


def padded_node_count(nodes: int) -> int:
    """How many nodes a pass over so many is filled up to."""
    return next((count for count in _NODES if count >= nodes), round_up(nodes, _NODES[-1]))


def pad_nodes(numbers: Ints, nodes: int, dtype: type[np.signedinteger] = np.int64) -> Array:
    """`numbers [rows, any]` with zeros up to `[rows, nodes]`."""
    filled = np.zeros((len(numbers), nodes), dtype)
    filled[:, : numbers.shape[1]] = numbers
    return filled


def pack_mask(seen: Bools) -> Array:
    """Bits `[..., columns]` as int32 `[..., columns / WORD]`, the first in the lowest bit."""
    packed = np.packbits(seen, axis=-1, bitorder="little")
    return packed.view("<u2").astype(np.int32)
