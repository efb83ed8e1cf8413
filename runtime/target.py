"""What a target pass says after the nodes of a sequence's draft: its choices and its distributions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice

import numpy as np

from ..methods import Sampling
from .engine import DeviceArray, Floats, Ints
from .noise import Noise
from .sampling import Probabilities, choose, choose_with_margin, guide, is_decisive, penalise, shape_distribution
from .tree import TreeStructure

MAX_BLOCK_NODES = 256  # nodes whose choices are made at once


@dataclass(slots=True)
class LogitBlock:
    """Consecutive nodes that are looked at together: all of a chain, one of a tree."""

    first: int  # the first of them
    logits: Floats  # guided, `[nodes, vocab_size]`
    noise: Floats | None = None  # that choices were made with, `[nodes, vocab_size]`; None before, and when greedy
    # how far each choice is ahead of the next best; empty before, and where filters may turn a choice
    leads: Sequence[float] = ()


@dataclass
class TargetOutput:
    """What the target says after the nodes of one sequence's draft; computed when it is asked for."""

    # gives those of the sequence's rows after nodes of the pass, `[sides, nodes, vocab_size]`
    logits: Callable[[slice | Sequence[int]], Floats]
    structure: TreeStructure  # the draft's
    noise: Noise  # the sequence's
    cells: Sequence[int]  # of the code after each node
    sampling: Sampling  # the sequence's
    tie_margin: float = 0.0  # how far rounding may move differences of logits
    # gives guided logits `[1, vocab_size]` after a node by another computation, asked where the margin could turn
    # a choice; None where ties stay as they are
    recompute: Callable[[int], Floats] | None = None
    # gives the codes before the choice after a node, for a repetition penalty
    preceding_codes: Callable[[int], Ints] = lambda node: np.empty(0, np.int64)
    # the pass's node after which each node's choice is drawn, if not after the node itself, int64 `[nodes]`
    sampling_nodes: Ints | None = None
    _block: LogitBlock | None = field(init=False, default=None)  # looked at last
    _choices: dict[int, int] = field(init=False, default_factory=dict)
    _distributions: dict[int, Probabilities] = field(init=False, default_factory=dict)

    def choice(self, node: int) -> int:
        """The token after `node`, as plain decoding would draw it there. A tie costs a pass every time."""
        code = self.choice_without_recompute(node)
        if self.recompute is None or self._is_decisive(node, code):
            return code
        logits = self.recompute(node)
        code = int(choose(logits, self._gumbel(node, logits), self.sampling)[0])
        self._choices[node] = code
        return code

    def choice_without_recompute(self, node: int) -> int:
        """The choice, or in a tie perhaps another token: good enough for a draft."""
        if node not in self._choices:
            block = self._block_at(node)
            block.noise = self._gumbel(block.first, block.logits)
            if self.recompute is None or self.sampling.filtered:
                codes = choose(block.logits, block.noise, self.sampling).tolist()
            else:
                codes, block.leads = choose_with_margin(block.logits, block.noise, self.sampling)
            self._choices.update(enumerate(codes, block.first))
        return self._choices[node]

    def guided_logits(self, node: int) -> Floats:
        """Guided logits after `node`, `[vocab_size]`."""
        block = self._block_at(node)
        guided: Floats = block.logits[node - block.first]
        return guided

    def distribution(self, node: int) -> Probabilities:
        """The target's distribution after `node`, float64 `[vocab_size]`."""
        if node not in self._distributions:
            block = self._block_at(node)
            self._distributions.update(enumerate(shape_distribution(block.logits, self.sampling), block.first))
        return self._distributions[node]

    def decisions(self, node: int) -> np.random.Generator:
        """What relaxed acceptance decides with on the children of `node`."""
        return self.noise.decisions(self.cells[node])

    def sample(self, nodes: Sequence[int]) -> Ints:
        """The choices after some nodes that are no chain, at once, int64 `[nodes]`."""
        if not all(node in self._choices for node in nodes):
            in_place = self.sampling_nodes is None and nodes[-1] - nodes[0] + 1 == len(nodes)
            guided = guide(self._read(slice(nodes[0], nodes[-1] + 1) if in_place else nodes), self.sampling)
            noise = None
            if not self.sampling.greedy:
                size = guided.shape[1]
                noise = np.concatenate([self.noise.gumbel(self.cells[node], 1, size) for node in nodes])
            self.store_choices(nodes, choose(guided, noise, self.sampling))
        return np.array([self._choices[node] for node in nodes], np.int64)

    def store_choices(self, nodes: Sequence[int], codes: Ints, block: LogitBlock | None = None) -> None:
        """Take in choices after nodes that were made elsewhere, and what they were made of."""
        self._choices.update(zip(nodes, codes.tolist(), strict=True))
        self._block = block

    def _is_decisive(self, node: int, code: int) -> bool:
        block = self._block_at(node)
        place = node - block.first
        if len(block.leads):
            return block.leads[place] > self.tie_margin
        assert block.noise is not None or self.sampling.greedy, "a node of a tree is chosen at when it was guessed last"
        noise = None if block.noise is None else block.noise[place]
        return is_decisive(block.logits[place], noise, code, self.sampling, self.tie_margin)

    def _block_at(self, node: int) -> LogitBlock:
        block = self._block
        if block is None or not block.first <= node < block.first + len(block.logits):
            first, nodes = (0, len(self.structure.depths)) if self.structure.is_chain else (node, 1)
            block = self._block = LogitBlock(first, guide(self._read(slice(first, first + nodes)), self.sampling))
        return block

    def _gumbel(self, first: int, logits: Floats) -> Floats | None:
        return None if self.sampling.greedy else self.noise.gumbel(self.cells[first], *logits.shape)

    def _read(self, nodes: slice | Sequence[int]) -> Floats:
        logits = self.logits(nodes if self.sampling_nodes is None else self.sampling_nodes[nodes].tolist())
        if not self.sampling.penalised:
            return logits
        places = range(len(self.structure.depths))[nodes] if isinstance(nodes, slice) else nodes
        return penalise(logits, [self.preceding_codes(node) for node in places], self.sampling)


