"""The likelihood of given tokens under a target, and the recomputation that decides ties.

The likelihood measures the quality of a method as the model sees it. Tokens of plain decoding have some negative
log-likelihood on average; a relaxed method, which accepts less likely tokens, has a higher one. Guidance and
temperature apply. Top-k and top-p do not: a token that they exclude would cost infinitely many nats. The entropy of a
position is the expected negative log-likelihood of its token, given the tokens before it. For tokens sampled from the
model the two differ by chance only, whatever the image shows. So their difference compares methods with far less noise
than the likelihood alone.

A tie is a choice that rounding could change. Logits are sums of floats, and the order of a sum depends on the forward
pass: a key drafted in the same pass is added elsewhere than a key in the cache. Where the best two codes are closer
than rounding can move them, the sequence is computed again in passes whose shapes depend only on its length. So every
method gets the token of this one computation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..methods import Sampling
from .engine import Bools, Floats, Ints, PassOutput
from .guidance import guidance_scales
from .passes import MIN_NODES, causal_pass, prefill_pass, stack_padding
from .sampling import apply_guidance, apply_repetition_penalty, apply_temperature, softmax
from .state import Model, PrefixRow, Prompt
from .statistics import Clock

NODES = 64  # nodes of a forward pass; more would not be faster, and engines are built for this number


@dataclass(frozen=True)
class Likelihood:
    """Negative log-likelihood of one image and entropy of the target's distributions, both in nats per token."""

    nats: float
    entropy: float


def likelihood(
    model: Model, prompt: Prompt, codes: NDArray[np.int64], sampling: Sampling, counted: Bools | None = None
) -> Likelihood:
    """Return the likelihood and the entropy per token of one image.

    Args:
        model: model with its target engine.
        prompt: prompt of the image.
        codes: tokens of the image, `[cells]`.
        sampling: guidance, temperature and repetition penalty.
        counted: cells to average over, `[cells]`; None: all cells.
    """
    start = 0
    cell = 0
    tokens = model.raster.insert_row_ends(codes)
    scales = guidance_scales(sampling, model.raster)
    nats = np.empty(len(codes))
    entropy = np.empty(len(codes))
    for logits in sequence_logits(model, prompt.rows(sampling), tokens[:-1], Clock()):
        part = tokens[start : start + logits.shape[1]]
        start += len(part)
        sampled = part != (-1 if model.row_end is None else model.row_end)  # end-of-row tokens are not sampled
        part = part[sampled]
        preceding = [codes[: cell + i] for i in range(len(part))]
        span = slice(cell, cell + len(part))
        cell += len(part)
        penalised = apply_repetition_penalty(logits[:, sampled], preceding, sampling)
        is_guided = np.arange(span.start, cell) < sampling.count_guided(len(codes))
        guided = apply_guidance(penalised, sampling, is_guided, None if scales is None else scales[span])
        probabilities = softmax(apply_temperature(guided, sampling))  # [codes, vocab_size]
        nats[span] = -np.log(np.maximum(probabilities[np.arange(len(part)), part], 1e-300))
        entropy[span] = -(probabilities * np.log(np.maximum(probabilities, 1e-300))).sum(1)
    cells = np.s_[:] if counted is None else counted
    return Likelihood(float(nats[cells].mean()), float(entropy[cells].mean()))


def tie_margin(model: Model, sampling: Sampling) -> float:
    """Return how far rounding can move the difference of two guided logits, divided by the temperature."""
    scale = max(sampling.cfg_scale, sampling.last_cfg_scale)
    guidance = scale + abs(scale - 1) if sampling.guided else 1.0
    penalty = sampling.repetition_penalty or 1.0
    return model.rounding * guidance * max(penalty, 1 / penalty) / (sampling.temperature or 1.0)


def recompute_logits(
    model: Model,
    rows: Sequence[PrefixRow],
    tokens: Ints,
    sampling: Sampling,
    clock: Clock,
    scales: Floats | None = None,
) -> Floats:
    """Compute the guided logits of the next code of a sequence again, by passes of fixed shapes.

    Args:
        model: model with its target engine.
        rows: rows of one prompt.
        tokens: tokens of the sequence, `[count]`.
        sampling: guidance and repetition penalty.
        clock: clock of the forward passes.
        scales: guidance scale of the code, float32 `[1]`; None: the last scale.

    Returns:
        Float32 `[1, vocab_size]`.
    """
    (last,) = deque(sequence_logits(model, rows, tokens, clock), maxlen=1)
    return apply_guidance(apply_repetition_penalty(last[:, -1:], [tokens], sampling), sampling, scales=scales)


def sequence_logits(model: Model, rows: Sequence[PrefixRow], tokens: Ints, clock: Clock) -> Iterator[Floats]:
    """Yield the logits after every token of a sequence, in parts.

    Args:
        model: model with its target engine.
        rows: rows of one prompt.
        tokens: tokens of the sequence, `[count]`.
        clock: clock of the forward passes.

    Yields:
        Float32 `[rows, nodes, vocab_size]`: first one node, after the prefixes, then the nodes of parts of `tokens`.
    """
    passes = _passes(model, rows, np.tile(tokens, (len(rows), 1)), clock)
    output, lengths = next(passes)
    yield output.logits[np.arange(len(rows)), lengths - 1][:, None]
    for output, counts in passes:
        yield output.logits[:, : counts[0]]


def sequence_states(model: Model, rows: Sequence[PrefixRow], tokens: Ints) -> list[Floats]:
    """Return the hidden states of each row's prefix and tokens.

    Args:
        model: model with its target engine.
        rows: rows of prompts.
        tokens: tokens of each row, `[rows, count]`.

    Returns:
        Float32 `[prefix + count, hidden_size]` for each row.
    """
    parts: list[list[Floats]] = [[] for _ in rows]
    for output, counts in _passes(model, rows, tokens, Clock()):
        for row, count in enumerate(counts.tolist()):
            parts[row].append(output.hidden[np.full(count, row), np.arange(count)])
    return [np.concatenate(states) for states in parts]


def _passes(model: Model, rows: Sequence[PrefixRow], tokens: Ints, clock: Clock) -> Iterator[tuple[PassOutput, Ints]]:
    """Yield passes over the prefixes, then over parts of `tokens [rows, count]`, with each row's number of nodes."""
    target = model.target
    num_rows = len(rows)
    lengths = np.array([len(row.embeds) for row in rows])
    padding = stack_padding([~row.real for row in rows])  # [rows, longest]
    cache = target.new_cache(num_rows, int(lengths.max()) + tokens.shape[1] + MIN_NODES)
    output = clock.run(target, prefill_pass(target, cache, [row.embeds for row in rows], padding), cache)
    clock.append(cache, output.new_kv, [np.arange(length) for length in lengths])
    yield output, lengths
    for start in range(0, tokens.shape[1], NODES):
        part = tokens[:, start : start + NODES]
        count = part.shape[1]
        nodes = np.zeros((num_rows, max(MIN_NODES, count)), np.int64)
        nodes[:, :count] = part
        output = clock.run(target, causal_pass(target, cache, nodes, model.num_positions - 1, padding), cache)
        clock.append(cache, output.new_kv, [np.arange(count)] * num_rows)
        yield output, np.full(num_rows, count)
