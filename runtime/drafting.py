"""Protocols of drafts and drafters: the interface between the decode loop and every kind of draft.

A new kind of draft is one file: a class with the attributes of `Draft`, and a `Drafter` that makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from .acceptance import Acceptance
from .engine import DeviceArray, Floats, Ints
from .layout import CodesWithCells, PassLayout
from .state import ImageSequence, LoadedModel
from .target import DraftNodes, TargetOutput
from .tree import DraftTree


class SequenceStep(NamedTuple):
    """The tokens that one sequence committed in a step, with the draft they come from."""

    sequence: int  # index of the sequence
    codes: Ints  # codes of the cells up to the first gap that no step before had, int64 `[count]`
    codes_with_cells: CodesWithCells | None = (
        None  # codes that a pass sampled in cells out of raster order; None: `codes`
    )
    tree: DraftTree | None = None  # the draft tree; None for the prefill, `ar`, `rows` and `groups`
    acceptance: Acceptance | None = None  # acceptance of the tree's nodes

    @classmethod
    def append_codes(cls, sequence: ImageSequence, codes: Ints) -> SequenceStep:
        """Append codes to a sequence, in its generation order, and return the step."""
        before = len(sequence.codes)
        sequence.append_codes(codes)
        return cls(sequence.index, *sequence.layout.place_codes(sequence.codes, before))

    @property
    def num_codes(self) -> int:
        """Number of codes that the image has more now."""
        return len(self.codes if self.codes_with_cells is None else self.codes_with_cells.codes)


class AcceptedDraft(NamedTuple):
    """Outcome of verifying a draft."""

    step: SequenceStep  # the sequence has its codes already
    tokens: Ints  # codes to commit, int64 `[count]`; the last token is the root of the next draft
    nodes: Ints  # pass nodes whose keys and values are appended to the cache, int64 `[accepted]`


class Draft(DraftNodes, Protocol):
    """Draft tokens of one sequence for one forward pass: a tree, a window, or grid rows."""

    @property
    def tokens(self) -> Ints:
        """Tokens of the nodes, int64 `[nodes]`."""

    @property
    def sampled_nodes(self) -> Sequence[int] | None:
        """Nodes whose sampled tokens are all that acceptance needs; None if it needs distributions, too."""

    def make_pass_layout(self) -> PassLayout:
        """Return the tokens, positions and ancestor mask of the nodes in a forward pass."""

    def accept(self, output: TargetOutput, model: LoadedModel) -> AcceptedDraft:
        """Add the codes that the target accepts to the sequence.

        Args:
            output: the target's output after each node.
            model: engines and tables.

        Returns:
            The committed tokens, their pass nodes, and the sequence's part of the step.
        """


class CommittedTokens(NamedTuple):
    """Tokens and states of one sequence that a forward pass committed."""

    sequence: ImageSequence  # it has the tokens already
    tokens: Ints  # int64 `[count]`; the last token is the root of the next draft
    nodes: list[Ints]  # per batch row, the pass nodes appended to the cache, int64 `[accepted]`
    rows: slice  # batch rows of the sequence in the pass
    hidden: DeviceArray  # hidden states of the target, `[rows, nodes, hidden_size]`, all sequences included
    target: TargetOutput  # the target's output for the sequence
    draft: Draft | None = None  # draft of the pass, None for a prefill

    def read_target_states(self, unaccepted_nodes: Sequence[int]) -> Floats:
        """Return the hidden states from which the committed tokens, then the tokens after other nodes, are sampled.

        Args:
            unaccepted_nodes: draft nodes that were not committed.

        Returns:
            Float32 `[rows, committed + unaccepted_nodes, hidden_size]`.
        """
        layout = self.target.layout
        after = layout.find_sampling_nodes(np.array(unaccepted_nodes, np.int64))
        nodes = [
            np.append(layout.find_hidden_state_nodes(committed, len(self.tokens)), after) for committed in self.nodes
        ]
        rows = np.arange(self.rows.start, self.rows.stop)[:, None]
        states: Floats = self.hidden[rows, np.stack(nodes)]
        return states


CommitCallback = Callable[[Sequence[CommittedTokens]], None]  # callback that gets the commits of a forward pass


class Drafter:
    """Base class of drafters: make a draft per sequence before a pass, and learn from committed tokens after it."""

    def store_committed_tokens(self, commits: Sequence[CommittedTokens]) -> None:
        """Store the tokens that the prefill or a forward pass committed, for the sequences of this drafter."""

    def draft(self, sequences: Sequence[ImageSequence]) -> Sequence[Draft]:
        """Return a draft for every sequence of this drafter."""
        raise TypeError(f"{type(self).__name__} makes no drafts")

    def min_pass_nodes(self, sequence: ImageSequence, num_images: int) -> int:
        """Return the number of nodes that the next pass is padded to, so that the shapes of passes repeat.

        Args:
            num_images: number of images in the pass.
        """
        return 0

    def remove(self, sequences: Sequence[ImageSequence]) -> None:
        """Delete the state of these sequences."""
