"""Speculative Jacobi decoding: drafts without a drafter, from the target's own previous pass.

A window holds a draft for each of the next codes, and the distribution q it was drawn from. One target pass over
the window, a chain for the engine, gives new distributions p of all its codes. The codes in front are accepted as
any draft is (`acceptance.walk`: min(1, p / q), at the first refusal a draw from max(p - q, 0)); the others are
re-drafted from their p, which becomes their q (SJD, arXiv 2410.01699). Greedy decoding re-drafts arg-maxima and
accepts what the new pass confirms, so it ends on the codes of greedy `ar`.

Re-drafting `independent` draws anew. `coupled` (arXiv 2510.24211) takes the draft that is most likely to stay: the
old code is kept with probability min(1, p / q), else drawn from max(p - q, 0), a maximal coupling of q and p.

Both leave the output exactly distributed. Take position m, and fix everything that happens at positions before it,
in all passes: the codes drafted there in turn, hence every distribution p and q of position m, the pass in which
m enters the window and the pass in which it is decided. None of that depends on the codes drafted at m. Then m's
first draft comes from its first q; a re-draft with the marginal p turns a draft from q into one from p, which
is the next q; so in the deciding pass the draft still comes from its q, and min(1, p / q) with the residual turns it
into a code from p, the target's distribution after the codes before m. Two things would break this: a q that is not
what the draft was drawn from, and a code or number of position m that decides about positions before it. (Derived
here; tests enumerate whole decodes.) The relaxation of `acceptance` costs here what it costs there.

New positions at the window's end start as a random code (q uniform), or as a copy of the left or upper neighbour on
the grid, draft or not, that counts as certain (q = 1): exact too, whatever is copied.

Does not know engines, logits or how many requests there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from .acceptance import Distribution, residual_distribution
from .sampling import Probabilities, draw
from .tree import DraftTree

Start = Literal["random", "left", "above"]
Redraft = Literal["coupled", "independent"]


@dataclass(frozen=True)
class Jacobi:
    """How a window drafts.

    window: codes drafted ahead, from 1. columns: of the code grid. vocabulary: number of codes. redraft and start:
    see above; `left` takes the upper neighbour in the first column, `above` the left one in the first row.
    """

    window: int
    columns: int
    vocabulary: int
    redraft: Redraft = "coupled"
    start: Start = "random"

    @property
    def nodes(self) -> int:
        """Nodes of a pass: the last committed code and the window."""
        return self.window + 1


@dataclass
class Window:
    """The drafts of one request: codes of the next positions, and each one's q (None: the code was certain)."""

    jacobi: Jacobi
    greedy: bool
    rng: np.random.Generator
    codes: list[int] = field(default_factory=list)
    proposals: list[Probabilities | None] = field(default_factory=list)

    def draft(self, committed: Sequence[int], missing: int) -> DraftTree:
        """The window as a chain below the last committed code.

        committed: the request's codes so far, at least one. missing: codes the image still needs, at least one;
        the pass adds a code of its own, so no more than missing - 1 are drafted.
        """
        length = min(self.jacobi.window, missing - 1)
        del self.codes[length:], self.proposals[length:]
        while len(self.codes) < length:
            self._start([*committed, *self.codes])
        proposals = {} if self.greedy else {node: q for node, q in enumerate(self.proposals) if q is not None}
        tokens = np.array([committed[-1], *self.codes], np.int64)
        return DraftTree(tokens, np.arange(length + 1, dtype=np.int64) - 1, proposals)

    def advance(self, accepted: int, target: Distribution) -> None:
        """Move on after a pass that accepted so many drafts and one code more; re-draft what is left.

        target: distribution after each node of the chain; asked for the nodes past the refused one only.
        """
        last = len(self.codes)
        kept: list[tuple[int, Probabilities | None]] = []
        for node in range(accepted + 1, last + 1):
            p = target(node)
            if self.greedy:
                kept.append((int(p.argmax()), None))
            elif node == last or self.jacobi.redraft == "independent":
                kept.append((draw(p, self.rng), p))
            else:
                kept.append((self._couple(self.codes[node], self.proposals[node], p), p))
        self.codes, self.proposals = [code for code, _ in kept], [q for _, q in kept]

    def _couple(self, code: int, q: Probabilities | None, p: Probabilities) -> int:
        """A code from p that is `code`, a draw from q, as often as any joint distribution of the two allows."""
        if self.rng.random() < min(1.0, float(p[code]) / (1.0 if q is None else float(q[code]))):
            return code
        return draw(residual_distribution(p, q, code), self.rng)

    def _start(self, before: Sequence[int]) -> None:
        """Append the first draft of a new position; `before` are all codes of the image before it."""
        position, columns = len(before), self.jacobi.columns
        if self.jacobi.start == "random":
            q = np.full(self.jacobi.vocabulary, 1 / self.jacobi.vocabulary)
            self.codes.append(draw(q, self.rng))
            self.proposals.append(q)
            return
        row, column = divmod(position, columns)
        upper = row > 0 and (self.jacobi.start == "above" or column == 0)
        self.codes.append(before[position - columns if upper else position - 1])
        self.proposals.append(None)
