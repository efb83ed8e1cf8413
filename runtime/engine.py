"""What the runtime asks of an engine: run a pass over new nodes, keep keys and values.

An engine runs a decoder graph over *rows* (sequences) of *nodes* (new tokens), reading a cache of what was
committed before. Positions and attention masks are the runtime's: the engine knows neither trees nor prompts.
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
    """Numbers `[rows, nodes, size]`, perhaps on a device: indexing the first two axes gives float32 `[..., size]`.

    A NumPy array is one. Read each row at most once, and only those that are needed.
    """

    def __getitem__(self, key: Any, /) -> Any:
        """The rows at `key`, as NumPy would index them."""


@dataclass(frozen=True)
class HiddenView:
    """Hidden states from an earlier output, not read yet."""

    source: DeviceArray  # `hidden` of that output
    rows: Ints  # the row there of each node, int64 `[rows, nodes]`
    nodes: Ints  # its node there, int64 `[rows, nodes]`

    def read(self) -> Floats:
        """The states, float32 `[rows, nodes, hidden_size]`."""
        states: Floats = self.source[self.rows, self.nodes]
        return states


class Pass(NamedTuple):
    """Input of one pass; exactly one of `tokens` and `embeds` is given."""

    positions: Ints  # int64 `[rows, nodes]`
    # bool `[rows, nodes, past_length + nodes]`, past columns first, as many as the engine's `next_past_length`
    # says; every node sees at least itself
    attention_mask: Bools
    tokens: Ints | None = None  # int64 `[rows, nodes]`
    embeds: Floats | None = None  # prefix rows, float32 `[rows, nodes, hidden_size]`
    # float32 `[rows, nodes, hidden_size]`, or where an earlier output has them; for drafters only, which take
    # tokens and hidden states
    hidden: Floats | HiddenView | None = None


class PassOutput(NamedTuple):
    """Output of one pass, unchanged for as long as it is referred to: a later pass may read its hidden states."""

    logits: DeviceArray  # float32 `[rows, nodes, vocab_size]`
    hidden: DeviceArray  # float32 `[rows, nodes, hidden_size]`
    new_kv: Any  # keys and values, in a form that the same engine's cache can append


class Cache(Protocol):
    """Keys and values of committed nodes, with a length of its own for every row.

    Row r's entries fill columns 0 .. lengths[r] - 1 in the order of appending; columns past that are garbage.
    """

    @property
    def lengths(self) -> Ints:
        """Committed entries per row, int64 `[rows]`."""

    def append(self, new_kv: Any, accepted_indices: list[Ints]) -> None:
        """Append, for each row r, the nodes `accepted_indices[r]` of a pass's `new_kv`, in that order."""

    def truncate(self, lengths: Ints) -> None:
        """Forget everything past `lengths[r]` in each row r."""

    def keep_rows(self, rows: Ints) -> None:
        """Keep only these rows, in this order."""

    def extend(self, other: Cache) -> None:
        """Take in the rows of another cache of the same engine, after one's own. It is used up."""


class Engine(Protocol):
    """A decoder that can be run: a target or a drafter."""

    def new_cache(self, rows: int, capacity: int) -> Cache:
        """An empty cache for `rows` sequences of at most `capacity` entries each."""

    def next_past_length(self, cache: Cache, nodes: int) -> int:
        """Columns of the past that a pass over `nodes` new nodes will read: at least the longest row.

        An engine may round up, so that shapes repeat and sums are formed in one order whatever else is in the batch.
        """

    def run(self, batch: Pass, cache: Cache) -> PassOutput:
        """Run one pass; reads the cache, never writes it."""
