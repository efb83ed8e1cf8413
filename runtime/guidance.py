"""Classifier-free guidance of one image: which codes are guided, and with which guidance scale."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..methods import Sampling
from .engine import Floats, Ints
from .layout import ImageLayout


class Guidance:
    """Classifier-free guidance of the codes of one image.

    The first codes in generation order are guided. Later codes are sampled from the conditional logits alone.
    """

    def __init__(self, sampling: Sampling, layout: ImageLayout) -> None:
        self.num_guided_codes = sampling.count_guided_tokens(layout.num_codes)
        self._scales = _compute_scales(sampling, layout)
        # Rounding errors grow by this factor, because guidance computes scale * cond - (scale - 1) * uncond.
        scale = max(sampling.cfg_scale, sampling.last_cfg_scale, self._scales.max())
        self.rounding_growth = scale + abs(scale - 1)

    def count_batch_rows(self, code_index: int) -> int:
        """Return how many batch rows the distribution of a code depends on: 2 if the code is guided, else 1."""
        return 2 if code_index < self.num_guided_codes else 1

    def scales(self, code_indices: Sequence[int] | Ints) -> Floats:
        """Return the guidance scale of each code, float32 `[code_indices]`."""
        # Drafts may extend past the end of the image; the codes there get the scale of the last code.
        return self._scales[np.minimum(code_indices, len(self._scales) - 1)]

    def mix_logits(self, logits: Floats, code_indices: Sequence[int] | Ints) -> Floats:
        """Mix the conditional and unconditional logits of guided codes; other codes keep the conditional logits.

        Args:
            logits: logits, or other outputs of the target, float32 `[1 or 2, code_indices, size]`, the conditional row
                first. The mixed logits are `[code_indices, size]`.
            code_indices: index of the code that is sampled from each vector of logits.
        """
        if len(logits) == 1:  # no unconditional row: none of these codes is guided
            conditional: Floats = logits[0]
            return conditional
        code_indices = np.asarray(code_indices)
        mixed = apply_guidance(logits, self.scales(code_indices))
        guided = code_indices < self.num_guided_codes
        return mixed if guided.all() else np.where(guided[:, None], mixed, logits[0])


def apply_guidance(logits: Floats, scales: Floats) -> Floats:
    """Mix logits `[2, ..., vocab_size]` with `scales [...]`: uncond + scale * (cond - uncond)."""
    # in-place operations, as these arrays are large
    mixed: Floats = logits[0] - logits[1]
    mixed *= scales[..., None]
    mixed += logits[1]
    return mixed


def _compute_scales(sampling: Sampling, layout: ImageLayout) -> Floats:
    """Return the guidance scale of every code, float32 `[num_codes]`.

    With another schedule than `constant`, the scale rises (`Sampling.cfg_schedule`). Otherwise the scale falls to
    `cfg_final`. Before token t of the image, counted from 0, the scale s becomes
    max(cfg_final, s (1 - 4 (t + 2) / num_codes)). End-of-row tokens count as tokens, too. This is the schedule of the
    published program of Lumina-mGPT 2.0.
    """
    final = sampling.last_cfg_scale
    scale = sampling.cfg_scale
    num_codes = layout.num_codes
    first, _, schedule = (sampling.cfg_schedule or "constant").rpartition(",")
    name, _, power = schedule.partition("-")
    first_scale, _, count = (first or "1x0").partition("x")
    scales = np.full(num_codes, final, np.float32)
    scales[: int(count)] = float(first_scale)
    scheduled = scales[int(count) :]
    steps = np.arange(len(scheduled))
    if name == "linear":
        scheduled[:] = 1 + (final - 1) * ((steps + 1).astype(np.float32) / len(steps))
    if name == "cosine":
        scheduled[:] = 1 + (final - 1) * (1 - np.cos(np.pi * (steps / len(steps)) ** float(power))) / 2
    if name != "constant" or first:
        return scales
    token = 0  # counts end-of-row tokens, too, so the scale may fall twice between two codes
    for code in range(num_codes if scale > final else 0):
        while token <= layout.find_token_position(code):
            scale = max(final, scale * (1 - 4 * (token + 2) / num_codes))
            token += 1
        scales[code] = scale
    return scales
