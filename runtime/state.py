"""Data of a decode: the loaded model, the prompts, and the image sequences that are being generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..errors import EngineError
from ..methods import MethodConfig, Sampling
from .engine import Bools, Engine, Floats, Ints
from .heads import DraftHeads
from .layout import ImageLayout
from .raster import RasterLayout
from .sampler import Sampler
from .statistics import SequenceStatistics
from .windows import AdaptiveWindow

_NO_CODES = np.zeros(0, np.int64)


@dataclass(frozen=True)
class DrafterLayout:
    """Positions and tokens of an EAGLE drafter's inputs; the manifest's `DrafterSpec` specifies the fields."""

    position_shift: int = -1  # position of a drafter input minus position of its token
    masks_prefix: bool = True  # whether padding in the prefix is masked
    prefix_token: int = 0  # token that the drafter reads in the prefix
    code_offset: int = 0  # token id of code 0 in the drafter's vocabulary


@dataclass(frozen=True)
class LoadedModel:
    """Engines and tables of one model, for images of every size."""

    target: Engine  # runs the target model
    drafter: Engine | None  # runs the EAGLE drafter; None if no method needs a drafter
    num_positions: int  # number of rows of the rotary table
    layout: DrafterLayout = DrafterLayout()
    # Table of the nearest codes of each code, integers `[vocab_size, k]`; None if no method needs the table.
    neighbors: NDArray[np.integer] | None = None
    # Maximum change, in nats, of the difference of two target logits by rounding, between different forward passes.
    # With 0, near-ties (choices that rounding could change) are not recomputed, see `likelihood.py`.
    rounding_bound: float = 0.0
    max_nodes: int = 1 << 20  # maximum number of nodes of a draft
    # Draft heads, which draft without a drafter engine; None if no method needs them.
    heads: DraftHeads | None = None


@dataclass(frozen=True)
class PrefixRow:
    """Tokens of the prompt in one batch row, which come before the image."""

    embeds: Floats  # float32 `[length, hidden_size]`
    is_real_token: Bools  # bool `[length]`, False on padding
    # Tokens that the drafter reads in the prefix, int64 `[length]`; None: `DrafterLayout.prefix_token` everywhere.
    tokens: Ints | None = None
    # Position of each token, int64 `[length]`; None: consecutive positions, padding included, up to the first code.
    positions: Ints | None = None
    first_position: int | None = None  # position of the first code; None: the prefix begins at position 0

    @property
    def first_code_position(self) -> int:
        return len(self.embeds) if self.first_position is None else self.first_position

    def node_positions(self, num_nodes: int) -> Ints:
        """Return the positions of the nodes of a prefill, int64 `[num_nodes]`.

        `num_nodes` is at least the length of the prefix; the output of additional nodes is not used.
        """
        if self.positions is None:
            return self.first_code_position - len(self.embeds) + np.arange(num_nodes)
        return np.pad(self.positions, (0, num_nodes - len(self.positions)), "edge")

    def drafter_tokens(self, layout: DrafterLayout) -> Ints:
        """Return the tokens that the drafter reads in the prefix, int64 `[length - 1]`."""
        # Drafter slot p reads token p + 1, so the first token has no slot.
        if self.tokens is None:
            return np.full(len(self.embeds) - 1, layout.prefix_token, np.int64)
        return self.tokens[1:]


@dataclass(frozen=True)
class Prompt:
    """Prompt of one image, with and without the text, for classifier-free guidance.

    Both rows may differ in length and padding.
    """

    cond: PrefixRow  # conditional row
    uncond: PrefixRow  # unconditional row
    # Preserved codes of the image, -1 in cells to generate, int64 `[cells]`; None: all cells are generated.
    preserved_codes: Ints | None = None

    def rows(self, count: int) -> list[PrefixRow]:
        """Return the conditional row and, if `count` is 2, the unconditional row."""
        return [self.cond, self.uncond][:count]


@dataclass(frozen=True)
class Plan:
    """What the images of one request are decoded by, besides prompts and seeds."""

    layout: ImageLayout
    sampling: Sampling
    method: MethodConfig
    max_nodes: int  # maximum number of nodes of a draft, from `drafters.count_draft_nodes`
    adaptive_window: bool = False  # whether the window adapts, if the method allows it; see `AdaptiveWindow`

    @cached_property
    def sampler(self) -> Sampler:
        return Sampler(self.sampling, self.layout)

    @cached_property
    def raster_layout(self) -> RasterLayout:
        assert isinstance(self.layout, RasterLayout), "requests check that the method fits the bundle"
        return self.layout

    @property
    def num_rows(self) -> int:
        """Number of batch rows of an image at its start; later a guided image may need only one row."""
        return 2 if self.sampling.uses_guidance else 1

    def count_cache_columns(self, prefix_length: int) -> int:
        """Return the number of cache columns for the prefix (padding included), the image and one draft."""
        return prefix_length + self.layout.num_tokens + self.layout.count_max_nodes_per_pass(self.max_nodes) + 2


class ImageSequence:
    """Token sequence of one image that is being generated, with its plan and statistics.

    Args:
        index: number that the caller chose for the image.
        seed: 0 .. 2^64 - 1.
    """

    error: EngineError | None = None  # such as NaN in the logits of this sequence, which ends only this sequence

    def __init__(self, index: int, plan: Plan, prompt: Prompt, seed: int) -> None:
        self.index = index
        self.plan = plan
        self.rows: Sequence[PrefixRow] = prompt.rows(plan.num_rows)  # prefix of each batch row, the conditional first
        self.noise = plan.layout.noise(seed)
        self.codes: list[int] = []  # codes that have been generated or preserved so far, in generation order
        self.statistics = SequenceStatistics()
        self.max_nodes = plan.max_nodes  # maximum number of nodes of the next draft
        adapts = plan.adaptive_window and plan.method.has_flexible_window
        self._window = AdaptiveWindow(plan.max_nodes - 1) if adapts else None
        self.preserved_codes = prompt.preserved_codes  # in generation order
        if self.preserved_codes is not None:
            self.preserved_codes = plan.layout.to_generation_order(self.preserved_codes)
            self.statistics.preserved = int((self.preserved_codes >= 0).sum())

    def end_guidance(self) -> bool:
        """Remove the unconditional row if all guided codes are known; return whether a row was removed."""
        if len(self.rows) == 1 or len(self.codes) < self.plan.sampler.guidance.num_guided_codes:
            return False
        self.rows = self.rows[:1]
        return True

    @property
    def window(self) -> int:
        return self.max_nodes - 1

    def adapt_window(self, num_images: int) -> None:
        """Choose the window for the next forward pass over `num_images` images, if the window is adaptive."""
        if self._window is not None:
            self.max_nodes = 1 + self._window.choose_size(num_images)

    def record_draft(self, num_drafted: int, num_accepted: int) -> None:
        self.statistics.accepted_per_step.append(num_accepted)
        if self._window is not None:
            self._window.record(num_drafted, num_accepted)

    @property
    def num_remaining_codes(self) -> int:
        return self.plan.layout.num_codes - len(self.codes)

    def next_preserved_codes(self, num_skipped: int = 0) -> tuple[Ints, int]:
        """Return the consecutive preserved codes from the next cell on, and the number of cells to generate after them.

        Args:
            num_skipped: number of cells to skip first.

        Returns:
            Preserved codes, int64 `[count]`; empty if the next cell is to be generated. Then the number of cells to
            generate after these codes, up to another preserved cell or the end of the image.
        """
        if self.preserved_codes is None:
            return _NO_CODES, self.num_remaining_codes - num_skipped
        rest = self.preserved_codes[len(self.codes) + num_skipped :]
        generated = np.flatnonzero(rest < 0)
        count = int(generated[0]) if len(generated) else len(rest)
        preserved = np.flatnonzero(rest[count:] >= 0)
        return rest[:count], int(preserved[0]) if len(preserved) else len(rest) - count

    def count_codes_until_preserved(self, num_skipped: int = 0) -> int:
        """Return the number of cells to generate before the next preserved cell."""
        preserved, gap = self.next_preserved_codes(num_skipped)
        return 0 if len(preserved) else gap

    @property
    def num_cache_columns(self) -> int:
        return self.plan.count_cache_columns(max(len(row.embeds) for row in self.rows))
