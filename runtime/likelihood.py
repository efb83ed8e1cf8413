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

from .engine import Bools, Floats, Ints, PassOutput
from .guidance import Guidance
from .layout import ImageLayout, PassLayout
from .passes import MIN_NODES, Prefixes
from .sampling import apply_repetition_penalty, apply_temperature, softmax
from .state import DecodePlan, ImageSequence, LoadedModel, PrefixRow, Prompt
from .statistics import Clock

MAX_PASS_NODES = 64  # nodes of a forward pass; more would not be faster, and engines are built for this number


@dataclass(frozen=True)
class Likelihood:
    """Negative log-likelihood of one image and entropy of the target's distributions, both in nats per token."""

    nats: float
    entropy: float


def compute_likelihood(
    model: LoadedModel,
    plan: DecodePlan,
    prompt: Prompt,
    codes: NDArray[np.int64],
    counted_cells: Bools | None = None,
) -> Likelihood:
    """Return the likelihood and the entropy per token of one image.

    Args:
        model: model with its target engine.
        plan: layout and sampling settings of the image.
        codes: tokens of the image, `[cells]`.
        counted_cells: cells to average over, `[cells]`; None: all cells.
    """
    layout = plan.layout
    sampling = plan.sampling
    codes = layout.to_drawing_order(codes)
    guidance = Guidance(sampling, layout)
    nats = np.empty(len(codes))
    entropy = np.empty(len(codes))
    first = 0
    for logits in compute_sequence_logits(model, layout, prompt.rows(plan.num_rows), codes[:-1], Clock()):
        part = np.arange(first, first + logits.shape[1])
        first += len(part)
        # Codes that are drawn together do not depend on each other.
        preceding_codes = [codes[: layout.codes_drawn_with(code).start] for code in part.tolist()]
        guided = guidance.mix(apply_repetition_penalty(logits, preceding_codes, sampling), part)
        probabilities = softmax(apply_temperature(guided, sampling))  # [codes, vocab_size]
        nats[part] = -np.log(np.maximum(probabilities[np.arange(len(part)), codes[part]], 1e-300))
        entropy[part] = -(probabilities * np.log(np.maximum(probabilities, 1e-300))).sum(1)
    chosen = np.s_[:] if counted_cells is None else layout.to_drawing_order(counted_cells)
    return Likelihood(float(nats[chosen].mean()), float(entropy[chosen].mean()))


def compute_tie_margin(model: LoadedModel, sequence: ImageSequence) -> float:
    """Return how far rounding can move the difference of two guided logits, divided by the temperature."""
    sampling = sequence.sampling
    scale = max(sampling.cfg_scale, sampling.last_cfg_scale)
    guidance = scale + abs(scale - 1) if len(sequence.rows) == 2 else 1.0
    penalty = sampling.repetition_penalty or 1.0
    return model.rounding * guidance * max(penalty, 1 / penalty) / (sampling.temperature or 1.0)


def recompute_logits(
    model: LoadedModel, sequence: ImageSequence, preceding_codes: Ints, code: int, clock: Clock
) -> Floats:
    """Compute the guided logits of a code of a sequence again, by passes of fixed shapes.

    Args:
        model: model with its target engine.
        preceding_codes: codes that the distribution depends on, in the order of drawing, `[count]`.
        code: number of the code in the order of drawing.
        clock: clock of the forward passes.

    Returns:
        Float32 `[1, vocab_size]`.
    """
    layout = sequence.layout
    rows = sequence.rows[: sequence.guidance.count_rows(code)]
    (last,) = deque(compute_sequence_logits(model, layout, rows, preceding_codes, clock), maxlen=1)
    # The last pass ends with the codes that are drawn together with `code`, so its index counts from the end.
    logits = last[:, [code - layout.codes_drawn_with(code).stop]]
    return sequence.guidance.mix(apply_repetition_penalty(logits, [preceding_codes], sequence.sampling), [code])


def compute_sequence_logits(
    model: LoadedModel, layout: ImageLayout, rows: Sequence[PrefixRow], codes: Ints, clock: Clock
) -> Iterator[Floats]:
    """Yield the logits of every code that the first `codes` of an image are enough for, in the order of drawing.

    Args:
        model: model with its target engine.
        rows: rows of one prompt.
        codes: known codes in the order of drawing, `[count]`.
        clock: clock of the forward passes.

    Yields:
        Float32 `[rows, codes, vocab_size]`: first of one code, after the prefixes.
    """
    for output, lengths, (pass_layout,) in _run_passes(model, layout, rows, [codes], clock):
        if pass_layout is None:
            pass_layout = layout.layout_after_prefix()
            logits = output.logits[np.arange(len(rows)), lengths - 1][:, None]
        else:
            logits = output.logits[:, : lengths[0]]
        yield pass_layout.logits(logits, slice(None), slice(None))


def compute_sequence_states(
    model: LoadedModel, layout: ImageLayout, rows: Sequence[PrefixRow], codes: Sequence[Ints]
) -> list[Floats]:
    """Return the hidden states of each row's prefix and tokens.

    Args:
        model: model with its target engine.
        codes: known codes of each row, all of the same number, `[count]`.

    Returns:
        Float32 `[prefix + tokens, hidden_size]` for each row.
    """
    parts: list[list[Floats]] = [[] for _ in rows]
    for output, lengths, _ in _run_passes(model, layout, rows, codes, Clock()):
        for row, count in enumerate(lengths.tolist()):
            parts[row].append(output.hidden[np.full(count, row), np.arange(count)])
    return [np.concatenate(states) for states in parts]


def _run_passes(
    model: LoadedModel, layout: ImageLayout, rows: Sequence[PrefixRow], codes: Sequence[Ints], clock: Clock
) -> Iterator[tuple[PassOutput, Ints, Sequence[PassLayout | None]]]:
    """Yield passes over the prefixes, then over parts of the known codes of each row, or of all rows.

    Yields:
        Output, number of nodes of each row, and the layout of the pass for each entry of `codes`, None for prefixes.
    """
    target = model.target
    prefixes = Prefixes(rows)
    parts = [*zip(*(layout.lay_out_known_codes(known, MAX_PASS_NODES) for known in codes), strict=True)]
    counts = [len(layouts[0].tokens) for layouts in parts]
    cache = target.new_cache(len(rows), int(prefixes.lengths.max()) + sum(counts) + MIN_NODES)
    output = clock.run(target, prefixes.build_prefill(target, cache), cache)
    clock.append(cache, output.new_kv, [np.arange(length) for length in prefixes.lengths])
    yield output, prefixes.lengths, [None] * len(codes)
    # With one entry of `codes`, all rows hold the same image; else every row has an image to itself.
    rows_of = [slice(None)] if len(codes) == 1 else [slice(row, row + 1) for row in range(len(rows))]
    for layouts, count in zip(parts, counts, strict=True):
        placed = zip(rows_of, layouts, strict=True)
        batch = prefixes.build_pass(target, cache, placed, count, model.num_positions - 1)
        output = clock.run(target, batch, cache)
        clock.append(cache, output.new_kv, [np.arange(count)] * len(rows))
        yield output, np.full(len(rows), count), layouts
