"""Traces of decoding: every draft tree, the accepted path in it, and an image that summarizes them.

`Trace` collects the steps of decoding. `Trace.encode_npz` returns all data. `Trace.render_image` draws the grid: the
colour of a cell shows how many draft tokens were accepted by the forward pass that generated the cell.

In the .npz file a *part* is the effect of one step on one image, in order of time. Lists of different lengths are
concatenated: entry i of a list is `values[offsets[i] : offsets[i + 1]]`.

    format             int64 []            1
    grid               int64 [2]           rows and columns of the grid
    codes              int64 [images, rows * columns]; -1 where decoding was cancelled
    part_step          int64 [parts]       number of the step; 0 is the prefill
    part_image         int64 [parts]       number of the image
    part_committed     int64 [parts]       number of tokens committed to the image
    part_bonus         int64 [parts]       token sampled after the accepted path; -1 if there is none
    part_seconds       float64 [parts]     duration of the step, the caller's work included
    tree_offsets       int64 [parts + 1]   empty trees: the prefill, and every step of method ar
    tree_tokens        int64 [nodes]       token of each node; the root is the last token committed before
    tree_parents       int64 [nodes]       parent of each node within its tree, -1 for the root
    path_offsets       int64 [parts + 1]
    path_nodes         int64 [accepted]    accepted nodes within the tree, starting with the root (0)
    path_relaxed       bool [accepted]     whether exact acceptance would have rejected the node
    path_p             float64 [accepted]  the target's probability of the node's token; NaN if it was not read
    path_q             float64 [accepted]  probability with which the drafter sampled the node's token, without its
                                           earlier siblings; NaN for the root, 1 if acceptance does not read it
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from ..runtime.decode import DecodeStep
from ..runtime.tree import DraftTree

Ints = NDArray[np.int64]

FORMAT = 1
_EMPTY = np.zeros(0, np.int64)
_CELL = 16  # Width and height of a cell in pixels.
_GRIDS_PER_ROW = 8
_MIN_WIDTH = 24  # Minimum width of the rendered image in cells, for the legend.
_COLOURS = np.array([(38, 34, 98), (33, 105, 150), (40, 165, 130), (150, 205, 70), (250, 225, 60)])  # min .. max
_MISSING = (220, 220, 220)
_PAPER = (255, 255, 255)


class TraceStep(NamedTuple):
    """Effect of one decoding step on one image. Tree and path are empty if the step had no draft.

    Args:
        codes: tokens that the step added to the image.
        tree_tokens: token of each node of the draft tree.
        tree_parents: parent of each node; -1 for the root.
        accepted_path: accepted nodes, starting with the root.
        relaxed_flags: for each accepted node, whether exact acceptance would have rejected it.
        target_probs: the target's probability of each accepted node's token.
        draft_probs: the drafter's probability of each accepted node's token.
    """

    step_index: int
    image_index: int
    codes: Ints
    tree_tokens: Ints
    tree_parents: Ints
    accepted_path: Ints
    relaxed_flags: list[bool]
    target_probs: list[float]
    draft_probs: list[float]
    seconds: float


@dataclass
class Trace:
    """Collection of the steps of decoding, `trace_steps`, of images with the same grid."""

    grid_rows: int
    grid_columns: int
    trace_steps: list[TraceStep] = field(default_factory=list)
    num_steps: int = 0
    _last_step_time: float = field(init=False, default_factory=time.perf_counter)

    def add_step(self, step: DecodeStep) -> None:
        """Record the draft trees and accepted paths of a decoding step, without whole probability distributions."""
        now = time.perf_counter()
        seconds = now - self._last_step_time
        self._last_step_time = now
        for part in step.parts:
            path: list[int] = [] if part.acceptance is None else part.acceptance.path
            target_p = () if part.acceptance is None else part.acceptance.target_probabilities
            self.trace_steps.append(
                TraceStep(
                    self.num_steps,
                    part.sequence,
                    part.codes,
                    _EMPTY if part.tree is None else part.tree.tokens,
                    _EMPTY if part.tree is None else part.tree.parents,
                    np.array(path, np.int64),
                    [part.acceptance is not None and node in part.acceptance.relaxed_nodes for node in path],
                    [float("nan")] * (len(path) - len(target_p)) + [*target_p],
                    [
                        float("nan") if part.tree is None else _compute_sampling_probability(part.tree, node)
                        for node in path
                    ],
                    seconds,
                )
            )
        self.num_steps += 1

    def encode_npz(self) -> bytes:
        """Return the .npz file that the module's docstring describes."""
        trees = [part.tree_tokens for part in self.trace_steps]
        paths = [part.accepted_path for part in self.trace_steps]
        arrays: dict[str, Any] = {
            "format": FORMAT,
            "grid": [self.grid_rows, self.grid_columns],
            "codes": self._fill_cells(lambda part: part.codes),
            "part_step": [part.step_index for part in self.trace_steps],
            "part_image": [part.image_index for part in self.trace_steps],
            "part_committed": [len(part.codes) for part in self.trace_steps],
            "part_bonus": [
                part.codes[-1] if len(part.codes) >= max(len(part.accepted_path), 1) else -1
                for part in self.trace_steps
            ],
            "tree_offsets": np.cumsum([0, *map(len, trees)]),
            "tree_tokens": np.concatenate([_EMPTY, *trees]),
            "tree_parents": np.concatenate([_EMPTY, *(part.tree_parents for part in self.trace_steps)]),
            "path_offsets": np.cumsum([0, *map(len, paths)]),
            "path_nodes": np.concatenate([_EMPTY, *paths]),
        }
        int64: dict[str, Any] = {name: np.array(values, np.int64) for name, values in arrays.items()}
        measured: dict[str, Any] = {
            "part_seconds": np.array([part.seconds for part in self.trace_steps], np.float64),
            "path_relaxed": np.array(
                [relaxed_flags for part in self.trace_steps for relaxed_flags in part.relaxed_flags], np.bool_
            ),
            "path_p": np.array(
                [target_probs for part in self.trace_steps for target_probs in part.target_probs], np.float64
            ),
            "path_q": np.array(
                [draft_probs for part in self.trace_steps for draft_probs in part.draft_probs], np.float64
            ),
        }
        buffer = BytesIO()
        np.savez_compressed(buffer, **int64, **measured)
        return buffer.getvalue()

    def count_accepted_tokens_per_cell(self) -> Ints:
        """Return, for each cell, how many draft tokens the pass that generated the cell accepted.

        The result is an int64 array `[images, cells]`, with -1 in cells without a token.
        """
        return self._fill_cells(lambda part: max(len(part.accepted_path) - 1, 0))

    def render_image(self) -> Image.Image:
        """Draw the grids of all images, at most eight in a row, and a legend of the colours below."""
        cells = self.count_accepted_tokens_per_cell()
        largest = max(int(cells.max(initial=0)), 1)
        steps = np.linspace(0, len(_COLOURS) - 1, largest + 1)
        shades = [np.interp(steps, range(len(_COLOURS)), channel) for channel in _COLOURS.T]
        colours = np.array(
            [*np.rint(np.stack(shades, 1)), _PAPER, _MISSING], np.uint8
        )  # Index -1 is missing, -2 paper.
        height = self.grid_rows + 1
        width = self.grid_columns + 1
        legend_row = 2 + height * -(-len(cells) // _GRIDS_PER_ROW)
        legend = np.arange(largest + 1)
        total_width = max(1 + width * min(len(cells), _GRIDS_PER_ROW), _MIN_WIDTH)
        line, column = np.divmod(3 * legend, total_width // 3 * 3 - 3)
        canvas = np.full((legend_row + line[-1] + 2, total_width), -2)
        for i, values in enumerate(cells):
            y = 1 + i // _GRIDS_PER_ROW * height
            x = 1 + i % _GRIDS_PER_ROW * width
            canvas[y : y + self.grid_rows, x : x + self.grid_columns] = values.reshape(
                self.grid_rows, self.grid_columns
            )
        canvas[legend_row + line, 1 + column] = legend
        pixels = colours[canvas].repeat(_CELL, 0).repeat(_CELL, 1)
        pixels[::_CELL] = _PAPER  # Lines between cells.
        pixels[:, ::_CELL] = _PAPER
        image = Image.fromarray(pixels)
        draw = ImageDraw.Draw(image)
        font = ImageFont.load_default()
        title = "draft tokens accepted by the pass that committed each cell"
        draw.text((_CELL, (legend_row - 1) * _CELL), title, "black", font)
        for value, y, x in zip(legend, legend_row + line, 2 + column, strict=True):
            draw.text((x * _CELL + 4, y * _CELL + 2), f"{value}", "black", font)
        return image

    def _fill_cells(self, get_value: Callable[[TraceStep], Ints | int]) -> Ints:
        """Return `[images, cells]` with the value (or values) of each step in the cells that it filled, else -1."""
        images = 1 + max((part.image_index for part in self.trace_steps), default=-1)
        cells = np.full((images, self.grid_rows * self.grid_columns), -1, np.int64)
        committed = [0] * images
        for part in self.trace_steps:
            start = committed[part.image_index]
            committed[part.image_index] += len(part.codes)
            cells[part.image_index, start : committed[part.image_index]] = get_value(part)
        return cells


def _compute_sampling_probability(tree: DraftTree, node: int) -> float:
    """Return the probability with which the drafter sampled a node's token, given the node's earlier siblings."""
    parent = int(tree.parents[node])
    if parent < 0:
        return float("nan")
    q = tree.proposal(parent)
    if q is None:
        return 1.0
    siblings = tree.tree_structure.children[parent]
    before = sum(float(q[tree.tokens[sibling]]) for sibling in siblings[: siblings.index(node)])
    return float(q[tree.tokens[node]]) / (1 - before)
