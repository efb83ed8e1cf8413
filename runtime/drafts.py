"""What the decode loop and its sources of drafts share: models, prompts, requests, and the sources' base class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..methods import MethodConfig, Sampling
from .engine import Bools, Engine, Floats, Ints, PassOutput
from .noise import Noise
from .passes import stack_padding
from .sampling import Probabilities, choose, guide, is_clear, shape_distribution
from .statistics import Clock, RequestStatistics
from .tree import DraftTree, TreeStructure


@dataclass(frozen=True)
class DrafterLayout:
    """How drafter slots are laid out; the manifest's `DrafterSpec` explains the fields."""

    position_shift: int = -1
    masks_prefix: bool = True
    prefix_token: int = 0
    code_offset: int = 0


@dataclass(frozen=True)
class Model:
    """Engines and sizes.

    codes: tokens per image. positions: rows of the rotary table. columns: of the token grid. neighbors: the bundle's
    table `[vocab_size, k]`, None where no method needs it. rounding: how far the difference of two of the target's
    logits may depend on the pass, in nats; 0 leaves ties to whichever pass meets them, see `ties.py`.
    """

    target: Engine
    drafter: Engine | None
    codes: int
    positions: int
    layout: DrafterLayout = DrafterLayout()
    columns: int = 1
    neighbors: NDArray[np.integer] | None = None
    rounding: float = 0.0


@dataclass(frozen=True)
class PrefixRow:
    """One row of a prompt's prefix.

    embeds: float32 `[length, hidden_size]`. real: bool `[length]`, False on padding. tokens: int64 `[length]`, what the
    drafter reads in the prefix; without them it reads the layout's `prefix_token` everywhere. Positions count columns,
    padding included.
    """

    embeds: Floats
    real: Bools
    tokens: Ints | None = None

    def drafter_tokens(self, layout: DrafterLayout) -> Ints:
        """What the drafter's prefix slots read, int64 `[length - 1]`: slot p reads token p + 1."""
        if self.tokens is None:
            return np.full(len(self.embeds) - 1, layout.prefix_token, np.int64)
        return self.tokens[1:]


@dataclass(frozen=True)
class Prompt:
    """Prefix of one request: a conditional and an unconditional row, each with a length and padding of its own."""

    cond: PrefixRow
    uncond: PrefixRow


def prefix_rows(prompts: Sequence[Prompt], sampling: Sampling) -> list[PrefixRow]:
    """Rows of a batch: all conditional ones, then, with guidance, all unconditional ones."""
    return [prompt.cond for prompt in prompts] + ([prompt.uncond for prompt in prompts] if sampling.guided else [])


@dataclass
class Request:
    """What one request has so far, and its random numbers."""

    index: int
    noise: Noise
    codes: list[int] = field(init=False, default_factory=list)
    statistics: RequestStatistics = field(init=False, default_factory=RequestStatistics)


@dataclass
class Batch:
    """A running decode. requests: all of them; rows: prefix rows, conditional ones first."""

    model: Model
    sampling: Sampling
    requests: list[Request]
    rows: list[PrefixRow]

    def __post_init__(self) -> None:
        self.target_clock, self.drafter_clock = Clock(), Clock()
        self.sides = len(self.rows) // len(self.requests)
        self.lengths = np.array([len(row.embeds) for row in self.rows])
        self.prefix_padding = stack_padding([~row.real for row in self.rows])  # [rows, longest]

    def capacity(self, most_nodes: int) -> int:
        """Columns a cache needs for prefix, image and a draft of so many nodes."""
        return int(self.lengths.max()) + self.model.codes + most_nodes + 2

    def missing(self, request: Request) -> int:
        """Tokens that a request's image still needs."""
        return self.model.codes - len(request.codes)


