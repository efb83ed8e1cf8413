"""The order of a bundle in which a pass draws several cells."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

from pydantic import Field, model_validator

from ..methods import FrozenModel

MAX_GROUP = 64  # maximum number of cells of a group: the nodes of one image in a pass
Cell = Annotated[int, Field(ge=0, le=65_535)]
Group = Annotated[tuple[Cell, ...], Field(min_length=1, max_length=MAX_GROUP)]


class OrderSpec(FrozenModel):
    """An order in which an image is drawn in groups of cells, one group in a pass; see `runtime/order.py`.

    Args:
        groups: cells of each group, counted in raster order. The prefill draws the first group, a single cell. Groups
            do not shrink.
        vectors: number of learned vectors, the rows of `code_embeddings` behind the codes. A pass reads the codes of
            the previous group and, if its group has more cells than that, a vector for each further cell.
    """

    groups: Annotated[tuple[Group, ...], Field(min_length=1, max_length=65_536)]
    vectors: Annotated[int, Field(ge=0, lt=MAX_GROUP)] = 0

    @model_validator(mode="after")
    def _groups_fit(self) -> OrderSpec:
        sizes = [len(group) for group in self.groups]
        if sizes[0] != 1:
            raise ValueError(f"the first group has {sizes[0]} cells; expected one, which the prefill draws")
        for before, size in pairwise(sizes):
            if size < before:
                raise ValueError(f"a group of {size} cells follows one of {before}; expected at least as many")
            if size - before > self.vectors:
                needed = f"needs {size - before} learned vectors, but `vectors` is {self.vectors}"
                raise ValueError(f"a group of {size} cells after one of {before} {needed}")
        return self

    def check_cells(self, num_cells: int) -> None:
        """Raise ValueError unless the groups hold every cell of the image once."""
        drawn: set[int] = set()
        for cell in (cell for group in self.groups for cell in group):
            if cell >= num_cells:
                raise ValueError(f"`order` has cell {cell}, but the image has {num_cells} cells")
            if cell in drawn:
                raise ValueError(f"`order` has cell {cell} twice; expected every cell once")
            drawn.add(cell)
        if len(drawn) < num_cells:
            missing = next(cell for cell in range(num_cells) if cell not in drawn)
            raise ValueError(f"`order` lacks cell {missing}; expected every cell once")
