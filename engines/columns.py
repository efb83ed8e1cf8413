"""Columns of cache entries, and forward passes as tensors of the two device layouts (`device_graph.py`)."""

from __future__ import annotations

from typing import Self

import numpy as np

from ..runtime.engine import Bools, Ints, PassInput
from .contracts import Array
from .graph_writer import GraphWriter
from .kv_cache import BaseKVCache, round_up

MASK_WORD_BITS = 16  # columns of a mask per int32
# Padded node counts; larger counts are multiples of the last. Few different shapes allow passes to be bound once.
_PADDED_NODE_COUNTS = (2, 4, 8, 16, 32, 64)


class CacheColumnMap(BaseKVCache):
    """Maps the entries of each row of a cache to columns.

    Without `num_columns`, entries are in any order: a pass writes its nodes to free columns, where accepted nodes stay,
    and appending only updates `column_of`. Padding nodes are written to the last column, which no node attends to.
    With `num_columns`, entries are in order: a pass writes its nodes after a row's entries, and accepted nodes of a
    tree have to move.

    Args:
        lengths: entries per row, int64 `[rows]`.
        capacity: maximum number of entries of a row.
        num_columns: number of columns of a cache in order; None: entries are in any order.

    Attributes:
        in_order: whether entries are in order.
        column_of: column of each entry, int64 `[rows, columns]`; past a row's length its free columns, ascending.
        is_sorted: whether entry i of every row is in column i, as after chains.
        written_columns: column of each node of the last pass, int64 `[rows, nodes]`; None after rows or entries moved.
    """

    def __init__(self, lengths: Ints, capacity: int, num_columns: int | None = None) -> None:
        super().__init__(lengths, capacity)
        self.in_order = num_columns is not None
        self.column_of = np.tile(np.arange(num_columns or round_up(capacity + 1)), (len(lengths), 1))
        self.is_sorted = True
        self.written_columns: Ints | None = None

    @property
    def num_columns(self) -> int:
        return int(self.column_of.shape[1])

    def truncate(self, lengths: Ints) -> None:
        super().truncate(lengths)
        for columns, length in zip(self.column_of, lengths.tolist(), strict=True):
            columns[length:].sort()  # the columns of removed entries are free again, and free columns ascend

    def select_rows(self, rows: Ints) -> None:
        super().select_rows(rows)
        self.column_of = self.column_of[rows]
        self.written_columns = None

    def append_rows(self, cache: Self) -> None:
        super().append_rows(cache)
        both = (self.column_of, cache.column_of)
        num_columns = max(self.num_columns, cache.num_columns)
        # Further columns of the narrower cache are free, and come after all its columns: [rows, columns] each.
        every = [np.tile(np.arange(num_columns), (len(table), 1)) for table in both]
        for table, columns_of in zip(every, both, strict=True):
            table[:, : columns_of.shape[1]] = columns_of
        self.column_of = np.concatenate(every)
        self.is_sorted &= cache.is_sorted
        self.written_columns = None

    def count_attended_columns(self, num_nodes: int) -> int:
        """Return the number of columns that a pass over `num_nodes` nodes of every row reads."""
        return round_up(int(self.lengths.max(initial=0)) + num_nodes) if self.in_order else self.num_columns

    def find_free_columns(self, num_nodes: int) -> Ints:
        """Return columns for the new nodes of a pass, int64 `[rows, nodes]`.

        Nodes get the last column when no free column remains. These are padding: an image reserves columns for its
        nodes, which come first.
        """
        entries = self.lengths[:, None] + np.arange(num_nodes)
        if self.in_order:
            return entries
        free: Ints = self.column_of[np.arange(len(entries))[:, None], np.minimum(entries, self.num_columns - 1)]
        return free

    def encode_pass_inputs(self, batch: PassInput, num_padded_nodes: int) -> dict[str, Array]:
        """Return a pass as the graph's tensors, and store the columns that it writes in `written_columns`.

        Tokens and embeddings are not included.

        Args:
            num_padded_nodes: number of nodes per row with padding. Padding nodes attend to the first column; no node
                attends to padding nodes.
        """
        rows, nodes = batch.positions.shape
        row = np.arange(rows)[:, None]
        # The mask of the pass has entry i of a row in column i, and new nodes after `past`. Here both are in the
        # columns where the cache stores them, [rows, padded nodes, columns].
        past = batch.attention_mask.shape[2] - nodes
        seen = np.zeros((rows, num_padded_nodes, self.count_attended_columns(nodes)), bool)
        self.written_columns = written_columns = self.find_free_columns(nodes)
        if self.is_sorted:
            seen[:, :nodes, :past] = batch.attention_mask[:, :, :past]  # masked behind a row's entries
        for i, length in enumerate(self.lengths.tolist()):
            new = batch.attention_mask[i, :, past:]
            if self.is_sorted and length + nodes <= self.num_columns:  # the free columns follow the entries
                seen[i, :nodes, length : length + nodes] = new
            else:
                seen[i, :nodes][:, self.column_of[i, :length]] = batch.attention_mask[i, :, :length]
                seen[i, :nodes][:, written_columns[i]] = new
        seen[:, nodes:, 0] = True  # a softmax over no columns could return NaN
        write = np.zeros((rows, num_padded_nodes, 1, 3), np.int64)  # row, column and first part
        write[..., 0, 0] = row
        write[..., 0, 1] = self.num_columns - 1
        write[:, :nodes, 0, 1] = written_columns
        starts = self.lengths.copy() if self.in_order else write
        return {"position_ids": pad_nodes(batch.positions, num_padded_nodes), "write": starts, "seen": pack_mask(seen)}

    def accept_nodes(self, new_kv: Ints, accepted_indices: list[Ints]) -> Ints:
        """Append nodes `accepted_indices[r]` of the last pass to row r's entries.

        Args:
            new_kv: columns that the pass wrote, `written_columns`.
            accepted_indices: accepted nodes of each row.

        Returns:
            The entries to move, int64 `[moves, 3]`: row, source column, target column.

        Raises:
            ValueError: the nodes do not fit, or another pass has been run since.
        """
        if new_kv is not self.written_columns:
            raise ValueError("`new_kv` is not from the last pass on this cache")
        lengths = self.compute_extended_lengths(accepted_indices)
        moves: list[tuple[int, int, int]] = []
        num_columns = [new_kv[row, nodes].tolist() for row, nodes in enumerate(accepted_indices)]
        if not self.in_order and any(self.num_columns - 1 in accepted for accepted in num_columns):
            raise ValueError("a padding node cannot be accepted")
        for row, (start, accepted) in enumerate(zip(self.lengths.tolist(), num_columns, strict=True)):
            if self.in_order:
                moves += [(row, at, start + i) for i, at in enumerate(accepted) if at != start + i]
                continue
            columns_of = self.column_of[row, start : start + new_kv.shape[1]]
            free = columns_of.tolist()
            if accepted != free[: len(accepted)]:
                # Accepted nodes stay in their columns and become the next entries; the other columns are free again.
                columns_of[:] = [*accepted, *sorted({*free} - {*accepted})]
                self.is_sorted = False
        self.lengths = lengths
        if moves:  # the nodes of the last pass are no longer where it wrote them
            self.written_columns = None
        return np.array(moves, np.int64).reshape(-1, 3)


