"""Guidance of an image: which codes it leads, and by which scale."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..methods import Sampling
from .engine import Floats, Ints
from .layout import ImageLayout
from .sampling import apply_guidance


class Guidance:
    """Guidance of the codes of one image, the first in generation order; later codes are sampled without.

    Args:
        sampling: settings with the scale, its schedule, and the number of guided codes.

    Attributes:
        num_guided: number of guided codes.
    """

    def __init__(self, sampling: Sampling, layout: ImageLayout) -> None:
        self.num_guided = sampling.count_guided(layout.num_codes)
        self._scales = _compute_scales(sampling, layout)

    def count_rows(self, code: int) -> int:
        """Return how many batch rows the distribution of a code depends on: 2 with guidance, else 1."""
        return 2 if code < self.num_guided else 1

    def scales(self, codes: Sequence[int] | Ints) -> Floats:
        """Return the scales of some codes, float32 `[codes]`; codes past the image have the last scale."""
        return self._scales[np.minimum(codes, len(self._scales) - 1)]

    def mix(self, logits: Floats, codes: Sequence[int] | Ints) -> Floats:
        """Mix the conditional and unconditional logits of guided codes, and return the conditional logits of others.

        Args:
            logits: logits, or other outputs of the target, float32 `[1 or 2, codes, size]`, the conditional row first.
            codes: code that is sampled from each.

        Returns:
            Float32 `[codes, size]`.
        """
        if len(logits) == 1:
            conditional: Floats = logits[0]
            return conditional
        codes = np.asarray(codes)
        mixed = apply_guidance(logits, self.scales(codes))
        guided = codes < self.num_guided
        return mixed if guided.all() else np.where(guided[:, None], mixed, logits[0])


def _compute_scales(sampling: Sampling, layout: ImageLayout) -> Floats:
    """Return the guidance scale of every code, float32 `[num_codes]`.

    With a linear schedule it rises to the last scale (`Sampling.cfg_schedule`). Otherwise, before token t of the image,
    from 0, the scale s becomes max(cfg_final, s (1 - 4 (t + 2) / num_codes)). End-of-row tokens count. The published
    program of Lumina-mGPT 2.0 does so.
    """
    final = sampling.last_cfg_scale
    scale = sampling.cfg_scale
    num_codes = layout.num_codes
    if sampling.cfg_schedule == "linear":
        share = np.arange(1, num_codes + 1, dtype=np.float32) / num_codes
        return (1 + (final - 1) * share).astype(np.float32)
    scales = np.full(num_codes, final, np.float32)
    token = 0
    for code in range(num_codes if scale > final else 0):
        while token <= layout.position(code):
            scale = max(final, scale * (1 - 4 * (token + 2) / num_codes))
            token += 1
        scales[code] = scale
    return scales
