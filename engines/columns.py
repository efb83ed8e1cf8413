"""Caches whose columns are filled in any order, and passes in the tensors of the device layout (`device_graph.py`).

Every pass writes its nodes into free columns. Those that are accepted keep theirs; the others are free again. So
appending is bookkeeping on the host, for chains and trees alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..runtime.device import Resident
from ..runtime.engine import Bools, Floats, Ints, Pass, Taken
from .contracts import Array
from .device_graph import WORD
from .kv_cache import CacheRows, round_up

_NODES = (2, 4, 8, 16, 32, 64)  # passes have as many, or a multiple of the last, so that shapes repeat


class Lying(Resident):
    """Rows `[rows, nodes, width]` on a device. value: what a graph there takes, with `stride` nodes of every row."""

    home: object
    value: Any
    stride: int
    dtype: str


def read_by_nodes(batch: Pass, nodes: int, table: Any, dtype: str, home: object) -> dict[str, Any]:
    """What nodes read, in the graph's inputs, filled up to so many of a row; what lies at `home` stays there.

    table: embeddings of codes on the device; None: for a drafter.
    """
    if table is not None:
        if batch.tokens is not None and batch.embeds is None:
            return {"embeddings": table, "token_ids": fill_up(batch.tokens, nodes, np.int32)}
        if batch.embeds is None or batch.tokens is not None:
            raise ValueError("a target reads either `tokens` or `embeds`")
        prefix, ids = _listed(batch.embeds, dtype)  # a table of its own
        return {"embeddings": prefix, "token_ids": fill_up(ids, nodes, np.int32)}
    if batch.tokens is None or batch.hidden is None:
        raise ValueError("a drafter reads `tokens` and `hidden`")
    taken = batch.hidden
    source = taken.source if isinstance(taken, Taken) else None
    if isinstance(taken, Taken) and isinstance(source, Lying) and source.home is home and source.dtype == dtype:
        hidden, ids = source.value, taken.rows * source.stride + taken.nodes
    else:
        states, ids = _listed(taken.read() if isinstance(taken, Taken) else taken, dtype)
        hidden = states[None]
    tokens = fill_up(batch.tokens, nodes, np.int32)
    return {"token_ids": tokens, "hidden": hidden, "hidden_ids": fill_up(ids, nodes, np.int32)}


def _listed(states: Floats, dtype: str) -> tuple[Array, Ints]:
    """States `[rows, nodes, width]` one below the other, and where each is, `[rows, nodes]`."""
    rows, nodes, width = states.shape
    return np.ascontiguousarray(states.reshape(-1, width), dtype), np.arange(rows * nodes).reshape(rows, nodes)


@dataclass
class ColumnCache(CacheRows):
    """Where each row's entries are.

    column_of: that of each entry, int64 `[rows, columns]`; past a row's length it means nothing. The last column is for
    nodes that only fill up a shape, and never seen. written: columns of the last pass's nodes, int64 `[rows, nodes]`.
    """

    column_of: Ints = field(init=False)
    written: Ints = field(init=False)

    def __post_init__(self) -> None:
        self.column_of = np.zeros((len(self.lengths), self.columns), np.int64)
        self.written = self.column_of[:, :0]

    @property
    def columns(self) -> int:
        """Columns that memory is taken for: one more than entries at the least."""
        return round_up(self.capacity + 1)

    def append(self, new_kv: Ints, accepted_indices: list[Ints]) -> None:
        """Count nodes `accepted_indices[r]` of the last pass among row r's entries; new_kv: what it said it wrote."""
        if new_kv is not self.written:
            raise ValueError("keys and values of a pass that was not the last one on this cache")
        lengths, spare = self.grown(accepted_indices), self.columns - 1
        if any((new_kv[row, nodes] == spare).any() for row, nodes in enumerate(accepted_indices)):
            raise ValueError("a node that only filled up its row")
        for row, nodes in enumerate(accepted_indices):
            self.column_of[row, self.lengths[row] : lengths[row]] = new_kv[row, nodes]
        self.lengths = lengths

    def select(self, rows: Ints) -> None:
        """Keep only these rows, in this order."""
        self.lengths, self.column_of, self.written = self.lengths[rows], self.column_of[rows], self.written[:0]

    def join_rows(self, other: ColumnCache) -> None:
        """Count the rows of another cache after one's own."""
        places = self.column_of, other.column_of
        self.join(other)
        self.column_of = np.concatenate([np.pad(own, ((0, 0), (0, self.columns - own.shape[1]))) for own in places])
        self.written = self.column_of[:, :0]

    def free(self, nodes: int) -> Ints:
        """The first free columns of each row, int64 `[rows, nodes]`; the last column for nodes that find none.

        A request reserves columns for its own nodes, which come first; further ones only fill up its rows.
        """
        used = self._at(np.arange(self.columns) < self.lengths[:, None])
        found = np.full((len(used), nodes), self.columns - 1)
        for row, own in enumerate(used):
            free = np.flatnonzero(~own)[:nodes]
            found[row, : len(free)] = free
        return found

    def _at(self, entries: Bools) -> Bools:
        """Columns of `entries [rows, at most columns]`, bool `[rows, columns]`."""
        row, entry = entries.nonzero()
        found = np.zeros((len(entries), self.columns), bool)
        found[row, self.column_of[row, entry]] = True
        return found

    def encode(self, batch: Pass) -> dict[str, Array]:
        """A pass in the graph's tensors, but for what its nodes read; says in `written` where they go.

        Rows are filled up to one of few numbers of nodes, which see nothing and go to the last column.
        """
        rows, nodes = batch.positions.shape
        past, spare = batch.attention_mask.shape[2] - nodes, self.columns - 1
        on_past = batch.attention_mask[:, :, :past]
        by_all: Bools = np.logical_and.reduce(on_past, 1)  # [rows, past]
        by_some = np.logical_or.reduce(on_past, 1) & ~by_all
        self.written = self.free(nodes)
        padded, drafted = node_count(nodes), int(by_some.sum(1).max(initial=0))
        further = drafted + nodes
        columns = np.full((rows, round_up(further, WORD)), spare, np.int32)
        seen = np.zeros((rows, padded, columns.shape[1]), bool)
        columns[:, drafted:further] = self.written
        seen[:, :nodes, drafted:further] = batch.attention_mask[:, :, past:]
        for row in np.flatnonzero(by_some.any(1)).tolist():
            own = np.flatnonzero(by_some[row])
            columns[row, : len(own)] = self.column_of[row, own]
            seen[row, :nodes, : len(own)] = on_past[row][:, own]
        write = np.zeros((rows, padded, 2), np.int64)
        write[..., 0], write[..., 1] = np.arange(rows)[:, None], spare
        write[:, :nodes, 1] = self.written
        return {
            "position_ids": fill_up(batch.positions, padded),
            "write": write,
            "seen_by_all": words(self._at(by_all)),
            "columns": columns,
            "seen": words(seen),
        }


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
