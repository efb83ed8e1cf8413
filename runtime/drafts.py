"""What the scheduler and its sources of drafts share: models, prompts, requests, and the sources' base class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..methods import Drafted, MethodConfig, RowParallel, Sampling, Sjd
from .engine import Bools, Engine, Floats, Ints, Rows, Taken
from .noise import Noise
from .raster import Raster
from .sampling import Probabilities, choose, choose_and_lead, guide, is_clear, shape_distribution
from .statistics import RequestStatistics
from .tree import DraftTree, Front, TreeStructure
from .tree_names import named_tree

MOST_TOGETHER = 256  # nodes whose choices are made at once
MOST_FRONT = 64  # nodes of a pass over several rows of a grid
_ROOT = np.array([-1], np.int64)  # parents of a tree of one node


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

    codes: of an image. positions: rows of the rotary table. columns: of the grid of codes. neighbors: the bundle's
    table `[vocab_size, k]`, None where no method needs it. rounding: how far the difference of two of the target's
    logits may depend on the pass, in nats; 0 leaves ties to whichever pass meets them, see `ties.py`. most_nodes: of a
    draft in a pass. row_end: the token at the end of a row, see `raster.py`.
    """

    target: Engine
    drafter: Engine | None
    codes: int
    positions: int
    layout: DrafterLayout = DrafterLayout()
    columns: int = 1
    neighbors: NDArray[np.integer] | None = None
    rounding: float = 0.0
    most_nodes: int = 1 << 20
    row_end: int | None = None

    @property
    def raster(self) -> Raster:
        """How codes of an image stand in its sequence, unless a request says otherwise."""
        return Raster(self.codes, self.columns, self.row_end)


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

    def rows(self, sampling: Sampling) -> list[PrefixRow]:
        """The rows that are decoded: the unconditional one with guidance only."""
        return [self.cond, self.uncond] if sampling.guided else [self.cond]


def nodes_of(method: MethodConfig) -> int:
    """Nodes of a pass over what a method drafts for one image, the root included."""
    if isinstance(method, Drafted):
        return named_tree(method.tree).nodes
    return 1 + method.window if isinstance(method, Sjd) else 1


@dataclass(eq=False)
class Request:
    """One image to draw, and what it has so far.

    index: the caller's number. raster: of the image's codes. rows: of its prefix, the conditional one first.
    methods: those that it may be drawn by, all exact if there are several. method: the one in use, with `nodes` in
    a pass. seed: 0 .. 2^64 - 1. known: the image's first tokens, of a request that is resumed; exact methods need few
    passes to check them, relaxed ones begin anew. codes: so far; they may run past the image's end. slack: see
    `ties.py`.
    """

    index: int
    raster: Raster
    rows: Sequence[PrefixRow]
    sampling: Sampling
    methods: Sequence[MethodConfig]
    seed: int
    known: Sequence[int] = ()
    method: MethodConfig = field(init=False)
    nodes: int = field(init=False)
    exact: bool = field(init=False)
    noise: Noise = field(init=False)
    guided_tokens: int = field(init=False)
    codes: list[int] = field(init=False, default_factory=list)
    slack: float = field(init=False, default=0.0)
    statistics: RequestStatistics = field(init=False, default_factory=RequestStatistics)

    def __post_init__(self) -> None:
        assert len(self.methods) == 1 or all(method.exact for method in self.methods)
        self.noise, self.guided_tokens = Noise(self.seed), self.sampling.guided_tokens
        self.use(self.methods[0])

    def use(self, method: MethodConfig) -> None:
        """Go on with this method, one of those that the request was made for; between passes."""
        self.method, self.nodes, self.exact = method, nodes_of(method), method.exact

    @property
    def prefixes(self) -> list[int]:
        """Lengths of the prefixes of its rows."""
        return [len(row.embeds) for row in self.rows]

    @property
    def missing(self) -> int:
        """Codes that the image still needs."""
        return max(0, self.raster.codes - len(self.codes))

    @property
    def guidance_ends(self) -> bool:
        """Whether no token that is missing is guided, though some before were."""
        return len(self.rows) > 1 and len(self.codes) >= self.guided_tokens

    @property
    def columns(self) -> int:
        """Columns of a cache for prefix and image, whatever method draws it."""
        fronts = (MOST_FRONT if isinstance(method, RowParallel) else nodes_of(method) for method in self.methods)
        return max(self.prefixes) + self.raster.tokens + max(fronts) * (1 + (self.raster.row_end is not None)) + 2


