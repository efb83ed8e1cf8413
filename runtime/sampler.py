"""The sampler of an image: repetition penalty, guidance, temperature, filters and noise, in this order.

A draft that is rejected may have logits of NaN or infinity, from which `NO_CODE` is sampled. An accepted `NO_CODE`
raises EngineError, because a model with damaged weights must not generate an image.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite

import numpy as np

from ..methods import Sampling
from .device import SamplingRequest
from .engine import Floats, Ints
from .filters import make_filters
from .guidance import Guidance, apply_guidance
from .layout import ImageLayout
from .noise import Noise
from .sampling import NO_CODE, Probabilities, softmax


class Sampler:
    """Sampler of the images of one plan. Devices sample by the same steps, see `DeviceLogits`.

    Logits are float32 `[..., vocab_size]`. `guide` makes guided logits, which the other methods read.
    """

    def __init__(self, sampling: Sampling, layout: ImageLayout) -> None:
        self.sampling = sampling
        self.greedy = sampling.greedy
        self._penalty = sampling.repetition_penalty or 1.0
        self.guidance = Guidance(sampling, layout)
        self._filters = make_filters(sampling)

    def guide(self, logits: Floats, code_indices: Sequence[int] | Ints, preceding_codes: Iterable[Ints]) -> Floats:
        """Return guided logits `[code_indices, vocab_size]`, to which the repetition penalty was applied.

        Args:
            logits: float32 `[1 or 2, code_indices, vocab_size]`, the conditional row first; this array is not changed.
            code_indices: index of the code that is sampled from each vector of logits.
            preceding_codes: codes of the image before each of these codes, which only a penalty reads.
        """
        if self._penalty != 1.0:
            logits = logits.copy()
            penalty = np.float32(self._penalty)
            for row, codes in zip(logits[0], preceding_codes, strict=True):
                known = codes[codes < len(row)]  # end-of-row tokens are not sampled
                # Either operation lowers the logit: a division would raise a negative logit.
                row[known] = np.where(row[known] < 0, row[known] * penalty, row[known] / penalty)
        return self.guidance.mix_logits(logits, code_indices)

    def scale(self, logits: Floats) -> Floats:
        """Divide logits by the temperature; return the logits unchanged for greedy decoding (temperature 0)."""
        temperature = self.sampling.temperature
        return logits if temperature in (0.0, 1.0) else logits / np.float32(temperature)

    def process(self, logits: Floats) -> Floats:
        """Divide logits by the temperature, and set those that a filter excludes, and vectors with NaN, to -inf."""
        scaled = self.scale(logits)
        if not self._filters:
            return scaled
        lowest = np.apply_along_axis(lambda row: self._find_filter_bounds(row)[0], -1, scaled)[..., None]
        return np.where(scaled >= lowest, scaled, np.float32(-np.inf))

    def compute_distribution(self, logits: Floats) -> Probabilities:
        """Return distributions, float64 `[..., vocab_size]`; greedy decoding applies only the softmax."""
        return softmax(self.process(logits))

    def draw_noise(self, starts: Sequence[tuple[Noise, int]], num_codes: int, vocab_size: int) -> Floats | None:
        """Return the noise of `num_codes` consecutive codes from each start, or None for greedy decoding.

        A start is the noise of an image, and the index of a code. The result is `[starts * num_codes, vocab_size]`.
        """
        if self.greedy:
            return None
        parts = [noise.gumbel(code_index, num_codes, vocab_size) for noise, code_index in starts]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def score(self, logits: Floats, code_index: int, noise: Noise | None) -> Floats:
        """Return processed logits `[..., vocab_size]` of one code with its noise, unless decoding is greedy."""
        values = self.process(logits)
        if noise is None or self.greedy:
            return values
        return values + noise.gumbel(code_index, 1, values.shape[-1])

    def choose(self, logits: Floats, noise: Floats | None) -> tuple[list[int], list[float]]:
        """Sample codes as the arg-max of guided logits plus noise, both `[n, vocab_size]`.

        The sums are float32. Rounding of a sum decides between two codes about once in a million samples. This changes
        a distribution less than the rounding of logits does.

        Returns:
            The codes, `NO_CODE` from NaN or infinite logits. Then their margins, the differences between the largest
            and the second largest sum; none with a filter, because rounding may then change a code whatever the
            difference is.
        """
        values = self.process(logits)
        values = values.copy() if noise is None else values + noise
        codes: list[int] = []
        margins: list[float] = []
        # The loop over rows calls fewer different NumPy functions than an operation on all rows. This is faster after a
        # pass, when the processor's caches are cold: 20 us instead of 49 us for one row (measured here).
        for row in values:
            code = int(row.argmax())
            best = row.item(code)
            codes.append(code if isfinite(best) else NO_CODE)  # NaN counts as the largest
            if not self._filters:
                row[code] = -np.inf
                margins.append(best - row.item(row.argmax()))
        return codes, margins

    def stays_best_under_rounding(
        self, logits: Floats, noise: Floats | None, code: int, rounding_margin: float
    ) -> bool:
        """Return whether `code`, chosen from guided logits `[vocab_size]` and their noise, is safe from rounding.

        Rounding may change the difference of two logits, divided by the temperature, by up to `rounding_margin`.
        """
        values = scaled = self.scale(logits)
        if self._filters:
            lowest, certain = self._find_filter_bounds(scaled, rounding_margin)
            if not scaled[code] > certain:
                return False
            values = np.where(scaled >= lowest, scaled, np.float32(-np.inf))
        values = values.copy() if noise is None else values + noise
        best = values[code]
        values[code] = -np.inf
        return bool(best - values.max() > rounding_margin)

    def compute_rounding_margin(self, rounding_bound: float, num_rows: int) -> float:
        """Return the `rounding_bound` of two logits of one batch row for guided logits divided by the temperature."""
        guidance = self.guidance.rounding_growth if num_rows == 2 else 1.0
        penalty = max(self._penalty, 1 / self._penalty)  # a repetition penalty multiplies or divides logits
        return rounding_bound * guidance * penalty / (self.sampling.temperature or 1.0)

    def can_guide_together(self, num_rows: int, last_code_index: int) -> bool:
        """Return whether `guide_together` can guide codes up to this index, of an image with this many batch rows."""
        # The batch rows must fit every code. Guided codes come first, so the last code decides.
        return self._penalty == 1.0 and num_rows == self.guidance.count_batch_rows(last_code_index)

    def make_request(
        self, rows: Ints, nodes: Ints, code_indices: Sequence[int], noise: Noise | None
    ) -> SamplingRequest:
        """Return a request to sample codes on a device, without noise if `noise` is None or decoding is greedy.

        Args:
            rows: batch rows of the image, int64 `[1 or 2]`, the conditional row first.
            nodes: node of each code in these rows, int64 `[code_indices]`, or `[rows, code_indices]` if rows differ.
        """
        codes = np.array(code_indices, np.int64)
        # Row of the conditional and of the unconditional logits of each code; the same row if the code is not guided.
        source = np.stack([0 * codes, codes < self.guidance.num_guided_codes])
        nodes = np.broadcast_to(nodes, (len(rows), len(codes)))[source, np.arange(len(codes))]
        noise = None if self.greedy else noise
        return SamplingRequest(rows[source], nodes, self.sampling, noise, codes, self.guidance.scales(codes))

    def _find_filter_bounds(self, scaled_logits: Floats, margin: float = 0.0) -> tuple[float, float]:
        """Return the thresholds of all filters together for `scaled_logits [vocab_size]`; NaN for NaN or infinity."""
        if not isfinite(scaled_logits.max()):
            return np.nan, np.nan
        possible = scaled_logits
        lowest = -np.inf
        certain = -np.inf
        for i, find_bounds in enumerate(self._filters):
            if i > 0:
                possible = possible[possible >= lowest]
            below, above = find_bounds(possible, certain, margin)
            lowest = max(lowest, below)
            certain = max(certain, above)
        return lowest, certain


def guide_together(samplers: Sequence[Sampler], logits: Floats, code_indices: Sequence[Sequence[int]]) -> Floats:
    """Return the guided logits of several images as `Sampler.guide` does, `[images * codes, vocab_size]`.

    Args:
        samplers: sampler of each image, for which `can_guide_together` is True.
        logits: float32 `[images * rows, codes, vocab_size]`; the rows of an image are neighbours.
        code_indices: as in `Sampler.guide`, for each image.
    """
    # conditional and unconditional logits on the first axis: [rows, images, codes, vocab_size]
    by_row = logits.reshape(len(samplers), -1, *logits.shape[1:]).swapaxes(0, 1)
    guided: Floats = by_row[0]
    if len(by_row) == 2:
        pairs = zip(samplers, code_indices, strict=True)
        guided = apply_guidance(by_row, np.stack([sampler.guidance.scales(codes) for sampler, codes in pairs]))
    return guided.reshape(-1, guided.shape[-1])
