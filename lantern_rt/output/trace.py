"""A record of how images were decoded: every draft tree, what was accepted of it, and a picture of it all.

`Trace` collects the steps of a decode; `npz_bytes` holds everything, `picture` shows the code grid, each
cell coloured by how many drafted codes were accepted in the pass that committed it.

The .npz file, where a *part* is what one step did to one image, in order of time, and ragged lists are
flattened: entry i of a list is `values[offsets[i] : offsets[i + 1]]`.

    format             int64 []            1
    grid               int64 [2]           rows and columns of the code grid
    codes              int64 [images, rows * columns]; -1 where decoding was cancelled
    part_step          int64 [parts]       which step; 0 is the prefill
    part_image         int64 [parts]       which image
    part_committed     int64 [parts]       codes that the image kept of it (the last step may overshoot)
    part_bonus         int64 [parts]       the code drawn after the accepted path
    tree_offsets       int64 [parts + 1]   empty trees: the prefill, and every step of method ar
    tree_tokens        int64 [nodes]       code of each node; the root is the last code committed before
    tree_parents       int64 [nodes]       parent of each node within its tree, -1 for the root
    path_offsets       int64 [parts + 1]
    path_nodes         int64 [accepted]    accepted nodes within the tree, from the root (0) on
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from ..runtime.decode import Step

Ints = NDArray[np.int64]

FORMAT = 1
_EMPTY = np.zeros(0, np.int64)
_CELL, _MARGIN, _LINE = 16, 12, 18  # pixels
_PAPER, _INK, _MISSING = (255, 255, 255), (30, 30, 30), (220, 220, 220)
_ANCHORS = np.array([(38, 34, 98), (33, 105, 150), (40, 165, 130), (150, 205, 70), (250, 225, 60)], np.float64)


@dataclass(frozen=True)
class Part:
    """What one step did to one image. tree_tokens, tree_parents and path are empty where nothing was drafted."""

    step: int
    image: int
    codes: Ints
    committed: int
    tree_tokens: Ints
    tree_parents: Ints
    path: Ints

    @property
    def accepted(self) -> int:
        """Drafted codes that were accepted; the bonus is not one of them."""
        return max(len(self.path) - 1, 0)


@dataclass
class Trace:
    """Collects the steps of one decode; `rows x columns` is the code grid."""

    rows: int
    columns: int
    parts: list[Part] = field(default_factory=list)
    steps: int = 0

    def add(self, step: Step) -> None:
        """Record a step; keeps trees and paths, not the distributions in it."""
        for part in step.parts:
            tree, acceptance = part.tree, part.acceptance
            self.parts.append(
                Part(
                    self.steps,
                    part.request,
                    part.codes,
                    part.committed,
                    _EMPTY if tree is None else tree.tokens,
                    _EMPTY if tree is None else tree.parents,
                    _EMPTY if acceptance is None else np.array(acceptance.path, np.int64),
                )
            )
        self.steps += 1

    @property
    def images(self) -> int:
        """How many images there are."""
        return 1 + max((part.image for part in self.parts), default=-1)

    def npz_bytes(self) -> bytes:
        """The file described above."""
        arrays: dict[str, Any] = {"format": np.int64(FORMAT), "grid": np.array([self.rows, self.columns], np.int64)}
        arrays["codes"] = self._cells(lambda part: part.codes[: part.committed])
        values = {
            "step": [part.step for part in self.parts],
            "image": [part.image for part in self.parts],
            "committed": [part.committed for part in self.parts],
            "bonus": [part.codes[-1] for part in self.parts],
        }
        arrays |= {f"part_{name}": np.array(each, np.int64) for name, each in values.items()}
        trees, paths = [part.tree_tokens for part in self.parts], [part.path for part in self.parts]
        arrays |= {"tree_offsets": _offsets(trees), "tree_tokens": np.concatenate([_EMPTY, *trees])}
        arrays["tree_parents"] = np.concatenate([_EMPTY, *(part.tree_parents for part in self.parts)])
        arrays |= {"path_offsets": _offsets(paths), "path_nodes": np.concatenate([_EMPTY, *paths])}
        buffer = BytesIO()
        np.savez_compressed(buffer, **arrays)
        return buffer.getvalue()

    def accepted_per_cell(self) -> Ints:
        """Per cell, the drafted codes accepted by the pass that committed it, int64 `[images, cells]`."""
        return self._cells(lambda part: part.accepted)

    def picture(self) -> Image.Image:
        """The code grids side by side, at most eight in a row, above a legend."""
        cells = self.accepted_per_cell()
        most = max(int(cells.max(initial=0)), 1)
        across = min(len(cells), 8)
        step_x, step_y = self.columns * _CELL + _MARGIN, self.rows * _CELL + _MARGIN
        width = max(_MARGIN + across * step_x, 2 * _MARGIN + 340)
        a_line = (width - 2 * _MARGIN) // 40  # entries of the legend
        top = _MARGIN + -(-len(cells) // max(across, 1)) * step_y
        picture = Image.new("RGB", (width, top + (1 - (-(most + 1) // a_line)) * _LINE + _MARGIN), _PAPER)
        for i, values in enumerate(cells):
            at = (_MARGIN + i % across * step_x, _MARGIN + i // across * step_y)
            picture.paste(_grid(values.reshape(self.rows, self.columns), most), at)
        draw, font = ImageDraw.Draw(picture), ImageFont.load_default()
        draw.text((_MARGIN, top), "drafted codes accepted by the pass that made each cell", _INK, font)
        for value in range(most + 1):
            x, y = _MARGIN + 40 * (value % a_line), top + (1 + value // a_line) * _LINE
            draw.rectangle((x, y, x + 12, y + 12), _colour(value, most), _INK)
            draw.text((x + 17, y + 1), f"{value}", _INK, font)
        return picture

    def _cells(self, value: Callable[[Part], Ints | int]) -> Ints:
        """A value of the parts laid out over the cells they filled, `[images, cells]`; -1 elsewhere."""
        cells = np.full((self.images, self.rows * self.columns), -1, np.int64)
        filled = [0] * self.images
        for part in self.parts:
            start = filled[part.image]
            filled[part.image] += part.committed
            cells[part.image, start : filled[part.image]] = value(part)
        return cells


def _offsets(lists: Sequence[Ints]) -> Ints:
    return np.cumsum([0, *map(len, lists)], dtype=np.int64)


def _grid(values: Ints, most: int) -> Image.Image:
    """One code grid, a square per cell with a thin border."""
    colours = np.array([*(_colour(n, most) for n in range(most + 1)), _MISSING], np.uint8)
    pixels = colours[values].repeat(_CELL, 0).repeat(_CELL, 1)
    pixels[::_CELL], pixels[:, ::_CELL] = _PAPER, _PAPER
    return Image.fromarray(pixels)


def _colour(value: int, most: int) -> tuple[int, int, int]:
    """Dark blue for 0 to yellow for `most`."""
    place = value / most * (len(_ANCHORS) - 1)
    low = min(int(place), len(_ANCHORS) - 2)
    red, green, blue = _ANCHORS[low] + (place - low) * (_ANCHORS[low + 1] - _ANCHORS[low])
    return round(red), round(green), round(blue)
