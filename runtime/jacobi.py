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
one), draft or not, that counts as certain (q = 1). With `Heads` they are drawn from a guess, and drafts whose left
neighbour has become another are drawn again from corrected logits; all that these know lies at positions before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..methods import Sjd
from .drafting import Commit, Drafter
from .engine import Floats
from .heads import Heads
from .sampling import Probabilities, choose, guide, shape_distribution
from .state import Request
from .target import TargetOutput
from .tree import DraftTree


class JacobiDrafter(Drafter):
    """A window for every request. heads: the bundle's, None where it has none."""

    def __init__(self, heads: Heads | None = None) -> None:
        self._windows: dict[Request, Window] = {}
        self._heads = heads

    def commit(self, commits: Sequence[Commit]) -> None:
        """Re-draft what a pass over the windows left undecided; after another pass they are empty."""
        for one in commits:
            if one.request.missing and any(isinstance(method, Sjd) for method in one.request.methods):
                if one.request not in self._windows:
                    self._windows[one.request] = Window(one.request, self._heads)
                self._windows[one.request].take(one)

    def draft(self, requests: Sequence[Request]) -> list[DraftTree]:
        """Every request's window as a chain."""
        trees: list[DraftTree] = []
        for request in requests:
            assert isinstance(request.method, Sjd)
            trees.append(self._windows[request].draft(min(request.method.window, request.missing - 1)))
        return trees

    def leave(self, requests: Sequence[Request]) -> None:
        """Forget these requests."""
        for request in requests:
            self._windows.pop(request, None)


class Window:
    """The drafts of one request: tokens of the next positions, and each one's q (None: the token was certain)."""

    def __init__(self, request: Request, heads: Heads | None) -> None:
        self.request, self.heads = request, heads
        self.proposing = not request.exact and not request.sampling.greedy  # whether acceptance asks for q
        self.codes: list[int] = []
        self.proposals: list[Probabilities | None] = []
        units = 0 if heads is None else heads.left.shape[1]
        self.context = np.zeros((request.raster.codes, 2, units), np.float32)  # of `Heads.context`, by position

    def draft(self, length: int) -> DraftTree:
        """The window as a chain of `length` drafts below the last of the request's codes."""
        committed, columns = self.request.codes, self.request.raster.columns
        del self.codes[length:], self.proposals[length:]
        while len(self.codes) < length:
            before = [*committed, *self.codes]
            if self.heads is not None:
                code, proposal = self._draw(len(before), self.heads.guess(before, columns, self.context))
            else:
                first_column = len(before) % columns == 0 and len(before) >= columns
                code, proposal = before[-columns if first_column else -1], None
            self.codes.append(code)
            self.proposals.append(proposal)
        tokens = np.array([committed[-1], *self.codes], np.int64)
        return DraftTree(tokens, np.arange(length + 1, dtype=np.int64) - 1, [*self.proposals].__getitem__)

    def take(self, commit: Commit) -> None:
        """Re-draft what a pass left over, which was perhaps over another draft."""
        if not isinstance(self.request.method, Sjd):
            self.codes.clear()
        if not (self.proposing or isinstance(commit.hidden, np.ndarray)):
            self.heads = None  # to read states from a device takes longer than better drafts save
        accepted = len(commit.tokens) - 1
        left_over = self.codes[accepted:]
        self.advance(accepted, commit.target)
        if self.heads is not None:
            self._correct(self.heads, commit, left_over)

    def advance(self, accepted: int, target: TargetOutput) -> None:
        """Draw anew, from what a pass says after each, the drafts that it did not decide about."""
        undecided = range(accepted + 1, len(self.codes) + 1)
        self.codes = [target.guess(node) for node in undecided]
        self.proposals = [target.distribution(node) if self.proposing else None for node in undecided]

    def _correct(self, heads: Heads, commit: Commit, left_over: Sequence[int]) -> None:
        """Draw those drafts again before which another code stands now. left_over: the drafts of that pass."""
        codes, count = self.request.codes, len(commit.tokens)
        undecided = np.arange(count, count + len(left_over))
        nodes = np.stack([np.append(kept[-count:], undecided) for kept in commit.nodes])  # [sides, nodes]
        rows = np.arange(commit.rows.start, commit.rows.stop)[:, None]
        states = guide(commit.hidden[rows, nodes], self.request.sampling)  # [nodes, hidden_size]
        self.context[len(codes) - count : len(codes)] = heads.context(states[:count])
        now = codes[-1]
        for i, (before, gate) in enumerate(zip(left_over, heads.gates(states[count:]), strict=True)):
            if now != before:
                logits = commit.target.guided(count + i) + heads.correction(gate, before, now)
                self.codes[i], self.proposals[i] = self._draw(len(codes) + i, logits)
            now = self.codes[i]

    def _draw(self, position: int, logits: Floats) -> tuple[int, Probabilities | None]:
        """A draft from guided logits `[vocab_size]`, and q."""
        sampling = self.request.sampling
        noise = None if sampling.greedy else self.request.noise.gumbel(position, 1, len(logits))
        code = int(choose(logits[None], noise, sampling)[0])
        return code, shape_distribution(logits, sampling) if self.proposing else None
