"""What a decode is about: a model, prompts, and sequences with what they have so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..methods import Ar, Drafted, MethodConfig, RowParallel, Sampling, Sjd
from .engine import Bools, Engine, Floats, Ints
from .heads import DraftHeads
from .noise import Noise
from .raster import MAX_BATCH_NODES, Raster
from .statistics import SequenceStatistics
from .tree_names import named_tree
from .windows import AdaptiveWindow

_NOTHING = np.zeros(0, np.int64)


@dataclass(frozen=True)
class DrafterLayout:
    """How drafter slots are laid out; the manifest's `DrafterSpec` explains the fields."""

    position_shift: int = -1
    masks_prefix: bool = True
    prefix_token: int = 0
    code_offset: int = 0


@dataclass(frozen=True)
class Model:
    """Engines and sizes."""

    target: Engine  # engine of the model itself
    drafter: Engine | None  # engine of its EAGLE drafter, None where no method needs one
    codes: int  # of an image
    positions: int  # rows of the rotary table
    layout: DrafterLayout = DrafterLayout()  # of drafter slots
    columns: int = 1  # of the grid of codes
    # the bundle's table of nearest codes, integers `[vocab_size, k]`, None where no method needs it
    neighbors: NDArray[np.integer] | None = None
    # nats by which the difference of two of the target's logits may depend on the pass; 0 leaves ties to
    # whichever pass meets them, see `likelihood.py`
    rounding: float = 0.0
    max_nodes: int = 1 << 20  # of a draft in a pass
    row_end: int | None = None  # token at the end of a row, see `raster.py`
    # what windows draft with, and trees that ask for them; None where no method does
    heads: DraftHeads | None = None

    @property
    def raster(self) -> Raster:
        """How codes of an image stand in its sequence, unless a sequence says otherwise."""
        return Raster(self.codes, self.columns, self.row_end)


@dataclass(frozen=True)
class PrefixRow:
    """One row of a prompt's prefix. Positions count columns, padding included."""

    embeds: Floats  # float32 `[length, hidden_size]`
    real: Bools  # bool `[length]`, False on padding
    # int64 `[length]`, what the drafter reads in the prefix; without them the layout's `prefix_token`
    tokens: Ints | None = None

    def drafter_tokens(self, layout: DrafterLayout) -> Ints:
        """What the drafter's prefix slots read, int64 `[length - 1]`: slot p reads token p + 1."""
        if self.tokens is None:
            return np.full(len(self.embeds) - 1, layout.prefix_token, np.int64)
        return self.tokens[1:]


@dataclass(frozen=True)
class Prompt:
    """Prefix of one sequence: a conditional and an unconditional row, each with a length and padding of its own."""

    cond: PrefixRow
    uncond: PrefixRow
    # codes of the image that are given, -1 in cells that are to be drawn, int64 `[cells]`; None: all are drawn
    preserved: Ints | None = None

    def rows(self, sampling: Sampling) -> list[PrefixRow]:
        """The rows that are decoded: the unconditional one with guidance only."""
        return [self.cond, self.uncond] if sampling.guided else [self.cond]


def method_nodes(method: MethodConfig) -> int:
    """Nodes of a pass over what a method drafts for one image, the root included; 1 where passes differ.

    Raises:
        TypeError: of a method that is not here: a new one must not pass limits unseen.
    """
    if isinstance(method, Drafted):
        return named_tree(method.tree).nodes
    if isinstance(method, Sjd):
        return 1 + method.window
    if isinstance(method, Ar | RowParallel):
        return 1
    raise TypeError(f"method {method.method}: add its nodes of a pass to `method_nodes`")


@dataclass(eq=False)
class ImageSequence:
    """One image to draw, and what it has so far."""

    index: int  # the caller's number
    raster: Raster  # of the image's codes
    rows: Sequence[PrefixRow]  # of its prefix, the conditional one first
    sampling: Sampling  # how distributions are made of logits
    method: MethodConfig
    seed: int  # 0 .. 2^64 - 1
    preserved: Ints | None = None  # as of its prompt
    adaptive: bool = False  # whether the window of an exact `sjd` is an `AdaptiveWindow`
    nodes: int = field(init=False)  # of its draft in the next pass
    noise: Noise = field(init=False)
    codes: list[int] = field(init=False, default_factory=list)  # so far
    tie_margin: float = field(init=False, default=0.0)  # see `likelihood.py`
    statistics: SequenceStatistics = field(init=False, default_factory=SequenceStatistics)

    def __post_init__(self) -> None:
        self.noise = Noise(self.seed)
        self.nodes = method_nodes(self.method)
        adapts = self.adaptive and self.exact and isinstance(self.method, Sjd)
        self._window = AdaptiveWindow(self.nodes - 1) if adapts else None
        if self.preserved is not None:
            self.statistics.preserved = int((self.preserved >= 0).sum())

    @property
    def exact(self) -> bool:
        """Whether the tokens have the target's own distribution."""
        return self.method.exact

    @property
    def window(self) -> int:
        """Tokens that the next draft of `sjd` has at most."""
        return self.nodes - 1

    def adapt_window(self, images: int) -> None:
        """Set the window of the next forward pass, which `images` images share."""
        if self._window is not None:
            self.nodes = 1 + self._window.size(images)

    def record_draft(self, drafted: int, accepted: int) -> None:
        """Count the drafted and the accepted tokens of a forward pass."""
        self.statistics.accepted_per_step.append(accepted)
        if self._window is not None:
            self._window.record(drafted, accepted)

    @property
    def prefixes(self) -> list[int]:
        """Lengths of the prefixes of its rows."""
        return [len(row.embeds) for row in self.rows]

    @property
    def remaining(self) -> int:
        """Codes that the image still needs."""
        return self.raster.codes - len(self.codes)

    def next_preserved(self, ahead: int = 0) -> tuple[Ints, int]:
        """The codes that are preserved next, int64 `[count]`, and after them how many cells are to be drawn in a row.

        ahead: codes that come before those.
        """
        if self.preserved is None:
            return _NOTHING, self.remaining - ahead
        rest = self.preserved[len(self.codes) + ahead :]
        drawn = np.flatnonzero(rest < 0)
        count = int(drawn[0]) if len(drawn) else len(rest)
        after = np.flatnonzero(rest[count:] >= 0)
        return rest[:count], int(after[0]) if len(after) else len(rest) - count

    def tokens_until_preserved(self, ahead: int = 0) -> int:
        """How many cells are to be drawn before the next one that is preserved. ahead: codes that come before them."""
        preserved, drawn = self.next_preserved(ahead)
        return 0 if len(preserved) else drawn

    def append(self, codes: Ints) -> Ints:
        """Add codes, and what is preserved after them if nothing is left to draw; all that were added."""
        self.codes += codes.tolist()
        preserved, _ = self.next_preserved()
        if len(preserved) < self.remaining or not len(preserved):
            return codes
        self.codes += preserved.tolist()
        return np.concatenate([codes, preserved])

    @property
    def columns(self) -> int:
        """Columns of a cache for prefix and image."""
        nodes = MAX_BATCH_NODES if isinstance(self.method, RowParallel) else method_nodes(self.method)
        return max(self.prefixes) + self.raster.tokens + nodes * (1 + (self.raster.row_end is not None)) + 2
