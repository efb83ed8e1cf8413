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
    nats, entropy, start = 0.0, 0.0, 0
    for logits in sequence_logits(model, prompt.rows(sampling), codes[:-1], Clock()):
        own = codes[start : start + logits.shape[1]]
        guided = guide(logits, sampling, np.arange(start, start + len(own)))
        start += len(own)
        probabilities = softmax(scale(guided, sampling))  # [tokens, vocab_size]
        nats -= float(np.log(np.maximum(probabilities[np.arange(len(own)), own], 1e-300)).sum())
        entropy -= float((probabilities * np.log(np.maximum(probabilities, 1e-300))).sum())
    return Likelihood(nats / len(codes), entropy / len(codes))
