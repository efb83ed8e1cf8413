"""Traces of decoding: every draft tree, and the accepted path in it, as an .npz file.

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
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..runtime.decode import DecodeStep
from ..runtime.tree import DraftTree

Ints = NDArray[np.int64]

FORMAT = 1
_EMPTY = np.zeros(0, np.int64)


class TraceStep(NamedTuple):
    """Effect of one decoding step on one image. Tree and path are empty if the step had no draft."""

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
            "codes": self._collect_codes(),
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
            "path_relaxed": np.array([flag for part in self.trace_steps for flag in part.relaxed_flags], np.bool_),
            "path_p": np.array([p for part in self.trace_steps for p in part.target_probs], np.float64),
            "path_q": np.array([q for part in self.trace_steps for q in part.draft_probs], np.float64),
        }
        buffer = BytesIO()
        np.savez_compressed(buffer, **int64, **measured)
        return buffer.getvalue()

    def _collect_codes(self) -> Ints:
        """Return the codes of each image, `[images, cells]`, -1 in cells without a code."""
        images = 1 + max((part.image_index for part in self.trace_steps), default=-1)
        cells = np.full((images, self.grid_rows * self.grid_columns), -1, np.int64)
        committed = [0] * images
        for part in self.trace_steps:
            start = committed[part.image_index]
            committed[part.image_index] += len(part.codes)
            cells[part.image_index, start : committed[part.image_index]] = part.codes
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
