"""Interface of an engine, which runs forward passes over new nodes and caches their keys and values.

An engine runs a decoder graph over a batch. Each batch *row* contains *nodes*, which are new tokens, and a cache of
committed nodes. The runtime computes positions and attention masks, so an engine does not need to know about draft
trees or prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]


class DeviceArray(Protocol):
    """Array `[rows, nodes, size]` on the host or on a device; indexing the first two axes gives float32 `[..., size]`.

    NumPy arrays satisfy this protocol. A read may copy from a device, so callers read only the entries that they need,
    and each entry at most once.
    """

    def __getitem__(self, key: Any, /) -> Any:
        """Return the entries at `key`, with the indexing rules of NumPy."""


@dataclass(frozen=True)
class HiddenStateView:
    """Reference to hidden states in the output of an earlier pass, which are read on demand."""

    source: DeviceArray  # `hidden` of an earlier `PassOutput`
    rows: Ints  # row of each state in `source`, int64 `[rows, nodes]`
    nodes: Ints  # node of each state in `source`, int64 `[rows, nodes]`


def read_hidden_states(states: Floats | HiddenStateView) -> Floats:
    """Return hidden states as an array, float32 `[..., hidden_size]`."""
    return states.source[states.rows, states.nodes] if isinstance(states, HiddenStateView) else states


def stack_hidden_states(
    states: list[Floats | HiddenStateView], counts: list[int], num_slots: int
) -> Floats | HiddenStateView:
    """Stack the first `counts[row]` hidden states of each row to `[rows, num_slots, hidden_size]`.

    The padding has arbitrary values. The result is a view if all rows view one output.
    """
    # A view avoids a copy from the device: the engine can read the states there.
    sources = {id(row_states.source) if isinstance(row_states, HiddenStateView) else None for row_states in states}
    if isinstance(first := states[0], HiddenStateView) and len(sources) == 1:
        rows, nodes = np.zeros((2, len(states), num_slots), np.int64)
        for row, (view, count) in enumerate(zip(states, counts, strict=True)):
            if isinstance(view, HiddenStateView):
                rows[row, :count] = view.rows[:count]
                nodes[row, :count] = view.nodes[:count]
        return HiddenStateView(first.source, rows, nodes)
    arrays = [read_hidden_states(row_states) for row_states in states]
    stacked = np.zeros((len(arrays), num_slots, arrays[0].shape[-1]), np.float32)
    for row, count in enumerate(counts):
        stacked[row, :count] = arrays[row][:count]
    return stacked


class PassInput(NamedTuple):
    """Input of one forward pass; exactly one of `tokens` and `embeds` is given."""

    positions: Ints  # int64 `[rows, nodes]`
    # Bool `[rows, nodes, past_length + nodes]`, True where a node attends. The columns of the cache come first;
    # `past_length` is the result of the engine's `past_columns`. Every node attends at least to itself.
    attention_mask: Bools
    tokens: Ints | None = None  # int64 `[rows, nodes]`
    embeds: Floats | None = None  # embeddings of prefixes, float32 `[rows, nodes, hidden_size]`
    # Hidden states of the target or of an earlier drafter pass, float32 `[rows, nodes, hidden_size]`, or a reference to
    # them. Only drafters read hidden states.
    hidden: Floats | HiddenStateView | None = None


class PassOutput(NamedTuple):
    """Output of one forward pass. Engines must not overwrite an output, as later passes may read its hidden states."""

    logits: DeviceArray  # float32 `[rows, nodes, vocab_size]`
    hidden: DeviceArray  # float32 `[rows, nodes, hidden_size]`
    new_kv: Any  # keys and values, in the format that the engine's cache appends


class Cache(Protocol):
    """Keys and values of committed nodes of each batch row; rows may differ in length.

    The entries of row r fill columns 0 .. lengths[r] - 1, in the order in which they were appended. Later columns have
    undefined values.
    """

    @property
    def lengths(self) -> Ints:
        """Number of committed entries of each row, int64 `[rows]`."""

    def append(self, new_kv: Any, accepted_indices: list[Ints]) -> None:
        """Append accepted nodes of a pass to each row.

        Args:
            new_kv: keys and values of all nodes of the pass, which is `PassOutput.new_kv`.
            accepted_indices: for each row the nodes to append, in this order, int64 `[accepted]`.
        """

    def truncate(self, lengths: Ints) -> None:
        """Remove the entries after the first `lengths[r]` of each row r."""

    def keep_rows(self, rows: Ints) -> None:
        """Remove all rows except `rows`, and arrange the remaining rows in the order of `rows`."""

    def extend(self, cache: Cache) -> None:
        """Append the rows of another cache of the same engine; `cache` must not be used afterwards."""

    def forbid_memory_reuse(self) -> None:
        """Keep the memory of this cache from being reused by later caches, because it may contain NaN.

        This cache itself may still be used.
        """


class Engine(Protocol):
    """Executable decoder model: a target or a drafter."""

    def make_cache(self, num_rows: int, capacity: int) -> Cache:
        """Return an empty cache for `num_rows` batch rows of at most `capacity` entries each."""

    def past_columns(self, cache: Cache, num_nodes: int) -> int:
        """Return the number of cache columns that a pass over `num_nodes` new nodes will read.

        The number is at least the length of the longest row. An engine may round it up, so that shapes repeat and the
        order of summation does not depend on the other rows of the batch.
        """

    def run(self, pass_input: PassInput, cache: Cache) -> PassOutput:
        """Run one forward pass, which reads the cache but does not change it."""
