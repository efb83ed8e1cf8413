"""Filters, which exclude improbable tokens from sampling. A new filter is a function here that `make_filters` returns.

Rounding may move the difference of two logits by up to a margin. So a filter gives two thresholds: it excludes every
logit below the first, and includes every logit above the second. Without rounding, the first is the smallest included
logit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import log
from typing import Any

import numpy as np

from ..methods import Sampling
from .engine import Floats
from .sampling import softmax

# Returns two thresholds for the finite logits `[n]` that the filters before may include, divided by the temperature.
# The further arguments are a threshold above which these filters include every logit, and the margin.
Filter = Callable[[Floats, float, float], tuple[float, float]]
OWN_FILTERS: dict[str, Callable[[Any], Filter]] = {}  # name of a setting of a user -> function that makes its filter


def find_top_k_bounds(k: int, logits: Floats, certain: float, margin: float) -> tuple[float, float]:
    """Include the k largest logits, and every logit that equals the smallest of them."""
    if k >= len(logits):
        return -np.inf, -np.inf
    ordered = np.partition(logits, -k)
    return ordered[-k] - margin, ordered[:-k].max() + margin  # above the largest excluded logit


def find_top_p_bounds(p: float, logits: Floats, certain: float, margin: float) -> tuple[float, float]:
    """Include the largest logits, one after another, until their cumulative probability exceeds p."""
    ascending = np.sort(logits)
    ordered = ascending[::-1]
    last = len(ordered) - 1
    sums = softmax(ordered).cumsum()
    # With rounding, the logits that the filters before include have a total probability of `sure` to 1.
    num_sure = len(ordered) - np.searchsorted(ascending, certain, "right")
    sure = sums[num_sure - 1] if num_sure else 0.0
    within = int(np.searchsorted(sums, (p - margin) * sure, "right"))  # number of sums up to this probability
    beyond = int(np.searchsorted(sums, p + margin, "right"))
    includes_all = within >= last and num_sure > 0
    return ordered[min(beyond, last)] - margin, -np.inf if includes_all else ordered[min(within + 1, last)] + margin


def find_min_p_bounds(min_p: float, logits: Floats, certain: float, margin: float) -> tuple[float, float]:
    """Include the logits whose probability is at least `min_p` times the largest probability."""
    lowest = logits.max() + log(min_p)
    return lowest - margin, lowest + margin


def make_filters(sampling: Sampling) -> list[Filter]:
    """Return the filters in the order in which they are applied; greedy decoding has none."""
    filters: list[Filter] = []
    if sampling.top_k > 0:
        filters.append(partial(find_top_k_bounds, sampling.top_k))
    if sampling.top_p < 1:
        filters.append(partial(find_top_p_bounds, sampling.top_p))
    if sampling.filter_order == "top-p, top-k":
        filters.reverse()
    if sampling.min_p:
        filters.append(partial(find_min_p_bounds, sampling.min_p))
    filters += [OWN_FILTERS[name](value) for name, value in sampling.own_settings.items()]
    return [] if sampling.greedy else filters
