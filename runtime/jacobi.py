"""Speculative Jacobi decoding: drafts without a drafter, from the target's own previous pass.

A window holds a draft for each of the next tokens. One target pass over the window, a chain for the engine, gives new
distributions of all its tokens. The tokens in front are accepted as any draft is; the others are re-drafted from their
new distributions, each with the noise of its position (SJD, arXiv 2410.01699, whose re-drafts are independent; keeping
the noise keeps most drafts). Greedy decoding re-drafts arg-maxima.

Exact acceptance needs no proof here: it does not matter where a draft comes from. For relaxed acceptance the window
also keeps the distribution q that a draft was drawn from, and there it does matter. Take position m, and fix everything
that happens at positions before it, in all passes: the tokens drafted there in turn, hence every distribution p and q
of position m, the pass in which m enters the window and the pass in which it is decided. None of that depends on the
noise of m. So m's draft is a draw from its latest q, and the decision, which has random numbers of its own, turns it
into a token from p but for what relaxation gives away. Two things would break this: a q that is not what the draft was
drawn from, and a token or number of position m that decides about positions before it. (Derived here; tests enumerate
whole decodes.)

New positions at the window's end start as a copy of the left neighbour on the grid (in the first column of the upper
one), draft or not, that counts as certain (q = 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .drafting import Commit
from .sampling import Probabilities
from .state import ImageSequence
from .target import TargetOutput
from .tree import DraftTree
from .tree_drafts import TreeDrafter, chain


class JacobiDrafter(TreeDrafter):
    """A window for every sequence."""

    def __init__(self, max_nodes: int) -> None:
        super().__init__(max_nodes)
        self._windows: dict[ImageSequence, Window] = {}

    def commit(self, commits: Sequence[Commit]) -> None:
        """Re-draft what a pass over the windows left undecided."""
        for one in commits:
            if one.sequence.remaining and one.sequence in self._windows:
                self._windows[one.sequence].advance(len(one.tokens) - 1, one.target)

    def draft_trees(self, sequences: Sequence[ImageSequence]) -> list[DraftTree]:
        """Return every sequence's window as a chain."""
        trees = []
        for sequence in sequences:
            known = self.preserved_tokens(sequence)
            remaining = sequence.tokens_until_preserved(len(known))
            if known:
                remaining = min(remaining, self.max_nodes - len(known))
            trees.append(self._window(sequence).draft(sequence.codes, remaining, known))
        return trees

    def leave(self, sequences: Sequence[ImageSequence]) -> None:
        """Forget these sequences."""
        for sequence in sequences:
            self._windows.pop(sequence, None)

    def _window(self, sequence: ImageSequence) -> Window:
        proposing = not sequence.exact and not sequence.sampling.greedy
        window = self._windows.setdefault(sequence, Window(sequence.window, sequence.raster.columns, proposing))
        window.size = sequence.window
        return window


@dataclass
class Window:
    """The drafts of one sequence: tokens of the next positions, and each one's q (None: the token was certain)."""

    size: int  # tokens drafted ahead, from 1
    columns: int  # of the token grid
    proposing: bool  # whether acceptance asks for q
    codes: list[int] = field(default_factory=list)
    proposals: list[Probabilities | None] = field(default_factory=list)
    known: int = 0  # codes before the window that were kept, in the last draft

    def draft(self, committed: Sequence[int], remaining: int, known: Sequence[int] = ()) -> DraftTree:
        """The window as a chain below the last of the sequence's committed tokens, and those that are `known` after it.

        remaining: codes that may be drawn then; the pass adds one of its own, so fewer are drafted.
        """
        length = max(0, min(self.size, remaining - 1))
        self.known = len(known)
        del self.codes[length:], self.proposals[length:]
        while len(self.codes) < length:
            before = [*committed, *known, *self.codes]
            first_column = len(before) % self.columns == 0 and len(before) >= self.columns
            self.codes.append(before[-self.columns if first_column else -1])
            self.proposals.append(None)
        proposals = [*[None] * self.known, *self.proposals]
        return chain([committed[-1], *known, *self.codes], self.known, proposals.__getitem__)

    def advance(self, accepted: int, target: TargetOutput) -> None:
        """Re-draft what a pass that accepted so many left over."""
        accepted = max(accepted, self.known)
        undecided = range(accepted + 1, self.known + len(self.codes) + 1)
        self.codes = [target.choice_without_recompute(node) for node in undecided]
        self.proposals = [target.distribution(node) if self.proposing else None for node in undecided]
