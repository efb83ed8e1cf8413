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
    part_committed     int64 [parts]       codes that the image got of it
    part_bonus         int64 [parts]       the code drawn after the accepted path; -1 if there is none
    tree_offsets       int64 [parts + 1]   empty trees: the prefill, and every step of method ar
    tree_tokens        int64 [nodes]       code of each node; the root is the last code committed before
    tree_parents       int64 [nodes]       parent of each node within its tree, -1 for the root
    path_offsets       int64 [parts + 1]
    path_nodes         int64 [accepted]    accepted nodes within the tree, from the root (0) on
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from ..runtime.decode import Step

Ints = NDArray[np.int64]

FORMAT = 1
_EMPTY = np.zeros(0, np.int64)
_CELL = 16  # pixels
_ACROSS, _LEGEND_WIDTH = 8, 24  # images in a row, least width of the picture in cells
_ANCHORS = np.array([(38, 34, 98), (33, 105, 150), (40, 165, 130), (150, 205, 70), (250, 225, 60)])  # none .. most
_MISSING, _PAPER = (220, 220, 220), (255, 255, 255)


class TraceStep(NamedTuple):
    """What one step did to one image. tree_tokens, tree_parents and path are empty where nothing was drafted."""

    step: int
    image: int
    codes: Ints
    tree_tokens: Ints
    tree_parents: Ints
    path: Ints


@dataclass
class Trace:
    """Collects the steps of one decode; `rows x columns` is the code grid."""

    rows: int
    columns: int
    parts: list[TraceStep] = field(default_factory=list)
    steps: int = 0

    def add(self, step: Step) -> None:
        """Record a step; keeps trees and paths, not the distributions in it."""
        for part in step.parts:
            tokens, parents = (_EMPTY, _EMPTY) if part.tree is None else (part.tree.tokens, part.tree.parents)
            path = _EMPTY if part.acceptance is None else np.array(part.acceptance.path, np.int64)
            self.parts.append(TraceStep(self.steps, part.request, part.codes, tokens, parents, path))
        self.steps += 1

    def npz_bytes(self) -> bytes:
        """The file described above."""
        trees, paths = [part.tree_tokens for part in self.parts], [part.path for part in self.parts]
        arrays: dict[str, Any] = {
            "format": FORMAT,
            "grid": [self.rows, self.columns],
            "codes": self._cells(lambda part: part.codes),
            "part_step": [part.step for part in self.parts],
            "part_image": [part.image for part in self.parts],
            "part_committed": [len(part.codes) for part in self.parts],
            "part_bonus": [part.codes[-1] if len(part.codes) >= max(len(part.path), 1) else -1 for part in self.parts],
            "tree_offsets": np.cumsum([0, *map(len, trees)]),
            "tree_tokens": np.concatenate([_EMPTY, *trees]),
            "tree_parents": np.concatenate([_EMPTY, *(part.tree_parents for part in self.parts)]),
            "path_offsets": np.cumsum([0, *map(len, paths)]),
            "path_nodes": np.concatenate([_EMPTY, *paths]),
        }
        buffer = BytesIO()
        int64: dict[str, Any] = {name: np.array(values, np.int64) for name, values in arrays.items()}
        np.savez_compressed(buffer, **int64)
        return buffer.getvalue()

    def accepted_per_cell(self) -> Ints:
        """Per cell, the drafted codes accepted by the pass that committed it, int64 `[images, cells]`."""
        return self._cells(lambda part: max(len(part.path) - 1, 0))

    def picture(self) -> Image.Image:
        """The code grids side by side, at most eight in a row, above a legend; all on a grid of one border a cell."""
        cells = self.accepted_per_cell()
        most = max(int(cells.max(initial=0)), 1)
        steps = np.linspace(0, len(_ANCHORS) - 1, most + 1)
        shades = [np.interp(steps, range(len(_ANCHORS)), channel) for channel in _ANCHORS.T]
        colours = np.array([*np.rint(np.stack(shades, 1)), _PAPER, _MISSING], np.uint8)  # -1 is missing, -2 paper
        height, width = self.rows + 1, self.columns + 1
        top = 2 + height * -(-len(cells) // _ACROSS)  # of the legend
        legend = np.arange(most + 1)
        across = max(1 + width * min(len(cells), _ACROSS), _LEGEND_WIDTH)
        line, column = np.divmod(3 * legend, across // 3 * 3 - 3)
        canvas = np.full((top + line[-1] + 2, across), -2)
        for i, values in enumerate(cells):
            y, x = 1 + i // _ACROSS * height, 1 + i % _ACROSS * width
            canvas[y : y + self.rows, x : x + self.columns] = values.reshape(self.rows, self.columns)
        canvas[top + line, 1 + column] = legend
        pixels = colours[canvas].repeat(_CELL, 0).repeat(_CELL, 1)
        pixels[::_CELL], pixels[:, ::_CELL] = _PAPER, _PAPER
        picture = Image.fromarray(pixels)
        draw, font = ImageDraw.Draw(picture), ImageFont.load_default()
        title = "drafted codes accepted by the pass that made each cell"
        draw.text((_CELL, (top - 1) * _CELL), title, "black", font)
        for value, y, x in zip(legend, top + line, 2 + column, strict=True):
            draw.text((x * _CELL + 4, y * _CELL + 2), f"{value}", "black", font)
        return picture

    def _cells(self, value: Callable[[TraceStep], Ints | int]) -> Ints:
        """A value of the parts laid out over the cells they filled, `[images, cells]`; -1 elsewhere."""
        images = 1 + max((part.image for part in self.parts), default=-1)
        cells, filled = np.full((images, self.rows * self.columns), -1, np.int64), [0] * images
        for part in self.parts:
            start = filled[part.image]
            filled[part.image] += len(part.codes)
            cells[part.image, start : filled[part.image]] = value(part)
        return cells
