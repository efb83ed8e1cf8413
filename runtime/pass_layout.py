"""Nodes of a sequence in a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .engine import Bools, Ints


class PassLayout(NamedTuple):
    """Nodes of a forward pass: the nodes of a draft, and the end-of-row tokens behind them."""

    tokens: Ints  # int64 `[pass nodes]`
    positions: Ints  # positions counted from the first token of the image, int64 `[pass nodes]`
    ancestors: Bools  # whether the column node is the row node or comes before it, bool `[pass nodes, pass nodes]`
    draft_nodes: Ints | None = None  # draft node of each pass node, int64 `[pass nodes]`
    # pass node after which the token of each draft node is sampled, int64 `[nodes]`; this field and `draft_nodes` are
    # None if the pass has no end-of-row tokens
    sampling_nodes: Ints | None = None
    # for targets with two heads, the two logits whose mean each code is drawn from, int64 `[codes, 2]`: twice the pass
    # node, plus 1 for the head of the cell below; None: one head
    averaged: Ints | None = None
    # attention mask over the cache entries behind the prefix, bool `[pass nodes, entries]`; None: all are attended to
    past: Bools | None = None

    def path_nodes(self, path: Sequence[int]) -> Ints:
        """Return the pass nodes of the draft nodes `path`, end-of-row tokens included."""
        return np.array(path, np.int64) if self.draft_nodes is None else np.flatnonzero(np.isin(self.draft_nodes, path))