@dataclass
class Answers:
    """What the target says after the nodes of one request's tree; computed where it is asked for, of chains at once.

    logits(nodes): those of the request's rows, `[sides, nodes, vocab_size]`, after nodes of the pass. structure: the
    tree's. cells: that of the code after each node. last: the pass's node after which it is drawn, if
    not after the node itself. slack: how far rounding may move differences of logits, and settle(node): guided logits
    `[1, vocab_size]` after a node by another computation, asked where the slack could turn a choice.
    """

    logits: Callable[[slice | Sequence[int]], Floats]
    structure: TreeStructure
    noise: Noise
    cells: Sequence[int]
    sampling: Sampling
    slack: float = 0.0
    settle: Callable[[int], Floats] | None = None
    last: Ints | None = None
    _choices: dict[int, int] = field(init=False, default_factory=dict)
    _leads: dict[int, float] = field(init=False, default_factory=dict)  # of choices over the next best, if unfiltered
    _settled: set[int] = field(init=False, default_factory=set)
    _seen: tuple[int, Floats, Floats | None] = field(init=False)  # what was guessed last: a node, logits, noise
    _distributions: dict[int, Probabilities] = field(init=False, default_factory=dict)
    _chain: Floats | None = field(init=False, default=None)

    def choice(self, node: int) -> int:
        """The token after `node`, as plain decoding would draw it there."""
        code = self.guess(node)
        if self.settle is None or node in self._settled:
            return code
        self._settled.add(node)
        if not (self._leads[node] > self.slack if node in self._leads else self._is_clear(node, code)):
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
            if self.settle is None or self.sampling.filtered:
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
        return is_clear(guided[node - first], own, code, self.sampling, self.slack)

    def take(self, guided: Floats, noise: Floats | None, codes: Sequence[int], leads: Sequence[float]) -> None:
        """Take in all choices of a chain that were made elsewhere, see `guess_together`."""
        self._chain, self._seen = guided, (0, guided, noise)
        self._choices.update(enumerate(codes))
        self._leads.update(enumerate(leads))

    def draw(self, nodes: Sequence[int]) -> Ints:
        """The choices after some nodes that are no chain, at once."""
        if not all(node in self._choices for node in nodes):
            first, last = nodes[0], nodes[-1]
            together = self.last is None and last - first + 1 == len(nodes)  # read in place then
            cells = [self.cells[node] for node in nodes]
            guided = guide(self._read(slice(first, last + 1) if together else nodes), self.sampling, cells)
            noise = None
            if not self.sampling.greedy:
                size = guided.shape[1]
                noise = np.concatenate([self.noise.gumbel(cell, 1, size) for cell in cells])
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
            return guide(self._read(nodes), self.sampling, self.cells[nodes])
        if self._chain is None:
            everything = slice(0, len(self.structure.depths))
            self._chain = guide(self._read(everything), self.sampling, self.cells[everything])
        return self._chain[nodes]


def guess_together(logits: Rows, asked: Iterable[tuple[Answers, slice]]) -> None:
    """Make the choices of neighbours who draft chains of one length with one sampling: at once, which costs less.

    logits: of a pass. asked: requests' answers, and their rows in it.
    """

    def alike(one: tuple[Answers, slice]) -> tuple[int, int, Sampling]:
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
        positions = np.array([one.cells for one, _ in neighbours])  # [requests, nodes]
        guided = guide(own.reshape(count, sides, *own.shape[1:]).swapaxes(0, 1), sampling, positions)
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


class Committed(NamedTuple):
    """What a pass committed of one request.

    source: whose draft it was. tokens: the root of the next draft last. nodes: per row those whose keys and values
    were kept. hidden: the target's hidden states at them, per row `[nodes, hidden_size]`, fetched when called
    unless they stay on a device. answers: what the target said.
    """

    request: Request
    source: Drafts
    tokens: Ints
    nodes: list[Ints]
    hidden: Callable[[], list[Floats | Taken]]
    answers: Answers


class Drafts:
    """A source of drafts: gives requests a tree before a pass, is told after every pass what it committed.

    This one, plain decoding's, drafts nothing.
    """

    def commit(self, committed: Sequence[Committed]) -> None:
        """Take in what the prefill, or a pass over drafts of this or another source, committed."""

    def draft(self, requests: Sequence[Request]) -> Sequence[DraftTree | Front]:
        """A tree for every request, below its last token."""
        return [DraftTree(np.array(request.codes[-1:], np.int64), _ROOT) for request in requests]

    def leave(self, requests: Sequence[Request]) -> None:
        """Forget these requests."""


class KnownDrafts(Drafts):
    """Known tokens of requests that are resumed, as chains of at most `most_nodes`.

    They are drafts like any other: tokens that are not the target's choice are refused.
    """

    def __init__(self, most_nodes: int) -> None:
        self.most_nodes = min(most_nodes, 64)

    def draft(self, requests: Sequence[Request]) -> list[DraftTree]:
        """Every request's next known tokens as a chain below its last token."""
        return [self._chain(request) for request in requests]

    def _chain(self, request: Request) -> DraftTree:
        start = len(request.codes)
        known = request.known[start : start + min(self.most_nodes, request.missing) - 1]
        tokens = np.array([request.codes[-1], *known], np.int64)
        return DraftTree(tokens, np.arange(len(tokens), dtype=np.int64) - 1)