@dataclass
class Answers:
    """What the target says after the nodes of one request's tree; computed where it is asked for, of chains at once.

    logits(nodes): those of the request's rows, `[sides, nodes, vocab_size]`. structure: the tree's. position: of the
    token that follows the root. slack: how far rounding may move differences of logits, and settle(node): guided logits
    `[1, vocab_size]` after a node by another computation, asked where the slack could turn a choice.
    """

    logits: Callable[[slice], Floats]
    structure: TreeStructure
    noise: Noise
    position: int
    sampling: Sampling
    slack: float = 0.0
    settle: Callable[[int], Floats] | None = None
    _choices: dict[int, int] = field(init=False, default_factory=dict)
    _seen: dict[int, tuple[Floats, Floats | None]] = field(init=False, default_factory=dict)  # logits, noise
    _settled: set[int] = field(init=False, default_factory=set)
    _distributions: dict[int, Probabilities] = field(init=False, default_factory=dict)
    _chain: Floats | None = field(init=False, default=None)

    def choice(self, node: int) -> int:
        """The token after `node`, as plain decoding would draw it there."""
        code = self.guess(node)
        if self.settle is None or node in self._settled:
            return code
        self._settled.add(node)
        logits, noise = self._seen[node]
        if not is_clear(logits, noise, code, self.sampling, self.slack):
            logits = self.settle(node)
            (code,) = choose(logits, self._gumbel(node, logits), self.sampling).tolist()
            self._choices[node] = code
        return code

    def guess(self, node: int) -> int:
        """The choice, or in a tie perhaps another token: good enough for a draft."""
        if node not in self._choices:
            first, nodes = (0, len(self.structure.depths)) if self.structure.chain else (node, 1)
            guided = self._guided(slice(first, first + nodes))
            noise = self._gumbel(first, guided)
            self._choices.update(enumerate(choose(guided, noise, self.sampling).tolist(), first))
            for i in range(nodes):
                self._seen[first + i] = guided[i], None if noise is None else noise[i]
        return self._choices[node]

    def distribution(self, node: int) -> Probabilities:
        """The target's distribution after `node`."""
        if node not in self._distributions:
            first, nodes = (0, len(self.structure.depths)) if self.structure.chain else (node, 1)
            found = shape_distribution(self._guided(slice(first, first + nodes)), self.sampling)
            self._distributions.update(enumerate(found, first))
        return self._distributions[node]

    def decisions(self, node: int) -> np.random.Generator:
        """What relaxed acceptance decides with on the children of `node`."""
        return self.noise.decisions(self._position(node))

    def _gumbel(self, first: int, logits: Floats) -> Floats | None:
        """Noise for `logits [nodes, vocab_size]` after a chain from node `first`; none when greedy."""
        return None if self.sampling.greedy else self.noise.gumbel(self._position(first), *logits.shape)

    def _position(self, node: int) -> int:
        return self.position + int(self.structure.depths[node])

    def _guided(self, nodes: slice) -> Floats:
        if not self.structure.chain:
            return guide(self.logits(nodes), self.sampling.cfg_scale)
        if self._chain is None:
            self._chain = guide(self.logits(slice(0, len(self.structure.depths))), self.sampling.cfg_scale)
        return self._chain[nodes]


@dataclass(frozen=True)
class Committed:
    """What a pass committed of the active requests.

    tokens: per request, the root of the next draft last. accepted_indices: per row the nodes whose keys and values were
    kept. answers: the target's, per request; none after the prefill.
    """

    tokens: list[Ints]
    accepted_indices: list[Ints]
    output: PassOutput
    answers: list[Answers]


class Drafts:
    """A source of drafts: gives every active request a tree before a pass, is told after every pass what it committed.

    This one, plain decoding's, drafts nothing. nodes: of the largest tree, with the root, that the method in use gives.
    slots: of a cache, that the largest draft of any of the source's methods takes.
    """

    nodes = slots = 1

    def use(self, method: MethodConfig) -> None:
        """Draft as this method says, one of those that the source was made for."""

    def commit(self, active: Sequence[Request], committed: Committed) -> None:
        """Take in what the prefill, or a pass over drafts of this or another source, committed."""

    def draft(self, active: Sequence[Request]) -> list[DraftTree]:
        """A tree for every active request, below its last token."""
        return [DraftTree(np.array(request.codes[-1:], np.int64), np.array([-1], np.int64)) for request in active]

    def keep(self, slots: Sequence[int], rows: Ints) -> None:
        """Go on with these of the active requests, and these rows, only."""
