"""Data of a decode: the model, the prompts, and the image sequences being generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..errors import EngineError
from ..methods import MethodConfig, RelaxedMethod, Sampling, SpeculativeJacobi
from .engine import Bools, Engine, Floats, Ints
from .guidance import Guidance
from .heads import DraftHeads
from .layout import ImageLayout
from .noise import Noise
from .raster import RasterLayout
from .statistics import SequenceStatistics
from .windows import AdaptiveWindow

_NO_CODES = np.zeros(0, np.int64)


@dataclass(frozen=True)
class DrafterLayout:
    """Layout of drafter slots; the manifest's `DrafterSpec` explains the fields."""

    position_shift: int = -1
    masks_prefix: bool = True
    prefix_token: int = 0
    code_offset: int = 0


@dataclass(frozen=True)
class LoadedModel:
    """Engines and tables of one model, for images of every size."""

    target: Engine  # runs the target model
    drafter: Engine | None  # runs the EAGLE drafter, None where no method needs a drafter
    num_positions: int  # number of rows of the rotary table
    layout: DrafterLayout = DrafterLayout()
    # table of nearest codes, integers `[vocab_size, k]`, None where no method needs the table
    neighbors: NDArray[np.integer] | None = None
    # Bound, in nats, on how far rounding may change the difference of two target logits between forward passes.
    # With 0, near-ties are not recomputed, see `likelihood.py`.
    rounding_bound: float = 0.0
    max_nodes: int = 1 << 20  # maximum number of nodes of a draft
    # draft heads for windows and for trees of draft heads, None where no method needs them
    heads: DraftHeads | None = None


@dataclass(frozen=True)
class PrefixRow:
    """Prefix of a prompt in one batch row."""

    embeds: Floats  # float32 `[length, hidden_size]`
    is_real_token: Bools  # bool `[length]`, False on padding
    # tokens that the drafter reads in the prefix, int64 `[length]`; None: the layout's `prefix_token` everywhere
    tokens: Ints | None = None
    # position of each column, int64 `[length]`; None: consecutive positions, padding included, up to the first code
    positions: Ints | None = None
    first_position: int | None = None  # position of the first code; None: the prefix begins at position 0

    @property
    def first_code_position(self) -> int:
        """Position of the first code."""
        return len(self.embeds) if self.first_position is None else self.first_position

    def node_positions(self, num_nodes: int) -> Ints:
        """Return the positions of a prefill's nodes, int64 `[num_nodes]`; nodes behind the prefix are not used."""
        if self.positions is None:
            return self.first_code_position - len(self.embeds) + np.arange(num_nodes)
        return np.pad(self.positions, (0, num_nodes - len(self.positions)), "edge")

    def drafter_tokens(self, layout: DrafterLayout) -> Ints:
        """Return the tokens of the drafter's prefix slots, int64 `[length - 1]`: slot p reads token p + 1."""
        if self.tokens is None:
            return np.full(len(self.embeds) - 1, layout.prefix_token, np.int64)
        return self.tokens[1:]


@dataclass(frozen=True)
class Prompt:
    """Prefix of one sequence: a conditional and an unconditional row, whose lengths and padding may differ."""

    cond: PrefixRow
    uncond: PrefixRow
    # preserved codes of the image, -1 in cells to generate, int64 `[cells]`; None: all cells are generated
    preserved_codes: Ints | None = None

    def rows(self, count: int) -> list[PrefixRow]:
        """Return the rows to decode: the conditional row and, with guidance, the unconditional row.

        Args:
            count: 1, or 2 with guidance.
        """
        return [self.cond, self.uncond][:count]


@dataclass(frozen=True)
class DecodeSettings:
    """Settings and layout of the images of one request: everything but prompts and seeds."""

    layout: ImageLayout
    sampling: Sampling
    method: MethodConfig
    max_nodes: int  # maximum number of nodes of a draft, `drafters.count_draft_nodes`
    adaptive_window: bool = False  # whether the window of an exact `sjd` is an `AdaptiveWindow`

    @property
    def num_rows(self) -> int:
        """Number of batch rows of an image, at least at its start."""
        return 2 if self.sampling.uses_guidance else 1

    def count_cache_columns(self, prefix_length: int) -> int:
        """Return the number of cache columns for the prefix, the image and one draft.

        Args:
            prefix_length: number of columns of the prefix.
        """
        return prefix_length + self.layout.num_tokens + self.layout.max_pass_nodes(self.max_nodes) + 2


