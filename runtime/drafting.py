"""Where drafts come from: the base of all drafters, and what they hear of every pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .engine import Ints, Rows
from .grid import MAX_BATCH_NODES, RowBatch
from .state import Request
from .target import TargetOutput
from .tree import DraftTree, Proposal, certain

Draft = DraftTree | RowBatch


class Commit(NamedTuple):
    """What a pass committed of one request."""

    request: Request  # whose codes have it already
    tokens: Ints  # int64 `[count]`, the root of the next draft last
    nodes: list[Ints]  # per row those whose keys and values were kept, int64 `[kept]`
    rows: slice  # the request's, of the pass
    hidden: Rows  # the target's hidden states, of all rows and nodes of the pass
    target: TargetOutput  # what the target said
    draft: Draft | None = None  # what the pass went over, None of a prefill


def chain(tokens: Sequence[int], known: int | None = None, proposal: Proposal = certain) -> DraftTree:
    """Tokens one below the other, the root first; known: how many below it are, all by default."""
    parents = np.arange(-1, len(tokens) - 1, dtype=np.int64)
    return DraftTree(np.array(tokens, np.int64), parents, proposal, known=len(tokens) - 1 if known is None else known)


class Drafter:
    """Gives requests a draft before a pass, hears after every pass what it committed.

    This one, plain decoding's, drafts nothing. Codes that a request keeps are no drafts: a run of them stands in one
    pass, below the last token.
    """

    def __init__(self, most_nodes: int = MAX_BATCH_NODES) -> None:
        self.most_nodes = min(most_nodes, MAX_BATCH_NODES)  # of a request in a pass

    def commit(self, commits: Sequence[Commit]) -> None:
        """Take in what the prefill, or a pass over drafts of this or another drafter, committed."""

    def draft(self, requests: Sequence[Request]) -> Sequence[Draft]:
        """A draft for every request, below its last token."""
        return [chain([*request.codes[-1:], *self.known(request)]) for request in requests]

    def known(self, request: Request) -> list[int]:
        """The codes that a request keeps next, as many as a pass takes."""
        return [] if request.kept is None else request.run()[0][: self.most_nodes - 1].tolist()

    def leave(self, requests: Sequence[Request]) -> None:
        """Forget these requests."""


def codes_before(request: Request, tree: DraftTree, before: int, node: int) -> Ints:
    """The first `before` codes of a request and those of a tree on the path to a node below them."""
    return np.array([*request.codes[:before], *tree.tokens[tree.path_to(node)[1:]].tolist()], np.int64)


def first_cell(request: Request, draft: Draft) -> int:
    """The cell that depth 0 of a draft stands in."""
    return 0 if isinstance(draft, RowBatch) else len(request.codes) - 1
