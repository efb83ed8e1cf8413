"""Small shared pieces of a pass: what committed columns are visible, and the timed call."""

from __future__ import annotations

import time

import numpy as np

from .engine import Bools, Cache, Engine, Ints, Pass, PassOutput
from .statistics import CallClock


def committed_mask(lengths: Ints, hidden_columns: Bools, span: int) -> Bools:
    """Which cache columns hold visible committed entries, bool `[rows, span]`.

    `lengths [rows]` entries are committed; `hidden_columns [rows, prefix]` marks padded prefix columns.
    """
    visible: Bools = np.arange(span) < lengths[:, None]
    prefix = min(hidden_columns.shape[1], span)
    visible[:, :prefix] &= ~hidden_columns[:, :prefix]
    return visible


def run_pass(engine: Engine, batch: Pass, cache: Cache, clock: CallClock) -> PassOutput:
    """Run one pass and count it."""
    start = time.perf_counter()
    output = engine.run(batch, cache)
    clock.calls += 1
    clock.seconds += time.perf_counter() - start
    return output
