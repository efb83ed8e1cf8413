"""Where the entries of a cache stand, and passes in the tensors of the two device layouts (`device_graph.py`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

import numpy as np

from ..runtime.engine import Bools, Ints, Pass
from .contracts import Array
from .kv_cache import CacheRows, round_up

_NODES = (2, 4, 8, 16, 32, 64)  # passes have as many, or a multiple of the last, so that shapes repeat
_NOT_THE_LAST = "keys and values of a pass that was not the last one on this cache"


class Places(CacheRows, ABC):
    """Which columns of a cache hold what. written: where the last pass wrote its nodes; None: it means nothing."""

    written: Ints | None

    @abstractmethod
    def encode(self, batch: Pass, padded: int) -> dict[str, Array]:
        """A pass in the graph's tensors, but for what its nodes read; says in `written` where they go.

        padded: nodes that rows are filled up to; nobody sees those.
        """

    @abstractmethod
    def append(self, new_kv: Ints, accepted_indices: list[Ints]) -> None:
        """Count nodes `accepted_indices[r]` of the last pass among row r's entries; new_kv: what it said it wrote.

        Raises: ValueError if they do not fit, or another pass has been run since.
        """


class ColumnCache(Places):
    """A cache whose columns are filled in any order.

    Every pass writes its nodes into free columns. Those that are accepted keep theirs; the others are free again. So
    appending is bookkeeping on the host, for chains and trees alike.

    column_of: that of each entry, int64 `[rows, columns]`; past a row's length it means nothing. The last column is for
    nodes that only fill up a shape, and never seen. written: of every node, int64 `[rows, nodes]`.
    """

    def __init__(self, lengths: Ints, capacity: int) -> None:
        super().__init__(lengths, capacity)
        self.column_of = np.zeros((len(self.lengths), self.columns), np.int64)
        self.written = None

    @property
    def columns(self) -> int:
        """Columns that memory is taken for: one more than entries at the least."""
        return round_up(self.capacity + 1)

    def append(self, new_kv: Ints, accepted_indices: list[Ints]) -> None:
        if new_kv is not self.written:
            raise ValueError(_NOT_THE_LAST)
        lengths, spare = self.grown(accepted_indices), self.columns - 1
        if any((new_kv[row, nodes] == spare).any() for row, nodes in enumerate(accepted_indices)):
            raise ValueError("a node that only filled up its row")
        for row, nodes in enumerate(accepted_indices):
            self.column_of[row, self.lengths[row] : lengths[row]] = new_kv[row, nodes]
        self.lengths = lengths

    def select(self, rows: Ints) -> None:
        self.lengths, self.column_of, self.written = self.lengths[rows], self.column_of[rows], None

    def join(self, other: Self) -> None:
        places = self.column_of, other.column_of
        super().join(other)
        self.column_of = np.concatenate([np.pad(own, ((0, 0), (0, self.columns - own.shape[1]))) for own in places])
        self.written = None

    def free(self, used: Bools, nodes: int) -> Ints:
        """The first columns of each row that are not `used [rows, columns]`, int64 `[rows, nodes]`.

        The last column for nodes that find none: a request reserves columns for its own nodes, which come first;
        further ones only fill up its rows.
        """
        columns = np.full((len(used), nodes), self.columns - 1)
        for row, own in enumerate(used):
            free = np.flatnonzero(~own)[:nodes]
            columns[row, : len(free)] = free
        return columns

    def encode(self, batch: Pass, padded: int) -> dict[str, Array]:
        """As `Places`; nodes that fill up rows see nothing, and go to the last column."""
        rows, nodes = batch.positions.shape
        row, past = np.arange(rows), batch.attention_mask.shape[2] - nodes
        used, seen = np.zeros((rows, self.columns), bool), np.zeros((rows, padded, self.columns), bool)
        for i, length in enumerate(self.lengths.tolist()):
            entries = self.column_of[i, :length]
            used[i, entries] = True
            seen[i, :nodes][:, entries] = batch.attention_mask[i, :, :length]
        self.written = written = self.free(used, nodes)
        seen[row[:, None, None], np.arange(nodes)[:, None], written[:, None]] = batch.attention_mask[:, :, past:]
        write = np.zeros((rows, padded, 2), np.int64)
        write[..., 0], write[..., 1] = row[:, None], self.columns - 1
        write[:, :nodes, 1] = written
        return {"position_ids": fill_up(batch.positions, padded), "write": write, "seen": words(seen)}


class SideBySideCache(Places):
    """A cache of a fixed number of columns, whose rows fill the first of theirs.

    A pass writes its nodes after those that a row holds. Of a chain they are then in their places; accepted nodes of a
    tree move down. written: of the first node of each row, int64 `[rows]`.
    """

    def __init__(self, lengths: Ints, capacity: int, columns: int) -> None:
        super().__init__(lengths, capacity)
        self._columns, self.written = columns, None

    @property
    def columns(self) -> int:
        return self._columns

    def span(self, nodes: int) -> int:
        """Columns that a pass over so many nodes of every row reads."""
        return round_up(int(self.lengths.max(initial=0)) + nodes)

    def select(self, rows: Ints) -> None:
        self.lengths, self.written = self.lengths[rows], None

    def encode(self, batch: Pass, padded: int) -> dict[str, Array]:
        """As `Places`; nodes that fill up rows see the first column."""
        rows, nodes = batch.positions.shape
        past, span = batch.attention_mask.shape[2] - nodes, self.span(nodes)
        seen = np.zeros((rows, padded, span), bool)
        row, common = np.arange(rows)[:, None, None], min(past, span)
        seen[:, :nodes, :common] = batch.attention_mask[:, :, :common]
        own = self.lengths[:, None, None] + np.arange(nodes)  # columns of the new nodes
        seen[row, np.arange(nodes)[:, None], own] = batch.attention_mask[:, :, past:]
        seen[:, nodes:, 0] = True  # a softmax over nothing could give what is no number
        self.written = write = self.lengths.copy()
        return {"position_ids": fill_up(batch.positions, padded), "write": write, "seen": words(seen)}

    def append(self, new_kv: Ints, accepted_indices: list[Ints]) -> None:
        if new_kv is not self.written:
            raise ValueError(_NOT_THE_LAST)
        lengths = self.grown(accepted_indices)
        starts = zip(new_kv.tolist(), self.lengths.tolist(), accepted_indices, strict=True)
        moves = [
            (row, start + node, length + i)
            for row, (start, length, nodes) in enumerate(starts)
            for i, node in enumerate(nodes.tolist())
            if start + node != length + i
        ]
        if moves:
            self.move(*np.array(moves, np.int64).T)
        self.lengths, self.written = lengths, None

    @abstractmethod
    def move(self, rows: Ints, sources: Ints, targets: Ints) -> None:
        """Copy entries, all `[some]`, from columns of rows to others; everything is read before anything is written."""


def node_count(nodes: int) -> int:
    """How many nodes a pass over so many is filled up to."""
    return next((count for count in _NODES if count >= nodes), round_up(nodes, _NODES[-1]))


def fill_up(numbers: Ints, nodes: int, dtype: type[np.signedinteger] = np.int64) -> Array:
    """`numbers [rows, any]` with zeros up to `[rows, nodes]`."""
    filled = np.zeros((len(numbers), nodes), dtype)
    filled[:, : numbers.shape[1]] = numbers
    return filled


def words(seen: Bools) -> Array:
    """Bits `[..., columns]` as int32 `[..., columns / WORD]`, the first in the lowest bit."""
    packed = np.packbits(seen, axis=-1, bitorder="little")
    return packed.view("<u2").astype(np.int32)
