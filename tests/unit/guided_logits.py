"""Classifier-free guidance of logits, for tests that decode no image."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lantern_rt.methods import Sampling
from lantern_rt.runtime.guidance import Guidance
from lantern_rt.runtime.raster import RasterLayout


def mix_guided_logits(logits: NDArray[Any], sampling: Sampling) -> NDArray[np.float32]:
    """Return guided logits `[codes, vocabulary]` of an image.

    Args:
        logits: conditional and, if guided, unconditional logits, `[1 or 2, codes, vocabulary]`.
    """
    count = logits.shape[1]
    return Guidance(sampling, RasterLayout(count)).mix_logits(logits, range(count))
