"""Manifest entry for models that sample several cells of the grid in one forward pass (PAR, NAR)."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

from pydantic import Field, model_validator

from ..methods import FrozenModel
from ..runtime.groups import GroupLayout, TwoHeadLayout
from ..runtime.layout import ImageLayout

MAX_GROUP = 64  # maximum number of cells of a group, which are the nodes of one image in a forward pass
Cell = Annotated[int, Field(ge=0, le=65_535)]
Group = Annotated[tuple[Cell, ...], Field(min_length=1, max_length=MAX_GROUP)]


class GroupOrderSpec(FrozenModel):
    """Groups of cells that are sampled together, one group per forward pass (`runtime/groups.py`).

    The first group has a single cell, which the prefill samples. No group is smaller than the previous group, except
    with two heads.
    """

    groups: Annotated[tuple[Group, ...], Field(min_length=1, max_length=65_536)]
    vectors: Annotated[int, Field(ge=0, lt=MAX_GROUP)] = 0
    two_heads: bool = False

    @model_validator(mode="after")
    def _check_groups(self) -> GroupOrderSpec:
        sizes = [len(group) for group in self.groups]
        if sizes[0] != 1:
            raise ValueError(f"the first group has {sizes[0]} cells; expected one cell, which the prefill samples")
        if self.two_heads and self.vectors:
            raise ValueError(f"`vectors` is {self.vectors}, but `two_heads` needs no learned vectors")
        for before, size in pairwise([] if self.two_heads else sizes):
            if size < before:
                raise ValueError(f"a group of {size} cells follows a group of {before} cells; groups may not shrink")
            if size - before > self.vectors:
                needed = f"needs {size - before} learned vectors, but `vectors` is {self.vectors}"
                raise ValueError(f"a group of {size} cells after a group of {before} {needed}")
        return self

    def layout(self, codebook_size: int, columns: int) -> ImageLayout:
        if self.two_heads:
            return TwoHeadLayout(self.groups, codebook_size, columns)
        return GroupLayout(self.groups, codebook_size)

    def check_covers_all_cells(self, num_cells: int, columns: int) -> None:
        """Raise ValueError unless the groups contain every cell of the image once.

        With two heads, the neighbours of a cell must be in the group before the cell's group.
        """
        seen: set[int] = set()
        for cell in (cell for group in self.groups for cell in group):
            if cell >= num_cells:
                raise ValueError(f"`order` has cell {cell}, but the image has {num_cells} cells")
            if cell in seen:
                raise ValueError(f"`order` has cell {cell} twice; expected every cell once")
            seen.add(cell)
        if len(seen) < num_cells:
            missing = next(cell for cell in range(num_cells) if cell not in seen)
            raise ValueError(f"`order` lacks cell {missing}; expected every cell once")
        for before, group in pairwise(self.groups if self.two_heads else ()):
            for cell in group:
                for neighbour in list_left_and_upper_neighbors(cell, columns) or [cell]:
                    if neighbour not in before:
                        problem = f"`order` samples cell {cell} from logits after cell {neighbour}"
                        raise ValueError(f"{problem}, which is not in the previous group")


def list_left_and_upper_neighbors(cell: int, columns: int) -> list[int]:
    return [cell - 1] * (cell % columns > 0) + [cell - columns] * (cell >= columns)
