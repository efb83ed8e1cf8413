"""Acceptance statistics and costs made up for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from lantern_rt.methods import MethodConfig, Sjd
from lantern_rt.planning.acceptance_statistics import MethodStatistics, WindowTokens
from lantern_rt.planning.costs import HostCosts
from lantern_rt.planning.store import Situation
from lantern_rt.tuning.acceptance_counts import DEPTHS, RANKS

SITUATION = Situation(backend="onnxruntime-cpu", threads=1, images=1, greedy=False, quality="balanced")
CHEAP = HostCosts({2: 1.0, 64: 1.0}, {2: 0.01, 64: 0.01})  # nodes are free
DEAR = HostCosts({2: 1.0, 3: 2.0, 64: 63.0}, {2: 1.0, 64: 1.0})


def falling_rates(first: float) -> np.ndarray:
    rates = np.zeros((DEPTHS, RANKS))
    rates[:5, :4] = first * 0.6 ** np.arange(4)
    return rates


def statistics_of(method: MethodConfig, first: float = 0.5, **fields: Any) -> MethodStatistics:
    """An entry whose first child is accepted with chance `first`; windows of sjd give more by as much."""
    given: dict[str, Any] = {"tvd_per_token": 0.0, "nll_ratio": 1.0, "nll_error": 0.0, "images": 4, "greedy": False}
    if isinstance(method, Sjd):
        given["windows"] = tuple(WindowTokens(window=w, tokens=1 + n * first) for w, n in ((3, 1), (7, 2)))
    else:
        given["acceptance_rates"] = tuple(map(tuple, falling_rates(first).tolist()))
    return MethodStatistics(method=method, **{**given, **fields})


def windows_of(tokens: dict[int, float]) -> MethodStatistics:
    """An entry of `sjd` with these tokens per forward pass by window."""
    return statistics_of(Sjd(), windows=tuple(WindowTokens(window=w, tokens=n) for w, n in tokens.items()))
