"""Guidance of logits for tests that have no image."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lantern_rt.methods import Sampling
from lantern_rt.runtime.guidance import Guidance
from lantern_rt.runtime.raster import RasterLayout


def guide(logits: NDArray[Any], sampling: Sampling) -> NDArray[np.float32]:
    """Mix logits `[1 or 2, codes, vocabulary]` of an image of `codes` tokens; the conditional row is first."""
    count = logits.shape[1]
    return Guidance(sampling, RasterLayout(count)).mix_logits(logits, range(count))
