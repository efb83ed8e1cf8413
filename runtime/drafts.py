"""What the decode loop and its sources of drafts share: models, prompts, requests, and the sources' base class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..methods import Sampling
from .engine import Bools, Engine, Floats, Ints, PassOutput
from .passes import stack_padding
from .sampling import Probabilities
from .statistics import Clock, RequestStatistics
from .tree import DraftTree


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
    table `[vocab_size, k]`, None where no method needs it.
    """

    target: Engine
    drafter: Engine | None
    codes: int
    positions: int
    layout: DrafterLayout = DrafterLayout()
    columns: int = 1
    neighbors: NDArray[np.integer] | None = None


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
    """What one request has so far, and its random streams: neither the batch nor another stream's draws move them."""

    index: int
    draft_rng: np.random.Generator  # proposes children
    accept_rng: np.random.Generator  # decides on them
    residual_rng: np.random.Generator  # draws what is left
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


@dataclass(frozen=True)
class Committed:
    """What a pass committed of the active requests.

    tokens: per request, the root of the next draft last. accepted_indices: per row the nodes whose keys and values were
    kept. distribution(slot, node): the target's after a node of the slot-th active request.
    """

    tokens: list[Ints]
    accepted_indices: list[Ints]
    output: PassOutput
    distribution: Callable[[int, int], Probabilities]


class Drafts:
    """A source of drafts: gives every active request a tree before a pass, is told after it what it committed.

    This one, plain decoding's, drafts nothing. nodes: of the largest tree, with the root. slots: a draft's in a cache.
    """

    nodes = slots = 1

    def commit(self, active: Sequence[Request], committed: Committed) -> None:
        """Take in what the prefill, or a pass over the last drafts, committed."""

    def draft(self, active: Sequence[Request]) -> list[DraftTree]:
        """A tree for every active request, below its last token."""
        return [DraftTree(np.array(request.codes[-1:], np.int64), np.array([-1], np.int64)) for request in active]

    def keep(self, slots: Sequence[int], rows: Ints) -> None:
        """Go on with these of the active requests, and these rows, only."""
