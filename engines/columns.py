"""Map of cache entries to columns of the KV cache on a device, and the graph inputs made from it.

The two layouts of decoder graphs for devices are described in `device_graph.py`.
"""

from __future__ import annotations

from typing import Self

import numpy as np

from ..runtime.engine import Bools, Ints, PassInput
from .contracts import Array
from .graph_writer import GraphWriter
from .kv_cache import BaseKVCache, round_up

MASK_WORD_BITS = 16  # mask columns per int32; float32 represents 16 bits exactly (`write_mask_unpacking`)
# Node counts that a pass is padded to; above the last, multiples of the last. With few different shapes, a pass can be
# bound once and then reused.
_PADDED_NODE_COUNTS = (2, 4, 8, 16, 32, 64)


class CacheColumnMap(BaseKVCache):
    """Map of the entries of each cache row to columns of the cache.

    Without `num_columns`, entries are in any order. A pass writes its nodes to free columns, and accepted nodes stay
    there, so that appending them only updates `column_of`. Padding nodes are written to the last column, which no node
    attends to.

    With `num_columns`, entries are in order. A pass writes its nodes after the entries of the row, and appending
    accepted nodes of a draft tree moves them.
    """

    def __init__(self, lengths: Ints, capacity: int, num_columns: int | None = None) -> None:
        super().__init__(lengths, capacity)
        self.in_order = num_columns is not None
        # Column of each entry, int64 `[rows, columns]`, then the free columns of the row in ascending order. There is
        # one more column than the capacity, for padding nodes.
        self.column_of = np.tile(np.arange(num_columns or round_up(capacity + 1)), (len(lengths), 1))
        self.is_sorted = True  # whether entry i of every row is in column i. Accepted nodes of a tree can change this.
        # Column of each node of the last pass, int64 `[rows, nodes]`; None after rows or entries moved.
        self.written_columns: Ints | None = None

    @property
    def num_columns(self) -> int:
        return int(self.column_of.shape[1])

    def truncate(self, lengths: Ints) -> None:
        super().truncate(lengths)
        for columns, length in zip(self.column_of, lengths.tolist(), strict=True):
            columns[length:].sort()  # with the columns of removed entries, the free columns are in ascending order

    def select_rows(self, rows: Ints) -> None:
        super().select_rows(rows)
        self.column_of = self.column_of[rows]
        self.written_columns = None

    def append_rows(self, cache: Self) -> None:
        super().append_rows(cache)
        tables = (self.column_of, cache.column_of)
        num_columns = max(self.num_columns, cache.num_columns)
        # Both tables become equally wide, [rows, num_columns]. The columns added to the narrower table are free.
        widened = [np.tile(np.arange(num_columns), (len(table), 1)) for table in tables]
        for wide_table, table in zip(widened, tables, strict=True):
            wide_table[:, : table.shape[1]] = table
        self.column_of = np.concatenate(widened)
        self.is_sorted &= cache.is_sorted
        self.written_columns = None

    def count_attended_columns(self, num_nodes: int) -> int:
        """Return the number of cache columns that a pass over `num_nodes` nodes per row reads."""
        return round_up(int(self.lengths.max(initial=0)) + num_nodes) if self.in_order else self.num_columns

    def find_free_columns(self, num_nodes: int) -> Ints:
        """Return the columns to which a pass writes its nodes, int64 `[rows, nodes]`.

        When a row has no free column left, further nodes get the last column. These nodes are always padding nodes: the
        capacity includes all nodes of an image, and padding nodes come after the nodes of the image.
        """
        entries = self.lengths[:, None] + np.arange(num_nodes)
        if self.in_order:
            return entries
        free: Ints = self.column_of[np.arange(len(entries))[:, None], np.minimum(entries, self.num_columns - 1)]
        return free

    def encode_pass_inputs(self, batch: PassInput, num_padded_nodes: int) -> dict[str, Array]:
        """Return the graph inputs `position_ids`, `write` and `seen` (`device_graph.py`), and set `written_columns`.

        Padding nodes attend to the first column; no node attends to padding nodes.
        """
        rows, nodes = batch.positions.shape
        row = np.arange(rows)[:, None]
        # In the mask of the pass, column i stands for entry i, and new nodes follow from column `past` on. In `seen`,
        # entries and new nodes are in the columns where the cache stores them: [rows, padded nodes, columns].
        past = batch.attention_mask.shape[2] - nodes
        seen = np.zeros((rows, num_padded_nodes, self.count_attended_columns(nodes)), bool)
        self.written_columns = written_columns = self.find_free_columns(nodes)
        if self.is_sorted:
            # The mask of the pass is False between the last entry of a row and `past`.
            seen[:, :nodes, :past] = batch.attention_mask[:, :, :past]
        for i, length in enumerate(self.lengths.tolist()):
            new = batch.attention_mask[i, :, past:]
            if self.is_sorted and length + nodes <= self.num_columns:  # the free columns follow the entries
                seen[i, :nodes, length : length + nodes] = new
            else:
                seen[i, :nodes][:, self.column_of[i, :length]] = batch.attention_mask[i, :, :length]
                seen[i, :nodes][:, written_columns[i]] = new
        seen[:, nodes:, 0] = True  # for padding nodes: a softmax over no columns could return NaN
        write = np.zeros((rows, num_padded_nodes, 1, 3), np.int64)  # row, column and first part (0) of each node
        write[..., 0, 0] = row
        write[..., 0, 1] = self.num_columns - 1  # column of padding nodes
        write[:, :nodes, 0, 1] = written_columns
        starts = self.lengths.copy() if self.in_order else write  # a copy, as the pass is queued and may run later
        return {"position_ids": pad_nodes(batch.positions, num_padded_nodes), "write": starts, "seen": pack_mask(seen)}

    def accept_nodes(self, new_kv: Ints, accepted_indices: list[Ints]) -> Ints:
        """Append the accepted nodes of the last pass, which returned `new_kv`, to the entries of their rows.

        Returns the entries to move, int64 `[moves, 3]`: row, source column, target column.

        Raises:
            ValueError: a row would exceed the capacity, `new_kv` is not from the last pass, or a padding node was
                accepted.
        """
        if new_kv is not self.written_columns:
            raise ValueError("`new_kv` is not from the last pass on this cache")
        lengths = self.compute_extended_lengths(accepted_indices)
        moves: list[tuple[int, int, int]] = []
        accepted_columns = [new_kv[row, nodes].tolist() for row, nodes in enumerate(accepted_indices)]
        if not self.in_order and any(self.num_columns - 1 in accepted for accepted in accepted_columns):
            raise ValueError("a padding node cannot be accepted")
        for row, (start, accepted) in enumerate(zip(self.lengths.tolist(), accepted_columns, strict=True)):
            if self.in_order:
                moves += [(row, column, start + i) for i, column in enumerate(accepted) if column != start + i]
                continue
            columns_of = self.column_of[row, start : start + new_kv.shape[1]]
            free = columns_of.tolist()
            if accepted != free[: len(accepted)]:  # not the first nodes in order, as after a tree
                # Accepted nodes stay in their columns and become the next entries; the other columns are free again.
                columns_of[:] = [*accepted, *sorted({*free} - {*accepted})]
                self.is_sorted = False
        self.lengths = lengths
        if moves:  # the nodes of the last pass are no longer where it wrote them
            self.written_columns = None
        return np.array(moves, np.int64).reshape(-1, 3)


