"""Speculative Jacobi decoding (SJD, arXiv 2410.01699): the target's previous forward pass gives the draft tokens.

The window contains a draft token for each of the next positions. One forward pass verifies the window as a chain, and
computes new distributions of all its tokens. The first tokens are accepted as in any draft. The other tokens are
drafted again from their new distributions, each with the noise of its position. In the published SJD, new drafts use
new noise. Here the noise of a position stays the same, so most draft tokens stay the same, too. Greedy decoding drafts
the most probable tokens.

Exact acceptance needs no proof here, because it is exact for every draft. Relaxed acceptance needs the distribution q
from which a draft token was sampled, so the window also stores q. Proof that the result follows the target's
distribution p: Take position m, and fix everything that happens at earlier positions in all passes. This fixes the
tokens drafted at earlier positions, and every distribution p and q of m. It also fixes the pass in which m enters the
window, and the pass that decides m. Nothing that is fixed depends on the noise of m. So the draft token of m is a
sample of its latest q. Acceptance uses separate random numbers, and turns this token into a sample of p, except for the
change that relaxation allows. Two faults would break the proof: a q from which the draft token was not sampled, and a
token or noise of m that influences earlier positions. (Derived here; tests enumerate whole decodes.)

A new position at the end of the window starts with a copy of the token to its left. In the first column, it starts with
a copy of the token above. Acceptance treats every copy as certain (q = 1), even a copy of a draft token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from .drafting import CommittedTokens
from .raster import RasterLayout
from .sampling import NO_CODE, Probabilities
from .state import ImageSequence
from .target import TargetOutput
from .tree import DraftTree
from .tree_drafts import TreeDrafter, make_chain, next_preserved_tokens


class JacobiDrafter(TreeDrafter):
    """Drafter of speculative Jacobi decoding, with one window for each sequence."""

    needs_new_codes = False

    def __init__(self, max_nodes: int) -> None:
        super().__init__(max_nodes)
        self._windows: dict[ImageSequence, JacobiWindow] = {}

    def store_committed_tokens(self, commits: Sequence[CommittedTokens]) -> None:
        """Draft the undecided tokens of each window again, from the distributions of the last target pass."""
        for commit in commits:
            if commit.sequence.num_remaining_codes and commit.sequence in self._windows:
                self._windows[commit.sequence].redraft(len(commit.tokens) - 1, commit.target)

    def draft_tree(self, sequence: ImageSequence) -> DraftTree:
        preserved = next_preserved_tokens(sequence, self.max_nodes)
        remaining = sequence.count_codes_until_preserved(len(preserved))
        if preserved:  # preserved tokens and window have to fit into one pass
            remaining = min(remaining, self.max_nodes - len(preserved))
        return self._get_window(sequence).draft(sequence.codes, remaining, preserved)

    def remove(self, sequences: Sequence[ImageSequence]) -> None:
        for sequence in sequences:
            self._windows.pop(sequence, None)

    def _get_window(self, sequence: ImageSequence) -> JacobiWindow:
        stores_proposals = not sequence.plan.method.exact and not sequence.plan.sampler.greedy
        new_window = JacobiWindow(sequence.window, sequence.plan.raster_layout, stores_proposals)
        window = self._windows.setdefault(sequence, new_window)
        window.size = sequence.window
        return window


@dataclass
class JacobiWindow:
    """Draft tokens for the next positions of one sequence."""

    size: int  # maximum number of tokens to draft, at least 1
    layout: RasterLayout
    stores_proposals: bool  # whether acceptance needs the distributions q of the draft tokens
    codes: list[int] = field(default_factory=list)
    # For each draft token the distribution q from which it was sampled; None: the token was not sampled and counts as
    # certain (q = 1).
    proposals: list[Probabilities | None] = field(default_factory=list)
    num_preserved_tokens: int = 0  # number of preserved tokens before the window in the last draft

    def draft(
        self, committed_tokens: Sequence[int], max_tokens: int, preserved_tokens: Sequence[int] = ()
    ) -> DraftTree:
        """Return the window as a draft tree without branches, below the last committed token.

        Args:
            committed_tokens: committed tokens of the sequence; the last token is the root.
            max_tokens: maximum number of tokens that the pass may commit. The draft has at most max_tokens - 1 tokens,
                because the pass also samples the token after the draft.
            preserved_tokens: preserved tokens between the committed tokens and the window.
        """
        length = max(0, min(self.size, max_tokens - 1))
        self.num_preserved_tokens = len(preserved_tokens)
        del self.codes[length:], self.proposals[length:]
        while len(self.codes) < length:
            before = [*committed_tokens, *preserved_tokens, *self.codes]  # its length is the next code index
            self.codes.append(before[self.layout.find_left_or_upper_neighbor(len(before))])
            self.proposals.append(None)
        proposals = [*[None] * self.num_preserved_tokens, *self.proposals]
        return make_chain(
            [committed_tokens[-1], *preserved_tokens, *self.codes], self.num_preserved_tokens, proposals.__getitem__
        )

    def redraft(self, num_accepted: int, target_output: TargetOutput) -> None:
        num_accepted = max(num_accepted, self.num_preserved_tokens)
        # The token that the target chooses after node n becomes the draft token of node n + 1. The token after the last
        # accepted node is committed, so the new window begins one node later. The last node adds one token to its end.
        undecided = range(num_accepted + 1, self.num_preserved_tokens + len(self.codes) + 1)
        codes = map(target_output.choose_token_without_recompute, undecided)
        # After a rejected token, logits may be NaN. From there on, `draft` fills the window with copies.
        self.codes = [*takewhile(lambda code: code != NO_CODE, codes)]
        self.proposals = [
            target_output.distribution(node) if self.stores_proposals else None for node in undecided[: len(self.codes)]
        ]
