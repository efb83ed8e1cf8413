"""What a target makes of whole sequences, by passes whose shapes depend on nothing but their length.

Likelihood is the quality of a method in the model's own eyes. Tokens of plain decoding have some negative
log-likelihood on average; a relaxed method that takes less likely ones has a higher one. Guidance and temperature
count, top-k and top-p do not: what they forbid would be infinite. The entropy is the expected negative log-likelihood,
given the tokens before. Tokens drawn from the model differ from it by chance only, whatever the picture, so the
difference compares methods with far less noise than the likelihood alone.

Ties are choices that rounding could turn; they are made from one computation, whichever pass met them. Logits are
sums of floats, and a pass forms them in an order of its own: a key that was drafted in the same pass is added elsewhere
than one from the cache. Where the best two codes are closer than that moves them, the sequence is computed again, and
that decides. So every pass gives the token that this computation would give.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..methods import Sampling
from .engine import Bools, Floats, Ints, PassOutput
from .passes import MIN_NODES, causal_pass, prefill_pass, stack_padding
from .sampling import apply_guidance, apply_repetition_penalty, apply_temperature, softmax
from .state import Model, PrefixRow, Prompt
from .statistics import Clock

NODES = 64  # of a pass; more would not be faster, and engines are built for so many


@dataclass(frozen=True)
class Likelihood:
    """Nats per token of one image: negative log-likelihood, and entropy of the distributions the target has there."""

    nats: float
    entropy: float


def likelihood(
    model: Model, prompt: Prompt, codes: NDArray[np.int64], sampling: Sampling, counted: Bools | None = None
) -> Likelihood:
    """How probable one image's `codes [cells]` are, given its prompt and the tokens before. counted: by default all."""
    start, place, tokens = 0, 0, model.raster.insert_row_ends(codes)
    nats, entropy = np.empty(len(codes)), np.empty(len(codes))
    for logits in sequence_logits(model, prompt.rows(sampling), tokens[:-1], Clock()):
        own = tokens[start : start + logits.shape[1]]
        start += len(own)
        chosen = own != (-1 if model.row_end is None else model.row_end)  # what ends a row is no choice
        own = own[chosen]
        known = int(chosen.sum())
        before = [codes[: place + i] for i in range(known)]
        here, place = slice(place, place + known), place + known
        guided = apply_guidance(apply_repetition_penalty(logits[:, chosen], before, sampling), sampling)
        probabilities = softmax(apply_temperature(guided, sampling))  # [codes, vocab_size]
        nats[here] = -np.log(np.maximum(probabilities[np.arange(len(own)), own], 1e-300))
        entropy[here] = -(probabilities * np.log(np.maximum(probabilities, 1e-300))).sum(1)
    cells = np.s_[:] if counted is None else counted
    return Likelihood(float(nats[cells].mean()), float(entropy[cells].mean()))


def tie_margin(model: Model, sampling: Sampling) -> float:
    """How far passes may move the difference of two guided logits over the temperature."""
    guidance = abs(sampling.cfg_scale) + abs(sampling.cfg_scale - 1) if sampling.guided else 1.0
    penalty = sampling.repetition_penalty or 1.0
    return model.rounding * guidance * max(penalty, 1 / penalty) / (sampling.temperature or 1.0)


def recompute_logits(model: Model, rows: Sequence[PrefixRow], tokens: Ints, sampling: Sampling, clock: Clock) -> Floats:
    """Guided logits `[1, vocab_size]` of the code after the rows of one prompt and `tokens [count]`; anew."""
    (last,) = deque(sequence_logits(model, rows, tokens, clock), maxlen=1)
    return apply_guidance(apply_repetition_penalty(last[:, -1:], [tokens], sampling), sampling)


def sequence_logits(model: Model, rows: Sequence[PrefixRow], tokens: Ints, clock: Clock) -> Iterator[Floats]:
    """Logits `[rows, nodes, vocab_size]` after the rows' prefixes, one node, then after `tokens [count]`, in parts."""
    passes = _passes(model, rows, np.tile(tokens, (len(rows), 1)), clock)
    output, lengths = next(passes)
    yield output.logits[np.arange(len(rows)), lengths - 1][:, None]
    for output, counts in passes:
        yield output.logits[:, : counts[0]]


def sequence_states(model: Model, rows: Sequence[PrefixRow], tokens: Ints) -> list[Floats]:
    """Hidden states of each row's prefix and of its `tokens [rows, count]`, float32 `[prefix + count, hidden_size]`."""
    parts: list[list[Floats]] = [[] for _ in rows]
    for output, counts in _passes(model, rows, tokens, Clock()):
        for row, count in enumerate(counts.tolist()):
            parts[row].append(output.hidden[np.full(count, row), np.arange(count)])
    return [np.concatenate(own) for own in parts]


def _passes(model: Model, rows: Sequence[PrefixRow], tokens: Ints, clock: Clock) -> Iterator[tuple[PassOutput, Ints]]:
    """Passes over the prefixes and then over parts of `tokens [rows, count]`; how many nodes of each row count."""
    target, sides, lengths = model.target, len(rows), np.array([len(row.embeds) for row in rows])
    padding = stack_padding([~row.real for row in rows])  # [rows, longest]
    cache = target.new_cache(sides, int(lengths.max()) + tokens.shape[1] + MIN_NODES)
    output = clock.run(target, prefill_pass(target, cache, [row.embeds for row in rows], padding), cache)
    clock.append(cache, output.new_kv, [np.arange(length) for length in lengths])
    yield output, lengths
    for start in range(0, tokens.shape[1], NODES):
        part = tokens[:, start : start + NODES]
        count = part.shape[1]
        nodes = np.zeros((sides, max(MIN_NODES, count)), np.int64)
        nodes[:, :count] = part
        output = clock.run(target, causal_pass(target, cache, nodes, model.num_positions - 1, padding), cache)
        clock.append(cache, output.new_kv, [np.arange(count)] * sides)
        yield output, np.full(sides, count)
