"""Where drafts come from: the base of all drafters, and what they hear of every pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from .engine import Floats, HiddenView, Ints
from .grid import RowBatch
from .state import Request
from .target import TargetOutput
from .tree import DraftTree

_ROOT = np.array([-1], np.int64)  # parents of a tree of one node


class Commit(NamedTuple):
    """What a pass committed of one request.

    source: whose draft it was. tokens: the root of the next draft last. nodes: per row those whose keys and values
    were kept. hidden: the target's hidden states at them, per row `[nodes, hidden_size]`, fetched when called
    unless they stay on a device. answers: what the target said.
    """

    request: Request
    source: Drafter
    tokens: Ints
    nodes: list[Ints]
    hidden: Callable[[], list[Floats | HiddenView]]
    answers: TargetOutput


class Drafter:
    """A source of drafts: gives requests a tree before a pass, is told after every pass what it committed.

    This one, plain decoding's, drafts nothing.
    """

    def commit(self, committed: Sequence[Commit]) -> None:
        """Take in what the prefill, or a pass over drafts of this or another source, committed."""

    def draft(self, requests: Sequence[Request]) -> Sequence[DraftTree | RowBatch]:
        """A tree for every request, below its last token."""
        return [DraftTree(np.array(request.codes[-1:], np.int64), _ROOT) for request in requests]

    def leave(self, requests: Sequence[Request]) -> None:
        """Forget these requests."""
