"""Where drafts come from: the base of all drafters, and what they hear of every pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from .device import Resident
from .engine import Floats, HiddenView, Ints, PassOutput
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
    # gives the target's hidden states at these nodes, per row float32 `[kept, hidden_size]`, or where they stay
    # on a device
    hidden: Callable[[], list[Floats | HiddenView]]
    target: TargetOutput  # what the target said


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


def hidden_states(output: PassOutput, rows: slice, nodes: list[Ints]) -> list[Floats | HiddenView]:
    """Hidden states of some rows at these nodes of each, float32 `[nodes, hidden_size]`; left on a device if there."""
    stays = isinstance(output.hidden, Resident)
    places = zip(range(rows.start, rows.stop), nodes, strict=True)
    views = (HiddenView(output.hidden, np.full(len(own), row), own) for row, own in places)
    return [view if stays else view.read() for view in views]
