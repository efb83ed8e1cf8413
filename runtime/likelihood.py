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
from .passes import MIN_NODES, PrefixBatch
from .sampling import apply_repetition_penalty, apply_temperature, softmax
from .state import DecodeSettings, ImageSequence, LoadedModel, PrefixRow, Prompt
from .statistics import EngineTimer

MAX_PASS_NODES = 64  # nodes of a forward pass; more would not be faster, and engines are built for this number


@dataclass(frozen=True)
class Likelihood:
    """Negative log-likelihood of one image and entropy of the target's distributions, both in nats per token."""

    nats: float
    entropy: float


def compute_likelihood(
    model: LoadedModel,
    plan: DecodeSettings,
    prompt: Prompt,
    codes: NDArray[np.int64],
    cell_mask: Bools | None = None,
) -> Likelihood:
    """Return the likelihood and the entropy per token of one image.

    Args:
        model: model with its target engine.
        plan: layout and sampling settings of the image.
        codes: tokens of the image, `[cells]`.
        cell_mask: cells to average over, `[cells]`; None: all cells.
    """
    layout = plan.layout
    sampling = plan.sampling
    codes = layout.to_generation_order(codes)
    guidance = Guidance(sampling, layout)
    nats = np.empty(len(codes))
    entropy = np.empty(len(codes))
    first = 0
    for logits in compute_sequence_logits(model, layout, prompt.rows(plan.num_rows), codes[:-1], EngineTimer()):
        part = np.arange(first, first + logits.shape[1])
        first += len(part)
        # Codes that are generated together do not depend on each other.
        preceding_codes = [codes[: layout.codes_sampled_together(code).start] for code in part.tolist()]
        guided = guidance.mix_logits(apply_repetition_penalty(logits, preceding_codes, sampling), part)
        probabilities = softmax(apply_temperature(guided, sampling))  # [codes, vocab_size]
        nats[part] = -np.log(np.maximum(probabilities[np.arange(len(part)), codes[part]], 1e-300))
        entropy[part] = -(probabilities * np.log(np.maximum(probabilities, 1e-300))).sum(1)
    chosen = np.s_[:] if cell_mask is None else layout.to_generation_order(cell_mask)
    return Likelihood(float(nats[chosen].mean()), float(entropy[chosen].mean()))


def compute_rounding_margin(model: LoadedModel, sequence: ImageSequence) -> float:
    """Return how far rounding can move the difference of two guided logits, divided by the temperature."""
    sampling = sequence.sampling
    scale = max(sampling.cfg_scale, sampling.last_cfg_scale)
    guidance = scale + abs(scale - 1) if len(sequence.rows) == 2 else 1.0
    penalty = sampling.repetition_penalty or 1.0
    return model.rounding_bound * guidance * max(penalty, 1 / penalty) / (sampling.temperature or 1.0)


def recompute_logits(
    model: LoadedModel, sequence: ImageSequence, preceding_codes: Ints, code_index: int, timer: EngineTimer
) -> Floats:
    """Compute the guided logits of a code of a sequence again, by passes of fixed shapes.

    Args:
        model: model with its target engine.
        preceding_codes: codes that the distribution depends on, in generation order, `[count]`.
        code_index: number of the code in generation order.
        timer: clock of the forward passes.

    Returns:
        Float32 `[1, vocab_size]`.
    """
    layout = sequence.layout
    rows = sequence.rows[: sequence.guidance.count_batch_rows(code_index)]
    (last,) = deque(compute_sequence_logits(model, layout, rows, preceding_codes, timer), maxlen=1)
    # The last pass ends with the codes that are generated together with `code_index`, so its index counts from the end.
    logits = last[:, [code_index - layout.codes_sampled_together(code_index).stop]]
    return sequence.guidance.mix_logits(
        apply_repetition_penalty(logits, [preceding_codes], sequence.sampling), [code_index]
    )


def compute_sequence_logits(
    model: LoadedModel, layout: ImageLayout, rows: Sequence[PrefixRow], codes: Ints, timer: EngineTimer
) -> Iterator[Floats]:
    """Yield the logits of every code that the first `codes` of an image are enough for, in generation order.

    Args:
        model: model with its target engine.
        rows: rows of one prompt.
        codes: known codes in generation order, `[count]`.
        timer: clock of the forward passes.

    Yields:
        Float32 `[rows, codes, vocab_size]`: first of one code, after the prefixes.
    """
    for output, lengths, (pass_layout,) in _run_passes_over_codes(model, layout, rows, [codes], timer):
        if pass_layout is None:
            pass_layout = layout.lay_out_prefix_end()
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
    for output, lengths, _ in _run_passes_over_codes(model, layout, rows, codes, EngineTimer()):
        for row, count in enumerate(lengths.tolist()):
            parts[row].append(output.hidden[np.full(count, row), np.arange(count)])
    return [np.concatenate(states) for states in parts]


def _run_passes_over_codes(
    model: LoadedModel, layout: ImageLayout, rows: Sequence[PrefixRow], codes: Sequence[Ints], timer: EngineTimer
) -> Iterator[tuple[PassOutput, Ints, Sequence[PassLayout | None]]]:
    """Yield passes over the prefixes, then over parts of the known codes of each row, or of all rows.

    Yields:
        Output, number of nodes of each row, and the layout of the pass for each entry of `codes`, None for prefixes.
    """
    target = model.target
    prefixes = PrefixBatch(rows)
    parts = [*zip(*(layout.lay_out_known_codes(known, MAX_PASS_NODES) for known in codes), strict=True)]
    counts = [len(layouts[0].tokens) for layouts in parts]
    cache = target.new_cache(len(rows), int(prefixes.lengths.max()) + sum(counts) + MIN_NODES)
    output = timer.run_pass(target, prefixes.build_prefill(target, cache), cache)
    timer.append_to_cache(cache, output.new_kv, [np.arange(length) for length in prefixes.lengths])
    yield output, prefixes.lengths, [None] * len(codes)
    # With one entry of `codes`, all rows hold the same image; else every row has an image to itself.
    rows_of = [slice(None)] if len(codes) == 1 else [slice(row, row + 1) for row in range(len(rows))]
    for layouts, count in zip(parts, counts, strict=True):
        placed = zip(rows_of, layouts, strict=True)
        batch = prefixes.build_pass(target, cache, placed, count, model.num_positions - 1)
        output = timer.run_pass(target, batch, cache)
        timer.append_to_cache(cache, output.new_kv, [np.arange(count)] * len(rows))
        yield output, np.full(len(rows), count), layouts