def choose_for_sequences(logits: DeviceArray, targets: Iterable[tuple[TargetOutput, slice]]) -> None:
    """Make the choices of neighbours who draft chains of one length with one sampling: at once, which costs less.

    Args:
        logits: of a pass, `[rows, nodes, vocab_size]`.
        targets: outputs of several sequences, each with its rows in the pass.
    """
    for (nodes, sides, sampling), group in groupby(targets, _shape):
        neighbours = list(islice(group, MAX_BLOCK_NODES // max(1, nodes)))  # the others choose alone: memory is bounded
        count = len(neighbours)
        first, last = neighbours[0][1].start, neighbours[-1][1].stop
        if nodes == 0 or count < 2 or last - first != count * sides:  # the last: others are between them
            continue
        own = logits[first:last, :nodes].reshape(count, sides, nodes, -1).swapaxes(0, 1)
        guided = guide(own, sampling).reshape(count * nodes, -1)
        noise = None  # [sequences * nodes, vocab_size], as guided
        if not sampling.greedy:
            noise = np.concatenate([one.noise.gumbel(one.cells[0], nodes, guided.shape[1]) for one, _ in neighbours])
        leads: list[float] = []  # where filters may turn a choice, each finds out alone
        if sampling.filtered:
            codes = choose(guided, noise, sampling)
        else:
            chosen, leads = choose_with_margin(guided, noise, sampling)
            codes = np.array(chosen, np.int64)
        for i, (one, _) in enumerate(neighbours):
            part = slice(i * nodes, (i + 1) * nodes)
            block = LogitBlock(0, guided[part], None if noise is None else noise[part], leads[part])
            one.store_choices(range(nodes), codes[part], block)


def _shape(target: tuple[TargetOutput, slice]) -> tuple[int, int, Sampling]:
    """Nodes of a chain (0: it is none), rows, and sampling: those of one shape may choose together."""
    output, rows = target
    chain = output.structure.is_chain and output.sampling_nodes is None and not output.sampling.penalised
    return len(output.structure.depths) if chain else 0, rows.stop - rows.start, output.sampling
