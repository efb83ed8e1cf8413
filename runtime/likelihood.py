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
from .drafts import Model, Prompt, prefix_rows
from .passes import MINIMUM_NODES, causal_pass, prefill_pass, stack_padding
from .sampling import guide, scale, softmax

CHUNK = 64  # tokens scored in one pass


@dataclass(frozen=True)
class Likelihood:
    """Nats per token of one image: negative log-likelihood, and entropy of the distributions the target has there."""

    nats: float
    entropy: float


def likelihood(model: Model, prompt: Prompt, codes: NDArray[np.int64], sampling: Sampling) -> Likelihood:
    """How probable one image's `codes [cells]` are, given its prompt and the tokens before."""
    prefix = prefix_rows([prompt], sampling)
    padding = stack_padding([~row.real for row in prefix])
    rows, lengths = len(prefix), np.array([len(row.embeds) for row in prefix])
    cache = model.target.new_cache(rows, int(lengths.max()) + len(codes))
    output = model.target.run(prefill_pass(model.target, cache, [row.embeds for row in prefix], padding), cache)
    cache.append(output.new_kv, [np.arange(length) for length in lengths])
    # each [rows, tokens, vocab_size], predicting the next token
    logits = [output.logits[np.arange(rows), lengths - 1][:, None]]
    for start in range(0, len(codes) - 1, CHUNK):
        chunk = codes[start : min(start + CHUNK, len(codes) - 1)]
        count = len(chunk)
        tokens = np.broadcast_to(chunk, (rows, max(count, MINIMUM_NODES)))
        output = model.target.run(causal_pass(model.target, cache, tokens, model.positions - 1, padding), cache)
        cache.append(output.new_kv, [np.arange(count)] * rows)
        logits.append(output.logits[:, :count])
    nats = entropy = 0.0
    for part, own in zip(logits, np.split(codes, range(1, len(codes), CHUNK)), strict=True):
        probabilities = softmax(scale(guide(part, sampling.cfg_scale), sampling))  # [tokens, vocab_size]
        nats -= float(np.log(np.maximum(probabilities[np.arange(len(own)), own], 1e-300)).sum())
        entropy -= float((probabilities * np.log(np.maximum(probabilities, 1e-300))).sum())
    return Likelihood(nats / len(codes), entropy / len(codes))
