"""How probable the target finds tokens that were drawn: the quality of a method in the model's own eyes.

Tokens of plain decoding have some negative log-likelihood on average; a relaxed method that takes less likely ones has
a higher one. Guidance and temperature count, top-k and top-p do not: what they forbid would be infinite.

The entropy is the expected negative log-likelihood, given the tokens before. Tokens drawn from the model differ from it
by chance only, whatever the picture, so the difference compares methods with far less noise than the likelihood alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..methods import Sampling
from .drafts import Model, Prompt
from .sampling import guide, scale, softmax
from .sequences import sequence_logits
from .statistics import Clock


@dataclass(frozen=True)
class Likelihood:
    """Nats per token of one image: negative log-likelihood, and entropy of the distributions the target has there."""

    nats: float
    entropy: float


def likelihood(model: Model, prompt: Prompt, codes: NDArray[np.int64], sampling: Sampling) -> Likelihood:
    """How probable one image's `codes [cells]` are, given its prompt and the tokens before."""
    nats, entropy, start, cell, tokens = 0.0, 0.0, 0, 0, model.raster.spell(codes)
    for logits in sequence_logits(model, prompt.rows(sampling), tokens[:-1], Clock()):
        own = tokens[start : start + logits.shape[1]]
        start += len(own)
        chosen = own != (-1 if model.row_end is None else model.row_end)  # what ends a row is no choice
        own = own[chosen]
        guided = guide(logits[:, chosen], sampling, np.arange(cell, cell + len(own)))
        cell += len(own)
        probabilities = softmax(scale(guided, sampling))  # [codes, vocab_size]
        nats -= float(np.log(np.maximum(probabilities[np.arange(len(own)), own], 1e-300)).sum())
        entropy -= float((probabilities * np.log(np.maximum(probabilities, 1e-300))).sum())
    return Likelihood(nats / len(codes), entropy / len(codes))
