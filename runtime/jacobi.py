"""Speculative Jacobi decoding: drafts without a drafter, from the target's own previous pass.

A window holds a draft for each of the next tokens, and the distribution q it was drawn from. One target pass over
the window, a chain for the engine, gives new distributions p of all its tokens. The tokens in front are accepted as
any draft is (`acceptance.walk`: min(1, p / q), at the first refusal a draw from max(p - q, 0)); the others are
re-drafted from their p, which becomes their q (SJD, arXiv 2410.01699). Greedy decoding re-drafts arg-maxima and
accepts what the new pass confirms, so it ends on the tokens of greedy `ar`.

Re-drafting is coupled (arXiv 2510.24211): it takes the draft that is most likely to stay. The old token is kept with
probability min(1, p / q), else one is drawn from max(p - q, 0), a maximal coupling of q and p.

The output stays exactly distributed. Take position m, and fix everything that happens at positions before it,
in all passes: the tokens drafted there in turn, hence every distribution p and q of position m, the pass in which
m enters the window and the pass in which it is decided. None of that depends on the tokens drafted at m. Then m's
first draft comes from its first q; a re-draft with the marginal p turns a draft from q into one from p, which
is the next q; so in the deciding pass the draft still comes from its q, and min(1, p / q) with the residual turns it
into a token from p, the target's distribution after the tokens before m. Two things would break this: a q that is not
what the draft was drawn from, and a token or number of position m that decides about positions before it. (Derived
here; tests enumerate whole decodes.) The relaxation of `acceptance` costs here what it costs there.

New positions at the window's end start as a copy of the left neighbour on the grid (in the first column of the upper
one), draft or not, that counts as certain (q = 1): exact too, whatever is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ..methods import Sjd
from .acceptance import Distribution, residual_distribution
from .drafts import Batch, Committed, Drafts, Request
from .sampling import Probabilities, draw
from .tree import DraftTree


class WindowDrafts(Drafts):
    """A window for every request of a batch."""

    def __init__(self, batch: Batch, method: Sjd) -> None:
        self.batch = batch
        self.nodes = self.slots = method.window + 1  # the last committed token, and the window
        greedy, columns = batch.sampling.greedy, batch.model.columns
        self.windows = [Window(method.window, columns, greedy, one.draft_rng) for one in batch.requests]

    def commit(self, active: Sequence[Request], committed: Committed) -> None:
        """Re-draft what a pass left undecided."""
        for slot, request in enumerate(active):
            if self.batch.missing(request) > 0:
                accepted = len(committed.accepted_indices[slot]) - 1
                self.windows[request.index].advance(accepted, partial(committed.distribution, slot))

    def draft(self, active: Sequence[Request]) -> list[DraftTree]:
        """Every request's window as a chain."""
        return [self.windows[one.index].draft(one.codes, self.batch.missing(one)) for one in active]


@dataclass
class Window:
    """The drafts of one request: tokens of the next positions, and each one's q (None: the token was certain).

    size: tokens drafted ahead, from 1. columns: of the token grid.
    """

    size: int
    columns: int
    greedy: bool
    rng: np.random.Generator
    codes: list[int] = field(default_factory=list)
    proposals: list[Probabilities | None] = field(default_factory=list)

    def draft(self, committed: Sequence[int], missing: int) -> DraftTree:
        """The window as a chain below the last of the request's committed tokens.

        missing: tokens the image still needs, from 1; the pass adds one of its own, so at most missing - 1 are drafted.
        """
        length = min(self.size, missing - 1)
        del self.codes[length:], self.proposals[length:]
        while len(self.codes) < length:
            before = [*committed, *self.codes]
            first_column = len(before) % self.columns == 0 and len(before) >= self.columns
            self.codes.append(before[-self.columns if first_column else -1])
            self.proposals.append(None)
        proposals = {} if self.greedy else {node: q for node, q in enumerate(self.proposals) if q is not None}
        tokens = np.array([committed[-1], *self.codes], np.int64)
        return DraftTree(tokens, np.arange(length + 1, dtype=np.int64) - 1, proposals)

    def advance(self, accepted: int, target: Distribution) -> None:
        """Re-draft what a pass that accepted so many left over; `target` gives each chain node's distribution."""
        last = len(self.codes)
        codes: list[int] = []
        proposals: list[Probabilities | None] = []
        for node in range(accepted + 1, last + 1):
            p = target(node)
            proposals.append(None if self.greedy else p)
            if self.greedy:
                codes.append(int(p.argmax()))
            elif node == last:
                codes.append(draw(p, self.rng))
            else:
                codes.append(self._couple(self.codes[node], self.proposals[node], p))
        self.codes, self.proposals = codes, proposals

    def _couple(self, code: int, q: Probabilities | None, p: Probabilities) -> int:
        """A token from p that is `code`, a draw from q, as often as any joint distribution of the two allows."""
        if self.rng.random() < min(1.0, float(p[code]) / (1.0 if q is None else float(q[code]))):
            return code
        return draw(residual_distribution(p, q, code), self.rng)
