"""The layout of an image: the order in which its codes are generated, and the nodes of forward passes over codes.

A code index counts codes from 0 in generation order. A cell index counts cells of the grid from 0 in raster order.
`raster.py` has the layouts of images whose codes are generated one after another. `groups.py` has the layouts of images
that are generated in groups of cells. The decode loop uses both through `ImageLayout`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from .engine import Bools, DeviceArray, Floats, Ints
from .noise import Noise

CellValues = TypeVar("CellValues", bound=NDArray[Any])


class CodesWithCells(NamedTuple):
    """Codes that one forward pass sampled, and the cells of these codes; end-of-row tokens are not included."""

    cells: Ints  # cell of each code, int64 `[count]`
    codes: Ints  # int64 `[count]`


@dataclass(eq=False)
class PassLayout:
    """Nodes of one sequence in a forward pass.

    In this base class, the pass nodes are the nodes of the draft. A subclass may add pass nodes.
    """

    # Whether the pass nodes are the nodes of the draft, and each token is sampled from the logits of a single node.
    nodes_match_draft: ClassVar[bool] = True

    tokens: Ints  # token of each node, int64 `[pass nodes]`
    positions: Ints  # positions counted from the first token of the image, int64 `[pass nodes]`
    # Attention mask among the nodes: row node attends to column node, bool `[pass nodes, pass nodes]`.
    ancestor_mask: Bools
    # Whether each node attends to each cached token of the image, bool `[pass nodes, cached tokens]`; None: to all.
    past_mask: Bools | None = field(default=None, kw_only=True)

    def logits(self, logits: DeviceArray, rows: slice, nodes: slice | Sequence[int]) -> Floats:
        """Return the logits from which the tokens after draft nodes are sampled, `[rows, nodes, vocab_size]`."""
        read: Floats = logits[rows, nodes]
        return read

    def find_sampling_nodes(self, nodes: Ints) -> Ints:
        """Return the pass nodes after which the tokens of draft nodes `[...]` are sampled, int64 `[...]`."""
        return nodes

    def find_path_nodes(self, path: Sequence[int]) -> Ints:
        """Return the pass nodes of the draft nodes `path`, end-of-row tokens included."""
        return np.array(path, np.int64)

    def find_hidden_state_nodes(self, committed_nodes: Ints, count: int) -> Ints:
        """Of the committed pass nodes, return those after which the last `count` codes were sampled."""
        return committed_nodes[-count:]


class ImageLayout(Protocol):
    """Interface of a layout: order and positions of the codes of one image."""

    @property
    def num_codes(self) -> int:
        """Number of codes of the image."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the cache, end-of-row tokens included."""

    def noise(self, seed: int) -> Noise:
        """Return the random numbers of the image with the given seed; a position is a code index."""

    def to_generation_order(self, values: CellValues) -> CellValues:
        """Return values of cells `[cells]` in the order in which the cells are generated."""

    def place_codes(self, codes: Sequence[int], num_before: int) -> tuple[Ints, CodesWithCells | None]:
        """Return the new codes in raster order up to the first unknown cell, and all new codes with their cells.

        Args:
            codes: all codes that are known now, in generation order.
            num_before: number of codes that were known before.

        Returns:
            Codes of consecutive cells, int64 `[count]`: from the first cell that was unknown before, up to the
            first cell that is unknown now. Then all new codes with their cells; None if these would be the same codes.
        """

    def find_codes_sampled_together(self, code_index: int) -> range:
        """Return the indices of all codes that are sampled together with a code, this code included.

        Codes that are sampled together do not depend on each other.
        """

    def find_token_position(self, code_index: int) -> int:
        """Return the position of a code's token, from 0 at the first token; drafts may extend past the last code."""

    def lay_out_prefix_end(self) -> PassLayout:
        """Return the layout of the last node of a prefix, after which the first code is sampled."""

    def lay_out_known_codes(self, codes: Ints, max_nodes: int) -> Iterator[PassLayout]:
        """Yield the layouts of passes over known codes, which compute the logits of later codes in generation order.

        Args:
            codes: known codes from the first, int64 `[count]`.
            max_nodes: maximum number of nodes of a pass; a pass has at least one group of codes.
        """

    def count_max_nodes_per_pass(self, num_draft_nodes: int) -> int:
        """Return the maximum number of pass nodes of a draft with this number of nodes."""