@dataclass(eq=False)
class ImageSequence:
    """Sequence of the tokens of an image being generated."""

    index: int  # number of the image, chosen by the caller
    plan: DecodeSettings
    prompt: Prompt
    seed: int  # 0 .. 2^64 - 1
    rows: Sequence[PrefixRow] = field(init=False)  # prefix rows, the conditional row first
    preserved_codes: Ints | None = field(init=False)  # see `Prompt`, but in generation order
    max_nodes: int = field(init=False)  # maximum number of nodes of the next draft
    guidance: Guidance = field(init=False)
    noise: Noise = field(init=False)
    # codes generated or preserved so far, in generation order
    codes: list[int] = field(init=False, default_factory=list)
    rounding_margin: float = field(init=False, default=0.0)  # see `likelihood.py`
    statistics: SequenceStatistics = field(init=False, default_factory=SequenceStatistics)
    error: EngineError | None = field(init=False, default=None)  # error in its logits, which ends this sequence alone

    def __post_init__(self) -> None:
        plan = self.plan
        self.layout = plan.layout
        self.sampling = plan.sampling
        self.method = plan.method
        self.exact = plan.method.exact  # whether the tokens follow the target's distribution exactly
        self.relaxed = isinstance(plan.method, RelaxedMethod) and not self.exact  # `rows` is neither
        self.greedy = plan.sampling.greedy
        self.rows = self.prompt.rows(plan.num_rows)
        self.noise = plan.layout.noise(self.seed)
        self.guidance = Guidance(plan.sampling, plan.layout)
        self.max_nodes = plan.max_nodes
        adapts = plan.adaptive_window and self.exact and isinstance(plan.method, SpeculativeJacobi)
        self._window = AdaptiveWindow(plan.max_nodes - 1) if adapts else None
        self.preserved_codes = self.prompt.preserved_codes
        if self.preserved_codes is not None:
            self.preserved_codes = plan.layout.to_generation_order(self.preserved_codes)
            self.statistics.preserved = int((self.preserved_codes >= 0).sum())

    @property
    def raster_layout(self) -> RasterLayout:
        """Layout of an image whose codes are generated one after another."""
        assert isinstance(self.layout, RasterLayout), "requests check that the method fits the bundle"
        return self.layout

    def end_guidance(self) -> bool:
        """Remove the unconditional row once all guided codes are known; return whether it was removed."""
        if len(self.rows) == 1 or len(self.codes) < self.guidance.num_guided_codes:
            return False
        self.rows = self.rows[:1]
        return True

    @property
    def window(self) -> int:
        """Maximum number of tokens of the next `sjd` draft."""
        return self.max_nodes - 1

    def adapt_window(self, num_images: int) -> None:
        """Set the window of the next forward pass over `num_images` images."""
        if self._window is not None:
            self.max_nodes = 1 + self._window.choose_size(num_images)

    def record_draft(self, num_drafted: int, num_accepted: int) -> None:
        """Record how many tokens of a forward pass were drafted and accepted."""
        self.statistics.accepted_per_step.append(num_accepted)
        if self._window is not None:
            self._window.record(num_drafted, num_accepted)

    @property
    def num_remaining_codes(self) -> int:
        """Number of codes still to generate or to insert as preserved."""
        return self.layout.num_codes - len(self.codes)

    def next_preserved_codes(self, num_skipped: int = 0) -> tuple[Ints, int]:
        """Return the run of preserved codes at the next cell, and the length of the gap after the run.

        Args:
            num_skipped: number of cells to skip before the run.

        Returns:
            Preserved codes, int64 `[count]`, empty if the cell is to be generated; number of cells to generate
            between the run and the next preserved cell.
        """
        if self.preserved_codes is None:
            return _NO_CODES, self.num_remaining_codes - num_skipped
        rest = self.preserved_codes[len(self.codes) + num_skipped :]
        generated = np.flatnonzero(rest < 0)
        count = int(generated[0]) if len(generated) else len(rest)
        preserved = np.flatnonzero(rest[count:] >= 0)
        return rest[:count], int(preserved[0]) if len(preserved) else len(rest) - count

    def count_codes_until_preserved(self, num_skipped: int = 0) -> int:
        """Return the number of cells to generate before the next preserved cell, after skipping `num_skipped` cells."""
        if self.preserved_codes is None:
            return self.num_remaining_codes - num_skipped
        preserved, gap = self.next_preserved_codes(num_skipped)
        return 0 if len(preserved) else gap

    def append_codes(self, codes: Ints) -> None:
        """Append codes; if only preserved codes remain, append these, too."""
        self.codes += codes.tolist()
        if self.preserved_codes is not None:
            preserved, _ = self.next_preserved_codes()
            if len(preserved) == self.num_remaining_codes:
                self.codes += preserved.tolist()

    @property
    def num_cache_columns(self) -> int:
        """Number of cache columns for the prefix, the image and one draft."""
        return self.plan.count_cache_columns(max(len(row.embeds) for row in self.rows))
