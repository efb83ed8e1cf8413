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
        num_guided_codes: number of guided codes.
    """

    def __init__(self, sampling: Sampling, layout: ImageLayout) -> None:
        self.num_guided_codes = sampling.count_guided_tokens(layout.num_codes)
        self._scales = _compute_scales(sampling, layout)

    def count_batch_rows(self, code_index: int) -> int:
        """Return how many batch rows the distribution of a code depends on: 2 with guidance, else 1."""
        return 2 if code_index < self.num_guided_codes else 1

    def scales(self, code_indices: Sequence[int] | Ints) -> Floats:
        """Return the scales of some codes, float32 `[code_indices]`; codes past the image have the last scale."""
        return self._scales[np.minimum(code_indices, len(self._scales) - 1)]

    def mix_logits(self, logits: Floats, code_indices: Sequence[int] | Ints) -> Floats:
        """Mix the conditional and unconditional logits of guided codes, and return the conditional logits of others.

        Args:
            logits: logits, or other outputs of the target, float32 `[1 or 2, code_indices, size]`, the conditional row
                first.
            code_indices: code that is sampled from each.

        Returns:
            Float32 `[code_indices, size]`.
        """
        if len(logits) == 1:
            conditional: Floats = logits[0]
            return conditional
        code_indices = np.asarray(code_indices)
        mixed = apply_guidance(logits, self.scales(code_indices))
        guided = code_indices < self.num_guided_codes
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
        while token <= layout.token_position(code):
            scale = max(final, scale * (1 - 4 * (token + 2) / num_codes))
            token += 1
        scales[code] = scale
    return scales
