"""Guidance scales that change within an image."""

from __future__ import annotations

import numpy as np

from ..methods import Sampling
from .engine import Floats
from .raster import Raster


def guidance_scales(sampling: Sampling, raster: Raster) -> Floats | None:
    """Return the guidance scale of every cell, float32 `[num_codes]`; None: `sampling.last_cfg_scale` everywhere.

    With a linear schedule it rises to the last scale (`Sampling.cfg_schedule`). Otherwise, before token t of the image,
    from 0, the scale s becomes max(cfg_final, s (1 - 4 (t + 2) / num_codes)). End-of-row tokens count. The published
    program of Lumina-mGPT 2.0 does so.
    """
    final = sampling.last_cfg_scale
    scale = sampling.cfg_scale
    if sampling.cfg_schedule == "linear":
        share = np.arange(1, raster.num_codes + 1, dtype=np.float32) / raster.num_codes
        return (1 + (final - 1) * share).astype(np.float32)
    if scale <= final:
        return None
    scales = np.full(raster.num_codes, final, np.float32)
    token = 0
    for cell in range(raster.num_codes):
        while token <= raster.position_of(cell):
            scale = max(final, scale * (1 - 4 * (token + 2) / raster.num_codes))
            token += 1
        scales[cell] = scale
    return scales


def scales_of(scales: Floats | None, cells: list[int]) -> Floats | None:
    """Return the guidance scales of some cells, float32 `[cells]`; cells past the image have the last scale."""
    return None if scales is None else scales[np.minimum(cells, len(scales) - 1)]
