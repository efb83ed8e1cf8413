"""What a target pass says after the nodes of a request's draft: its choices and its distributions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice

import numpy as np

from ..methods import Sampling
from .engine import Floats, Ints, Rows
from .noise import Noise
from .sampling import Probabilities, choose, choose_and_lead, guide, is_decisive, shape_distribution
from .tree import TreeStructure

MOST_TOGETHER = 256  # nodes whose choices are made at once


@dataclass
class TargetOutput:
    """What the target says after the nodes of one request's tree; computed where it is asked for, of chains at once.

    logits(nodes): those of the request's rows, `[sides, nodes, vocab_size]`, after nodes of the pass. structure: the
    tree's. cells: that of the code after each node. last: the pass's node after which it is drawn, if
    not after the node itself. tie_margin: how far rounding may move differences of logits, and recompute(node): guided
    logits `[1, vocab_size]` after a node by another computation, called where the margin could turn a choice.
    """

    logits: Callable[[slice | Sequence[int]], Floats]
    structure: TreeStructure
    noise: Noise
    cells: Sequence[int]
    sampling: Sampling
    tie_margin: float = 0.0
    recompute: Callable[[int], Floats] | None = None
    last: Ints | None = None
    _choices: dict[int, int] = field(init=False, default_factory=dict)
    _leads: dict[int, float] = field(init=False, default_factory=dict)  # of choices over the next best, if unfiltered
    _recomputed: set[int] = field(init=False, default_factory=set)
    _seen: tuple[int, Floats, Floats | None] = field(init=False)  # what was guessed last: a node, logits, noise
    _distributions: dict[int, Probabilities] = field(init=False, default_factory=dict)
    _chain: Floats | None = field(init=False, default=None)

    def choice(self, node: int) -> int:
        """The token after `node`, as plain decoding would draw it there."""
        code = self.guess(node)
        if self.recompute is None or node in self._recomputed:
            return code
        self._recomputed.add(node)
        if not (self._leads[node] > self.tie_margin if node in self._leads else self._is_clear(node, code)):
            logits = self.recompute(node)
            (code,) = choose(logits, self._gumbel(node, logits), self.sampling).tolist()
            self._choices[node] = code
        return code

    def guess(self, node: int) -> int:
        """The choice, or in a tie perhaps another token: good enough for a draft."""
        if node not in self._choices:
            first, nodes = (0, len(self.structure.depths)) if self.structure.chain else (node, 1)
            guided = self._guided(slice(first, first + nodes))
            noise = self._gumbel(first, guided)
            if self.recompute is None or self.sampling.filtered:
                codes = choose(guided, noise, self.sampling).tolist()
                self._seen = first, guided, noise
            else:
                codes, leads = choose_and_lead(guided, noise, self.sampling)
                self._leads.update(enumerate(leads, first))
            self._choices.update(enumerate(codes, first))
        return self._choices[node]

    def _is_clear(self, node: int, code: int) -> bool:
        first, guided, noise = self._seen
        assert first <= node < first + len(guided), "a node of a tree is chosen at when it was guessed last"
        own = None if noise is None else noise[node - first]
        return is_decisive(guided[node - first], own, code, self.sampling, self.tie_margin)

    def take(self, guided: Floats, noise: Floats | None, codes: Sequence[int], leads: Sequence[float]) -> None:
        """Take in all choices of a chain that were made elsewhere, see `choose_together`."""
        self._chain, self._seen = guided, (0, guided, noise)
        self._choices.update(enumerate(codes))
        self._leads.update(enumerate(leads))

    def draw(self, nodes: Sequence[int]) -> Ints:
        """The choices after some nodes that are no chain, at once."""
        if not all(node in self._choices for node in nodes):
            first, last = nodes[0], nodes[-1]
            together = self.last is None and last - first + 1 == len(nodes)  # read in place then
            guided = guide(self._read(slice(first, last + 1) if together else nodes), self.sampling)
            noise = None
            if not self.sampling.greedy:
                size = guided.shape[1]
                noise = np.concatenate([self.noise.gumbel(self.cells[node], 1, size) for node in nodes])
            self._choices.update(zip(nodes, choose(guided, noise, self.sampling).tolist(), strict=True))
        return np.array([self._choices[node] for node in nodes], np.int64)

    def know(self, nodes: Sequence[int], codes: Ints) -> None:
        """Take in choices after nodes, made where the logits are."""
        self._choices.update(zip(nodes, codes.tolist(), strict=True))

    def distribution(self, node: int) -> Probabilities:
        """The target's distribution after `node`."""
        if node not in self._distributions:
            first, nodes = (0, len(self.structure.depths)) if self.structure.chain else (node, 1)
            found = shape_distribution(self._guided(slice(first, first + nodes)), self.sampling)
            self._distributions.update(enumerate(found, first))
        return self._distributions[node]

    def decisions(self, node: int) -> np.random.Generator:
        """What relaxed acceptance decides with on the children of `node`."""
        return self.noise.decisions(self.cells[node])

    def _gumbel(self, first: int, logits: Floats) -> Floats | None:
        """Noise for `logits [nodes, vocab_size]` after a chain from node `first`; none when greedy."""
        return None if self.sampling.greedy else self.noise.gumbel(self.cells[first], *logits.shape)

    def _read(self, nodes: slice | Sequence[int]) -> Floats:
        return self.logits(nodes if self.last is None else self.last[nodes].tolist())

    def _guided(self, nodes: slice) -> Floats:
        if not self.structure.chain:
            return guide(self._read(nodes), self.sampling)
        if self._chain is None:
            everything = slice(0, len(self.structure.depths))
            self._chain = guide(self._read(everything), self.sampling)
        return self._chain[nodes]


def choose_together(logits: Rows, asked: Iterable[tuple[TargetOutput, slice]]) -> None:
    """Make the choices of neighbours who draft chains of one length with one sampling: at once, which costs less.

    logits: of a pass. asked: requests' answers, and their rows in it.
    """

    def alike(one: tuple[TargetOutput, slice]) -> tuple[int, int, Sampling]:
        answers, rows = one
        nodes = len(answers.structure.depths) if answers.structure.chain and answers.last is None else 0
        return nodes, rows.stop - rows.start, answers.sampling

    for (nodes, sides, sampling), group in groupby(asked, alike):
        neighbours = list(islice(group, MOST_TOGETHER // max(1, nodes)))  # the others choose alone: memory is bounded
        count = len(neighbours)
        if nodes == 0 or count < 2:
            continue
        first, last = neighbours[0][1].start, neighbours[-1][1].stop
        if last - first != count * sides:  # others are between them
            continue
        own = logits[first:last, :nodes]
        guided = guide(own.reshape(count, sides, *own.shape[1:]).swapaxes(0, 1), sampling)
        guided = guided.reshape(count * nodes, -1)
        noise = None  # [requests * nodes, vocab_size], as guided
        if not sampling.greedy:
            each = [one.noise.gumbel(one.cells[0], nodes, guided.shape[1]) for one, _ in neighbours]
            noise = np.concatenate(each)
        leads: list[float] = []  # where filters may turn a choice, each finds out alone
        if sampling.filtered:
            codes = choose(guided, noise, sampling).tolist()
        else:
            codes, leads = choose_and_lead(guided, noise, sampling)
        for i, (one, _) in enumerate(neighbours):
            of = slice(i * nodes, (i + 1) * nodes)
            one.take(guided[of], None if noise is None else noise[of], codes[of], leads[of])
