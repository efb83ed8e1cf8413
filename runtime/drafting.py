"""Drafts and drafters: what the decode loop asks of a draft of any kind, and who makes drafts.

A new kind of draft is one file: a class with the attributes of `Draft`, and a `Drafter` that makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from .acceptance import Acceptance
from .engine import DeviceArray, Ints
from .raster import PassLayout
from .state import ImageSequence, Model
from .target import TargetOutput
from .tree import DraftTree, TreeStructure


class Placed(NamedTuple):
    """Codes that were sampled in a forward pass, and the cells they stand in, both int64 `[count]`; no ends of rows."""

    cells: Ints
    codes: Ints


class SequenceStep(NamedTuple):
    """One sequence's part of a step: the tokens that it committed, and how."""

    sequence: int  # index of the sequence
    codes: Ints  # int64 `[count]`
    tree: DraftTree | None = None  # the draft tree, None for the prefill, `ar` and `rows`
    acceptance: Acceptance | None = None  # of the tree
    placed: Placed | None = None  # what a pass of `rows` sampled, which is not just the next codes

    @property
    def num_codes(self) -> int:
        """Number of codes that the image has more now."""
        return len(self.codes if self.placed is None else self.placed.codes)


class Accepted(NamedTuple):
    """Outcome of a draft."""

    step: SequenceStep  # whose codes the sequence has already
    tokens: Ints  # codes whose nodes were in the pass, int64 `[count]`, the root of the next draft last
    nodes: Ints  # the pass's nodes whose keys and values are appended to the cache, int64 `[kept]`


class Draft(Protocol):
    """Tokens that a sequence proposes for one forward pass, whatever they are: a tree, a window, rows of a grid."""

    @property
    def tokens(self) -> Ints:
        """Tokens of the nodes, int64 `[nodes]`."""

    @property
    def structure(self) -> TreeStructure:
        """Which nodes attend to each other."""

    @property
    def cells(self) -> Sequence[int]:
        """The cell of the image that is sampled after each node."""

    @property
    def sampled(self) -> Sequence[int] | None:
        """Nodes of which acceptance asks for the sampled token and nothing else; None: for distributions, too."""

    def layout(self) -> PassLayout:
        """Return the nodes as they stand in a forward pass."""

    def before(self, node: int) -> Ints:
        """Return the codes before the one that is sampled after `node`, int64 `[codes]`."""

    def accept(self, output: TargetOutput, layout: PassLayout, model: Model) -> Accepted:
        """Add the codes that the target accepts to the sequence.

        Args:
            output: what the target says after the nodes.
            layout: of the draft.
            model: engines and tables.
        """


class Commit(NamedTuple):
    """What a pass committed of one sequence."""

    sequence: ImageSequence  # whose codes have it already
    tokens: Ints  # int64 `[count]`, the root of the next draft last
    nodes: list[Ints]  # per row those whose keys and values were kept, int64 `[kept]`
    rows: slice  # the sequence's, of the pass
    hidden: DeviceArray  # the target's hidden states, of all rows and nodes of the pass
    target: TargetOutput  # what the target said
    draft: Draft | None = None  # what the pass went over, None of a prefill


class Drafter:
    """Base of what gives sequences a draft before a forward pass, and hears after every pass what was committed.

    Attributes:
        needs_new_codes: whether it has no draft behind codes that a sequence preserves.
    """

    needs_new_codes = False

    def commit(self, commits: Sequence[Commit]) -> None:
        """Take in what the prefill, or a pass over drafts of this or another drafter, committed."""

    def draft(self, sequences: Sequence[ImageSequence]) -> Sequence[Draft]:
        """Return a draft for every sequence."""
        raise TypeError(f"{type(self).__name__} makes no drafts")

    def leave(self, sequences: Sequence[ImageSequence]) -> None:
        """Forget these sequences."""
