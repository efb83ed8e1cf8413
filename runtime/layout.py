"""The layout of an image: the order in which its codes are generated, and the nodes of forward passes over codes.

Codes count from 0 in generation order; cells count from 0 in raster order. Code that depends on the kind of an
image asks its layout. `raster.py` has layouts of images whose codes are generated one after another. `groups.py` has
layouts of images that are generated in groups of cells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from .engine import Bools, DeviceArray, Floats, Ints
from .noise import Noise

CellValues = TypeVar("CellValues", bound=NDArray[Any])


class CodesWithCells(NamedTuple):
    """Codes sampled in a forward pass and their cells, both int64 `[count]`; without end-of-row tokens."""

    cells: Ints
    codes: Ints


@dataclass(eq=False)
class PassLayout:
    """The nodes of one sequence in a forward pass. Here the nodes of the pass are the nodes of the draft."""

    # whether the nodes of the pass are the nodes of the draft, and each token is sampled from the logits of one node
    nodes_match_draft: ClassVar[bool] = True

    tokens: Ints  # int64 `[pass nodes]`
    positions: Ints  # positions counted from the first token of the image, int64 `[pass nodes]`
    ancestor_mask: Bools  # whether the column node is the row node or comes before it, bool `[pass nodes, pass nodes]`

    def logits(self, logits: DeviceArray, rows: slice, nodes: slice | Sequence[int]) -> Floats:
        """Return the logits that the tokens after draft nodes are sampled from, float32 `[rows, nodes, vocab_size]`.

        Args:
            logits: logits of the pass, float32 `[rows, pass nodes, vocab_size]`.
            rows: batch rows of the sequence.
        """
        read: Floats = logits[rows, nodes]
        return read

    def find_sampling_nodes(self, nodes: Ints) -> Ints:
        """Return the pass nodes after which the tokens of draft nodes `[...]` are sampled, int64 `[...]`."""
        return nodes

    def find_path_nodes(self, path: Sequence[int]) -> Ints:
        """Return the pass nodes of the draft nodes `path`, end-of-row tokens included."""
        return np.array(path, np.int64)

    def find_hidden_state_nodes(self, committed_nodes: Ints, count: int) -> Ints:
        """Return the pass nodes from whose hidden states the last `count` tokens are sampled, int64 `[count]`.

        Args:
            committed_nodes: pass nodes that were committed, int64 `[committed_nodes]`.
            count: number of committed tokens, without end-of-row tokens.
        """
        return committed_nodes[-count:]

    def mask_cached_tokens(self, attention_mask: Bools) -> None:
        """Remove entries from an attention mask over the tokens of the image in the cache; here none.

        Args:
            attention_mask: mask to change, bool `[pass nodes, entries]`.
        """


class ImageLayout(Protocol):
    """Layout of the codes of one image."""

    @property
    def num_codes(self) -> int:
        """Number of codes."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the cache, end-of-row tokens included."""

    def noise(self, seed: int) -> Noise:
        """Return the noise of an image, whose positions count codes."""

    def to_generation_order(self, values: CellValues) -> CellValues:
        """Return values of cells `[cells]` in the order in which the cells are generated."""

    def place_codes(self, codes: Sequence[int], num_known_before: int) -> tuple[Ints, CodesWithCells | None]:
        """Return the cells that new codes fill.

        Args:
            codes: codes that are known now, in generation order.
            num_known_before: number of codes that were known before.

        Returns:
            Codes of the cells up to the first gap, without the cells up to the first gap before, int64 `[count]`. Then
            all new codes with their cells; None if these are the same codes.
        """

    def codes_sampled_together(self, code_index: int) -> range:
        """Return the codes that are sampled together with a code, itself included; they do not depend on each other."""

    def token_position(self, code_index: int) -> int:
        """Return the position of a code's token, from 0 at the first token; drafts may extend past the last code."""

    def lay_out_prefix_end(self) -> PassLayout:
        """Return the layout of the last node of a prefix, after which the first code is sampled."""

    def lay_out_known_codes(self, codes: Ints, max_nodes: int) -> Iterator[PassLayout]:
        """Yield passes over known codes, after which the logits of later codes are known, in generation order.

        Args:
            codes: known codes from the first, int64 `[count]`.
            max_nodes: maximum number of nodes of a pass; a pass has at least one group of codes.
        """

    def max_pass_nodes(self, num_draft_nodes: int) -> int:
        """Return the maximum number of pass nodes of a draft with this number of nodes."""