def padded_node_count(num_nodes: int) -> int:
    """Return the padded number of nodes of a pass over `num_nodes` nodes."""
    return next(
        (count for count in _PADDED_NODE_COUNTS if count >= num_nodes), round_up(num_nodes, _PADDED_NODE_COUNTS[-1])
    )


def pad_nodes(node_values: Ints, num_nodes: int, dtype: type[np.signedinteger] = np.int64) -> Array:
    """Pad node inputs with zeros.

    Args:
        node_values: numbers to pad, `[rows, at most num_nodes]`.
        num_nodes: number of nodes with padding.
        dtype: type of the result.

    Returns:
        The padded numbers, `[rows, num_nodes]`.
    """
    filled = np.zeros((len(node_values), num_nodes), dtype)
    filled[:, : node_values.shape[1]] = node_values
    return filled


def pack_mask(mask: Bools) -> Array:
    """Pack a mask `[..., columns]` into int32 `[..., columns / MASK_WORD_BITS]`, the first column in the lowest bit."""
    packed = np.packbits(mask, axis=-1, bitorder="little")
    return packed.view("<u2").astype(np.int32)


def write_mask_unpacking(graph: GraphWriter, packed_mask: str, masked_score: float) -> str:
    """Write the inverse of `pack_mask`, with numbers to add to scores.

    Args:
        packed_mask: name of the packed mask, int32 `[rows, nodes, packed_mask]`.
        masked_score: number for False; 0 stands for True.

    Returns:
        The name of the numbers, float32 `[rows, nodes, columns]`.
    """
    half, unit, two, scale = (graph.add_constant(np.array(number, np.float32)) for number in (0.5, 1, 2, masked_score))
    powers = graph.add_constant(0.5 ** np.arange(MASK_WORD_BITS, dtype=np.float32))
    numbers = graph.op("Unsqueeze", graph.cast(packed_mask, "float32"), graph.int_vector(-1))
    # Bit c is floor(word / 2^c) - 2 floor(word / 2^(c + 1)). ONNX's BitShift takes no int32, and float32 is exact for
    # words of 16 bits.
    shifted = graph.op("Floor", graph.op("Mul", numbers, powers))
    even = graph.op("Mul", graph.op("Floor", graph.op("Mul", shifted, half)), two)
    bits = graph.reshape(graph.op("Sub", shifted, even), 0, 0, -1)
    return graph.op("Mul", graph.op("Sub", unit, bits), scale)