def compute_padded_node_count(num_nodes: int) -> int:
    return next(
        (count for count in _PADDED_NODE_COUNTS if count >= num_nodes), round_up(num_nodes, _PADDED_NODE_COUNTS[-1])
    )


def pad_nodes(node_values: Ints, num_nodes: int, dtype: type[np.signedinteger] = np.int64) -> Array:
    """Pad numbers of nodes `[rows, nodes]`, such as positions, with zeros to `[rows, num_nodes]`."""
    filled = np.zeros((len(node_values), num_nodes), dtype)
    filled[:, : node_values.shape[1]] = node_values
    return filled


def pack_mask(mask: Bools) -> Array:
    """Pack a mask, bool `[..., columns]`, into int32 words of 16 bits, with the first column in the lowest bit."""
    packed = np.packbits(mask, axis=-1, bitorder="little")  # two bytes per word
    return packed.view("<u2").astype(np.int32)


def write_mask_unpacking(graph: GraphWriter, packed_mask: str, masked_score: float) -> str:
    """Write ops that unpack a mask `[rows, nodes, words]` to numbers that attention adds to its scores.

    They are float32 `[rows, nodes, columns]`: `masked_score` for a masked column, else 0.
    """
    half, unit, two, scale = (graph.add_constant(np.array(number, np.float32)) for number in (0.5, 1, 2, masked_score))
    powers = graph.add_constant(0.5 ** np.arange(MASK_WORD_BITS, dtype=np.float32))
    numbers = graph.op("Unsqueeze", graph.cast(packed_mask, "float32"), graph.int_vector(-1))
    # Bit c of a word is floor(word / 2^c) - 2 floor(word / 2^(c + 1)). It is computed in float32, which is exact for 16
    # bits, as the ONNX operator BitShift does not support int32.
    shifted = graph.op("Floor", graph.op("Mul", numbers, powers))
    even = graph.op("Mul", graph.op("Floor", graph.op("Mul", shifted, half)), two)
    bits = graph.reshape(graph.op("Sub", shifted, even), 0, 0, -1)
    return graph.op("Mul", graph.op("Sub", unit, bits), scale)
