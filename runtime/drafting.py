"""Where drafts come from: the base of all drafters, and what they hear of every pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .engine import Ints, Rows
from .grid import RowBatch
from .state import Request
from .target import TargetOutput
from .tree import DraftTree

Draft = DraftTree | RowBatch
_ROOT = np.array([-1], np.int64)  # parents of a tree of one node


class Commit(NamedTuple):
    """What a pass committed of one request."""

    request: Request  # whose codes have it already
    tokens: Ints  # int64 `[count]`, the root of the next draft last
    nodes: list[Ints]  # per row those whose keys and values were kept, int64 `[kept]`
    rows: slice  # the request's, of the pass
    hidden: Rows  # the target's hidden states, of all rows and nodes of the pass
    target: TargetOutput  # what the target said
    draft: Draft | None = None  # what the pass went over, None of a prefill


class Drafter:
    """Gives requests a draft before a pass, hears after every pass what it committed.

    This one, plain decoding's, drafts nothing.
    """

    def commit(self, commits: Sequence[Commit]) -> None:
        """Take in what the prefill, or a pass over drafts of this or another drafter, committed."""

    def draft(self, requests: Sequence[Request]) -> Sequence[Draft]:
        """A draft for every request, below its last token."""
        return [DraftTree(np.array(request.codes[-1:], np.int64), _ROOT) for request in requests]

    def leave(self, requests: Sequence[Request]) -> None:
        """Forget these requests."""
