"""How probable the target finds codes that were drawn: the quality of a method in the model's own eyes.

Codes that plain decoding drew have some negative log-likelihood on average; a relaxed method that takes less likely
codes has a higher one. Guidance and temperature count, top-k and top-p do not: what they forbid would be infinite.

The entropy beside it is what was to be expected, given the codes before. Codes drawn from the model differ from it by
chance only, whatever the picture: most of what makes one picture less likely than another cancels.

Does not know how the codes were drawn, or pictures.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .decode import Model, Prompt
from .engine import Pass
from .passes import committed_mask, prefill_pass, stack_padding
from .sampling import Sampling, guide, softmax

CHUNK = 64  # codes scored in one pass


@dataclass(frozen=True)
class Likelihood:
    """Nats per code of one image: negative log-likelihood, and entropy of the distributions the target has there."""

    nats: float
    entropy: float


def likelihood(model: Model, prompt: Prompt, codes: NDArray[np.int64], sampling: Sampling) -> Likelihood:
    """How probable one image's `codes [cells]` are, given its prompt and the codes before."""
    sides = ["cond", "uncond"] if sampling.guided else ["cond"]
    prefix = [getattr(prompt, side) for side in sides]
    prefix_padding = stack_padding([prompt.padding(side) for side in sides])
    rows, lengths = len(prefix), np.array([len(row) for row in prefix])
    cache = model.target.new_cache(rows, int(lengths.max()) + len(codes))
    output = model.target.run(prefill_pass(model.target, cache, prefix, prefix_padding), cache)
    cache.append(output.new_kv, [np.arange(length) for length in lengths])
    # each [rows, codes, vocabulary], predicting the next code
    logits = [output.logits[np.arange(rows), lengths - 1][:, None]]
    for start in range(0, len(codes) - 1, CHUNK):
        chunk = codes[start : min(start + CHUNK, len(codes) - 1)]
        count = len(chunk)
        tokens = np.broadcast_to(np.append(chunk, chunk[-1:]) if count == 1 else chunk, (rows, max(2, count)))
        nodes = tokens.shape[1]
        past_length = model.target.next_past_length(cache, nodes)
        attention_mask = np.zeros((rows, nodes, past_length + nodes), bool)
        attention_mask[:, :, :past_length] = committed_mask(cache.lengths, prefix_padding, past_length)[:, None]
        attention_mask[:, :, past_length:] = np.tri(nodes, dtype=bool)
        positions = cache.lengths[:, None] + np.arange(nodes)
        output = model.target.run(Pass(positions=positions, attention_mask=attention_mask, tokens=tokens), cache)
        cache.append(output.new_kv, [np.arange(count)] * rows)
        logits.append(output.logits[:, :count])
    scored = 0
    nats = entropy = 0.0
    for part in logits:
        probabilities = softmax(sampling.scale(guide(part, sampling.cfg_scale)))  # [codes, vocabulary]
        chosen = probabilities[np.arange(len(probabilities)), codes[scored : scored + len(probabilities)]]
        nats -= float(np.log(np.maximum(chosen, 1e-300)).sum())
        entropy -= float((probabilities * np.log(np.maximum(probabilities, 1e-300))).sum())
        scored += len(probabilities)
    return Likelihood(nats / len(codes), entropy / len(codes))


def negative_log_likelihood(model: Model, prompt: Prompt, codes: NDArray[np.int64], sampling: Sampling) -> float:
    """Mean nats per code of one image's `codes [cells]`, without the entropy."""
    return likelihood(model, prompt, codes, sampling).nats
