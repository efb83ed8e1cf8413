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
from .order import average_logits
from .pass_layout import PassLayout
from .passes import MIN_NODES, causal_pass, prefill_pass, stack_padding
from .raster import MAX_BATCH_NODES, Raster
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
    raster = model.raster
    if raster.order is not None:
        codes = codes[raster.order.cells]
        counted = None if counted is None else counted[raster.order.cells]
    tokens = raster.insert_row_ends(codes)
    scales = guidance_scales(sampling, raster)
    nats = np.empty(len(codes))
    entropy = np.empty(len(codes))
    for logits in sequence_logits(model, prompt.rows(sampling), tokens[:-1], Clock()):
        part = tokens[start : start + logits.shape[1]]
        start += len(part)
        sampled = part != (-1 if raster.row_end is None else raster.row_end)  # end-of-row tokens are not sampled
        part = part[sampled]
        preceding = [codes[: raster.count_before(cell + i)] for i in range(len(part))]
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
    raster: Raster,
    rows: Sequence[PrefixRow],
    codes: Ints,
    cell: int,
    sampling: Sampling,
    clock: Clock,
    scales: Floats | None = None,
) -> Floats:
    """Compute the guided logits of a code of a sequence again, by passes of fixed shapes.

    Args:
        model: model with its target engine.
        raster: order of the codes of the sequence's image; images of a model may have several sizes.
        rows: rows of one prompt.
        codes: codes that the distribution depends on, in the order of drawing, `[count]`.
        cell: number of the code in the order of drawing.
        sampling: guidance and repetition penalty.
        clock: clock of the forward passes.
        scales: guidance scale of the code, float32 `[1]`; None: the last scale.

    Returns:
        Float32 `[1, vocab_size]`.
    """
    # The code is unknown; 0 stands for it, so that an end-of-row token before it is inserted.
    tokens = raster.insert_row_ends(np.append(codes, 0))[:-1]
    (last,) = deque(sequence_logits(model, rows, tokens, clock), maxlen=1)
    index = -1 if raster.order is None else cell - raster.order.starts[raster.order.group_at(cell + 1)]
    return apply_guidance(apply_repetition_penalty(last[:, [index]], [tokens], sampling), sampling, scales=scales)


def sequence_logits(model: Model, rows: Sequence[PrefixRow], tokens: Ints, clock: Clock) -> Iterator[Floats]:
    """Yield the logits after every token of a sequence, in parts; with an order, the logits of every code it can draw.

    Args:
        model: model with its target engine.
        rows: rows of one prompt.
        tokens: tokens of the sequence, `[count]`.
        clock: clock of the forward passes.

    Yields:
        Float32 `[rows, nodes, vocab_size]`: first one node, after the prefixes, then the nodes of parts of `tokens`;
        with an order, the nodes of groups, in the order of drawing.
    """
    passes = _passes(model, rows, np.tile(tokens, (len(rows), 1)), clock)
    output, lengths, _ = next(passes)
    first = output.logits[np.arange(len(rows)), lengths - 1][:, None]
    yield first if model.order is None else model.order.prefix_logits(first)
    for output, counts, averaged in passes:
        logits = output.logits[:, : counts[0]]
        yield logits if averaged is None else average_logits(logits, averaged)


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
    for output, counts, _ in _passes(model, rows, tokens, Clock()):
        for row, count in enumerate(counts.tolist()):
            parts[row].append(output.hidden[np.full(count, row), np.arange(count)])
    return [np.concatenate(states) for states in parts]


def _passes(
    model: Model, rows: Sequence[PrefixRow], tokens: Ints, clock: Clock
) -> Iterator[tuple[PassOutput, Ints, Ints | None]]:
    """Yield passes over the prefixes, then over parts of `tokens [rows, count]`.

    Yields:
        Output, number of nodes of each row, and `PassLayout.averaged`.
    """
    target = model.target
    num_rows = len(rows)
    lengths = np.array([len(row.embeds) for row in rows])
    padding = stack_padding([~row.real for row in rows])  # [rows, longest]
    order = model.order
    capacity = int(lengths.max()) + tokens.shape[1] + (MIN_NODES if order is None else MAX_BATCH_NODES)
    cache = target.new_cache(num_rows, capacity)
    offsets = np.array([row.offset for row in rows])
    output = clock.run(target, prefill_pass(target, cache, [row.embeds for row in rows], padding, offsets), cache)
    clock.append(cache, output.new_kv, [np.arange(length) for length in lengths])
    yield output, lengths, None
    parts: list[tuple[Ints, PassLayout | None]]
    if order is None:
        parts = [(tokens[:, start : start + NODES], None) for start in range(0, tokens.shape[1], NODES)]
    else:
        layouts = (order.lay_out(groups, tokens[0]) for groups in order.spans(tokens.shape[1], NODES))
        parts = [(np.tile(layout.tokens, (num_rows, 1)), layout) for layout in layouts]
    for part, layout in parts:
        count = part.shape[1]
        nodes = np.zeros((num_rows, max(MIN_NODES, count)), np.int64)
        nodes[:, :count] = part
        batch = causal_pass(target, cache, nodes, model.num_positions - 1, padding, offsets=offsets)
        if layout is not None:
            past_length = batch.attention_mask.shape[2] - nodes.shape[1]
            batch.attention_mask[:, :count, past_length : past_length + count] = layout.ancestors
            batch.positions[:, :count] = lengths[:, None] + layout.positions
        output = clock.run(target, batch, cache)
        clock.append(cache, output.new_kv, [np.arange(count)] * num_rows)
        yield output, np.full(num_rows, count), None if layout is None else layout.averaged
