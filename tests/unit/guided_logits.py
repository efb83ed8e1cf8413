"""Sampler of logits, for tests that decode no image."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lantern_rt.methods import Sampling
from lantern_rt.runtime.raster import RasterLayout
from lantern_rt.runtime.sampler import Sampler


def make_sampler(sampling: Sampling, codes: int = 1) -> Sampler:
    return Sampler(sampling, RasterLayout(codes))


def mix_guided_logits(logits: NDArray[Any], sampling: Sampling) -> NDArray[np.float32]:
    """Return guided logits `[codes, vocabulary]` from logits `[1 or 2, codes, vocabulary]`."""
    count = logits.shape[1]
    return make_sampler(sampling, count).guidance.mix_logits(logits, range(count))
