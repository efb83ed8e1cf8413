"""Speculative Jacobi decoding: the target's previous forward pass gives the drafts, without a drafter.

A window holds a draft for each of the next tokens. One forward pass verifies it as a chain, and gives new distributions
of all its tokens. The first tokens are accepted as any draft is. The others are drafted again from their new
distributions, each with the noise of its position. This is SJD (arXiv 2410.01699), except that there new drafts are
independent; the same noise keeps most drafts. Greedy decoding drafts the most probable tokens.

Exact acceptance needs no proof here, because it does not matter where a draft comes from. For relaxed acceptance it
does, and the window also stores the distribution q from which a draft was sampled. Take position m, and fix everything
that happens at earlier positions in all passes. This fixes the tokens drafted there and every distribution p and q of
m. It also fixes the pass in which m enters the window and the pass in which m is decided. Nothing fixed depends on the
noise of m. So the draft of m is a sample of its latest q. Acceptance, with random numbers for itself alone, turns it
into a sample of p, except for the change that relaxation allows. Two faults would break this: a q from which the draft
was not sampled, and a token or noise of m that decides about earlier positions. (Derived here; tests enumerate whole
decodes.)

A new position at the end of the window starts as a copy of the cell to its left, or in the first column of the cell
above. The copy counts as certain (q = 1), whether that cell is committed or drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import EngineError
from .drafting import CommittedTokens
from .raster import RasterLayout
from .sampling import Probabilities
from .state import ImageSequence
from .target import TargetOutput
from .tree import DraftTree
from .tree_drafts import TreeDrafter, make_chain, next_preserved_tokens


class JacobiDrafter(TreeDrafter):
    """A drafter with one window per sequence."""

    def __init__(self, max_nodes: int) -> None:
        super().__init__(max_nodes)
        self._windows: dict[ImageSequence, JacobiWindow] = {}

    def store_committed_tokens(self, commits: Sequence[CommittedTokens]) -> None:
        """Draft the tokens that a pass over the windows did not decide again."""
        for commit in commits:
            if commit.sequence.num_remaining_codes and commit.sequence in self._windows:
                try:
                    self._windows[commit.sequence].redraft(len(commit.tokens) - 1, commit.target)
                except EngineError as error:
                    commit.sequence.error = error

    def draft_trees(self, sequences: Sequence[ImageSequence]) -> list[DraftTree]:
        """Return every sequence's window as a chain."""
        trees = []
        for sequence in sequences:
            preserved = next_preserved_tokens(sequence, self.max_nodes)
            remaining = sequence.count_codes_until_preserved(len(preserved))
            if preserved:
                remaining = min(remaining, self.max_nodes - len(preserved))
            trees.append(self._get_window(sequence).draft(sequence.codes, remaining, preserved))
        return trees

    def min_pass_nodes(self, sequence: ImageSequence, num_images: int) -> int:
        """Set the window for the images in the pass, and return the maximum number of nodes of the next draft."""
        sequence.adapt_window(num_images)
        return sequence.max_nodes

    def remove(self, sequences: Sequence[ImageSequence]) -> None:
        """Forget these sequences."""
        for sequence in sequences:
            self._windows.pop(sequence, None)

    def _get_window(self, sequence: ImageSequence) -> JacobiWindow:
        stores_proposals = not sequence.exact and not sequence.sampling.greedy
        window = self._windows.setdefault(
            sequence, JacobiWindow(sequence.window, sequence.raster_layout, stores_proposals)
        )
        window.size = sequence.window
        return window


@dataclass
class JacobiWindow:
    """The drafts of one sequence.

    Attributes:
        size: number of tokens to draft, from 1.
        layout: layout of the image.
        stores_proposals: whether acceptance needs q.
        codes: drafted tokens of the next positions.
        proposals: q of each draft; None: the draft counts as certain.
        num_preserved_tokens: number of preserved tokens before the window in the last draft.
    """

    size: int
    layout: RasterLayout
    stores_proposals: bool
    codes: list[int] = field(default_factory=list)
    proposals: list[Probabilities | None] = field(default_factory=list)
    num_preserved_tokens: int = 0

    def draft(
        self, committed_tokens: Sequence[int], max_tokens: int, preserved_tokens: Sequence[int] = ()
    ) -> DraftTree:
        """Return the window as a chain.

        Args:
            committed_tokens: committed tokens of the sequence; the last token is the root.
            max_tokens: maximum number of tokens to sample; one fewer is drafted, as the pass samples another.
            preserved_tokens: preserved tokens after the committed tokens.
        """
        length = max(0, min(self.size, max_tokens - 1))
        self.num_preserved_tokens = len(preserved_tokens)
        del self.codes[length:], self.proposals[length:]
        while len(self.codes) < length:
            before = [*committed_tokens, *preserved_tokens, *self.codes]  # its length is the index of the next code
            self.codes.append(before[self.layout.left_or_upper_neighbor(len(before))])
            self.proposals.append(None)
        proposals = [*[None] * self.num_preserved_tokens, *self.proposals]
        return make_chain(
            [committed_tokens[-1], *preserved_tokens, *self.codes], self.num_preserved_tokens, proposals.__getitem__
        )

    def redraft(self, num_accepted: int, target_output: TargetOutput) -> None:
        """Draft the tokens behind the `num_accepted` first again, from the distributions of a pass over the window."""
        num_accepted = max(num_accepted, self.num_preserved_tokens)
        # The choice after node n drafts the token of node n + 1. The choice after the last accepted node is committed,
        # so the window begins one node further; the last node drafts a further token at its end.
        undecided = range(num_accepted + 1, self.num_preserved_tokens + len(self.codes) + 1)
        self.codes = [target_output.choose_token_without_recompute(node) for node in undecided]
        self.proposals = [target_output.distribution(node) if self.stores_proposals else None for node in undecided]
