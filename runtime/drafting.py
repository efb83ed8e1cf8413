"""Interfaces of drafts and drafters, through which the decode loop uses every kind of draft.

To add a kind of draft, add one file with two classes: a class that implements `Draft`, and a subclass of `Drafter` that
makes these drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from .acceptance import Acceptance
from .engine import DeviceArray, Floats, Ints
from .layout import CodesWithCells
from .state import ImageSequence, LoadedModel
from .target import DraftNodes, TargetOutput
from .tree import DraftTree


class SequenceStep(NamedTuple):
    """Tokens that one sequence committed in one step of the batch, and the draft tree that contained them."""

    sequence: int  # index of the sequence
    # New codes up to the first unknown cell in raster order, without the codes that earlier steps returned,
    # int64 `[count]`.
    codes: Ints
    # All new codes with their cells, if the step sampled cells out of raster order; None: the new codes are `codes`.
    codes_with_cells: CodesWithCells | None = None
    tree: DraftTree | None = None  # the draft tree; None for the prefill, `ar`, `rows` and `groups`
    acceptance: Acceptance | None = None  # result of verifying the tree; None if `tree` is None

    @classmethod
    def append_codes(cls, sequence: ImageSequence, codes: Ints) -> SequenceStep:
        """Append codes to a sequence, and also all remaining codes if only preserved codes remain."""
        before = len(sequence.codes)
        sequence.codes += codes.tolist()
        if sequence.preserved_codes is not None:
            preserved, _ = sequence.next_preserved_codes()
            if len(preserved) == sequence.num_remaining_codes:
                sequence.codes += preserved.tolist()
        return cls(sequence.index, *sequence.plan.layout.place_codes(sequence.codes, before))

    @property
    def num_codes(self) -> int:
        return len(self.codes if self.codes_with_cells is None else self.codes_with_cells.codes)


class AcceptedDraft(NamedTuple):
    """Result of verifying the draft of one sequence."""

    step: SequenceStep  # the step of the sequence; its codes have already been appended to the sequence
    tokens: Ints  # codes to commit, int64 `[count]`; the last token is the root of the next draft
    nodes: Ints  # pass nodes whose keys and values are appended to the cache, int64 `[accepted]`


class Draft(DraftNodes, Protocol):
    """Draft tokens of one sequence for one forward pass, such as a draft tree, a window, or grid rows."""

    @property
    def tokens(self) -> Ints:
        """Tokens of the nodes, int64 `[nodes]`."""

    def accept(self, output: TargetOutput, model: LoadedModel) -> AcceptedDraft:
        """Verify the draft, and append the codes that the target accepts to the sequence.

        Raises:
            EngineError: the logits after an accepted node are NaN or infinite. Only this sequence fails.
        """


class CommittedTokens(NamedTuple):
    """Tokens of one sequence that a forward pass committed, with the pass output that drafters need."""

    sequence: ImageSequence  # the sequence, to which the tokens have already been appended
    tokens: Ints  # int64 `[count]`; the last token is the root of the next draft
    nodes: list[Ints]  # per batch row, the pass nodes appended to the cache, int64 `[accepted]`
    rows: slice  # batch rows of the sequence in the pass
    hidden: DeviceArray  # hidden states of the target for all sequences of the pass, `[rows, nodes, hidden_size]`
    target: TargetOutput  # output of the target for this sequence
    draft: Draft | None = None  # draft that the pass verified, None for a prefill

    def read_target_states(self, unaccepted_nodes: Sequence[int]) -> Floats:
        """Return the target's hidden states from which tokens are sampled, float32 `[rows, states, hidden_size]`.

        The states of the committed tokens come first. The states after the draft nodes `unaccepted_nodes` follow.
        """
        layout = self.target.layout
        after = layout.find_sampling_nodes(np.array(unaccepted_nodes, np.int64))
        nodes = [  # pass nodes of each batch row of the sequence
            np.append(layout.find_hidden_state_nodes(committed, len(self.tokens)), after) for committed in self.nodes
        ]
        rows = np.arange(self.rows.start, self.rows.stop)[:, None]
        states: Floats = self.hidden[rows, np.stack(nodes)]
        return states


CommitCallback = Callable[[Sequence[CommittedTokens]], None]  # gets the tokens that a pass committed


class Drafter:
    """Base class of drafters, which make a draft for each sequence before every target pass.

    After the pass, a drafter receives the tokens that were committed.
    """

    def store_committed_tokens(self, commits: Sequence[CommittedTokens]) -> None:
        """Store data for the next draft from the tokens that a prefill or verification pass committed."""

    def draft(self, sequences: Sequence[ImageSequence]) -> Sequence[Draft]:
        """Return a draft for every sequence of this drafter."""
        raise TypeError(f"{type(self).__name__} makes no drafts")

    def count_min_nodes_per_pass(self, sequence: ImageSequence, num_images: int) -> int:
        """Return the number of nodes to which a smaller pass is padded, so that the shapes of passes repeat.

        The number may depend on the number of images in the pass.
        """
        return 0

    def remove(self, sequences: Sequence[ImageSequence]) -> None:
        """Delete the state that the drafter stores for these sequences."""
