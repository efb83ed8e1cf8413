"""A source of drafts as the golden runs used it: fed with recorded hidden states, without a target."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lantern_rt.methods import Lantern, Sampling
from lantern_rt.runtime.drafter import EagleDrafter
from lantern_rt.runtime.drafting import Commit
from lantern_rt.runtime.engine import Engine
from lantern_rt.runtime.grid import Raster
from lantern_rt.runtime.state import DrafterLayout, Model, PrefixRow, Request
from lantern_rt.runtime.statistics import Clock
from lantern_rt.runtime.tree import DraftTree

Ids = NDArray[np.int64]


class OpenDrafts(EagleDrafter):
    """Drafts of one request, `only`."""

    only: Request


def open_drafts(
    engine: Engine,
    positions: int,
    tree: str,
    sampling: Sampling,
    prefix: list[NDArray[np.int64]],
    layout: DrafterLayout,
) -> OpenDrafts:
    """Drafts of one request; `prefix`: token ids of its conditional and unconditional row."""
    no_target: Any = None
    model = Model(no_target, engine, codes=100, positions=positions, layout=layout)
    rows = [PrefixRow(np.zeros((len(ids), 1), np.float32), np.ones(len(ids), bool), ids) for ids in prefix]
    request = Request(0, Raster(100), rows, sampling, [Lantern(tree=tree)], seed=0)
    drafts = OpenDrafts(model, request.methods, Clock())
    drafts.only = request
    return drafts


def next_draft(drafts: OpenDrafts, tokens: NDArray[np.int64], hidden: list[NDArray[np.float32]]) -> DraftTree:
    """The tree after `tokens` were committed, given the rows' hidden states at their positions."""
    nothing: Any = None
    drafts.commit([Commit(drafts.only, tokens, [], lambda: hidden, nothing)])
    (tree,) = drafts.draft([drafts.only])
    return tree
