"""Interface of an engine: run forward passes over new nodes and cache their keys and values.

An engine runs a decoder graph over batch *rows* of *nodes* (new tokens) and reads a cache of committed nodes. The
runtime supplies positions and attention masks: the engine knows neither trees nor prompts.
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
    """Array `[rows, nodes, size]`, perhaps on a device: indexing the first two axes gives float32 `[..., size]`.

    NumPy arrays satisfy this protocol. Read only the entries needed, each at most once: a read may be a copy.
    """

    def __getitem__(self, key: Any, /) -> Any:
        """Return the entries at `key`, which NumPy rules interpret."""


@dataclass(frozen=True)
class HiddenStateView:
    """Reference to hidden states of earlier outputs, read on demand."""

    source: DeviceArray  # `hidden` of an earlier `PassOutput`
    rows: Ints  # row of each state in `source`, int64 `[rows, nodes]`
    nodes: Ints  # node of each state in `source`, int64 `[rows, nodes]`

    def read(self) -> Floats:
        """Return the states, float32 `[rows, nodes, hidden_size]`."""
        states: Floats = self.source[self.rows, self.nodes]
        return states


def read_hidden_states(states: Floats | HiddenStateView) -> Floats:
    """Return hidden states as an array, float32 `[..., hidden_size]`."""
    return states.read() if isinstance(states, HiddenStateView) else states


def stack_hidden_states(
    states: list[Floats | HiddenStateView], counts: list[int], num_slots: int
) -> Floats | HiddenStateView:
    """Pad each row's hidden states; return a view if all rows are views of one output.

    Args:
        states: hidden states of each row, `[nodes, hidden_size]`.
        counts: number of states of each row to use, from the first.
        num_slots: number of states of each row of the result.
    """
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
    # bool `[rows, nodes, past_length + nodes]`, the columns of the cache first, with `past_length` from the engine's
    # `padded_past_length`; every node attends at least to itself
    attention_mask: Bools
    tokens: Ints | None = None  # int64 `[rows, nodes]`
    embeds: Floats | None = None  # prefix rows, float32 `[rows, nodes, hidden_size]`
    # float32 `[rows, nodes, hidden_size]`, or a reference to an earlier output; only drafters read hidden states
    hidden: Floats | HiddenStateView | None = None


class PassOutput(NamedTuple):
    """Output of one forward pass. Later passes may read its hidden states, so engines must not overwrite it."""

    logits: DeviceArray  # float32 `[rows, nodes, vocab_size]`
    hidden: DeviceArray  # float32 `[rows, nodes, hidden_size]`
    new_kv: Any  # keys and values, in the format that the engine's cache appends


class Cache(Protocol):
    """Keys and values of committed nodes; rows may differ in length.

    Row r's entries fill columns 0 .. lengths[r] - 1 in the order of appending; later columns are undefined.
    """

    @property
    def lengths(self) -> Ints:
        """Number of committed entries of each row, int64 `[rows]`."""

    def append(self, new_kv: Any, accepted_indices: list[Ints]) -> None:
        """Append the nodes `accepted_indices[r]` of a pass's `new_kv` to each row r, in this order."""

    def truncate(self, lengths: Ints) -> None:
        """Remove the entries after the first `lengths[r]` of each row r."""

    def keep_rows(self, rows: Ints) -> None:
        """Keep only the given rows, in the given order."""

    def extend(self, cache: Cache) -> None:
        """Append the rows of another cache of the same engine; `cache` must not be used afterwards."""

    def forbid_memory_reuse(self) -> None:
        """Keep the memory from later caches, as it may contain NaN; this cache may still be used."""


class Engine(Protocol):
    """Executable decoder: a target or a drafter."""

    def new_cache(self, num_rows: int, capacity: int) -> Cache:
        """Return an empty cache for `num_rows` batch rows of at most `capacity` entries each."""

    def padded_past_length(self, cache: Cache, num_nodes: int) -> int:
        """Return how many cache columns a pass over `num_nodes` new nodes will read: at least the longest row's length.

        An engine may round up: shapes then repeat, and the order of summation does not depend on the rest of the batch.
        """

    def run(self, pass_input: PassInput, cache: Cache) -> PassOutput:
        """Run one forward pass, which reads the cache and never writes to it."""
