"""Likelihood of the tokens of an image under the target model, and recomputation of logits for near-ties.

The likelihood measures how probable the target considers the tokens of a method. A relaxed method accepts less likely
tokens, so their negative log-likelihood is higher on average than with autoregressive decoding. The likelihood includes
guidance and temperature. It excludes top-k and top-p, because a token that these filters exclude would cost infinitely
many nats. The entropy of a position is the expected negative log-likelihood of the token at this position, given the
tokens before. For tokens sampled from the target, entropy and negative log-likelihood differ only by chance, whatever
the image shows. So their difference compares methods with far less variance than the likelihood alone.

A near-tie is a choice between two tokens that rounding could change. Logits are sums of floats, and the order of
summation depends on the forward pass: draft tokens and cached tokens have different places in a sum. If
rounding could exchange the best two codes, the logits are computed again. The new passes over the sequence have shapes
that depend only on its length. So all methods get the same logits, and choose the same token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .engine import Bools, Floats, Ints, PassOutput
from .layout import ImageLayout, PassLayout
from .passes import MIN_NODES, PrefixBatch
from .sampling import softmax
from .state import ImageSequence, LoadedModel, Plan, PrefixRow, Prompt
from .statistics import EngineTimer

# Maximum number of nodes of a forward pass. More nodes would not be faster, and engines are built for this number.
MAX_PASS_NODES = 64


@dataclass(frozen=True)
class Likelihood:
    """Negative log-likelihood of the tokens of one image, and entropy of the target's distributions."""

    nats: float  # mean negative log-likelihood, in nats per token
    entropy: float  # mean entropy, in nats per token


def compute_likelihood(
    model: LoadedModel,
    plan: Plan,
    prompt: Prompt,
    codes: NDArray[np.int64],
    counted_cells: Bools | None = None,
) -> Likelihood:
    """Return the mean negative log-likelihood and the mean entropy of the tokens of one image.

    Args:
        codes: token of each cell in raster order, int64 `[cells]`.
        counted_cells: True in the cells to average over, bool `[cells]`; None: all cells.
    """
    layout = plan.layout
    sampler = plan.sampler
    codes = layout.to_generation_order(codes)
    nats = np.empty(len(codes))
    entropy = np.empty(len(codes))
    first = 0
    for logits in compute_sequence_logits(model, layout, prompt.rows(plan.num_rows), codes[:-1], EngineTimer()):
        part = np.arange(first, first + logits.shape[1])
        first += len(part)
        # Codes that are sampled together do not depend on each other, so only the codes before the group count.
        preceding_codes = [codes[: layout.find_codes_sampled_together(code).start] for code in part.tolist()]
        probabilities = softmax(sampler.scale(sampler.guide(logits, part, preceding_codes)))  # [codes, vocab_size]
        # The minimum 1e-300 keeps the logarithm finite if a probability is 0 by underflow.
        nats[part] = -np.log(np.maximum(probabilities[np.arange(len(part)), codes[part]], 1e-300))
        entropy[part] = -(probabilities * np.log(np.maximum(probabilities, 1e-300))).sum(1)
    chosen = np.s_[:] if counted_cells is None else layout.to_generation_order(counted_cells)
    return Likelihood(float(nats[chosen].mean()), float(entropy[chosen].mean()))


def recompute_logits(
    model: LoadedModel, sequence: ImageSequence, preceding_codes: Ints, code_index: int, timer: EngineTimer
) -> Floats:
    """Compute the guided logits of one code of a sequence again, float32 `[1, vocab_size]`.

    The shapes of the passes are the same for all methods. `preceding_codes` are the codes that the logits depend on, in
    generation order.
    """
    layout = sequence.plan.layout
    sampler = sequence.plan.sampler
    rows = sequence.rows[: sampler.guidance.count_batch_rows(code_index)]
    (last,) = deque(compute_sequence_logits(model, layout, rows, preceding_codes, timer), maxlen=1)
    # The last pass ends with the codes that are sampled together with `code_index`. So a negative index counts from the
    # end of these codes.
    logits = last[:, [code_index - layout.find_codes_sampled_together(code_index).stop]]
    return sampler.guide(logits, [code_index], [preceding_codes])


def compute_sequence_logits(
    model: LoadedModel, layout: ImageLayout, rows: Sequence[PrefixRow], codes: Ints, timer: EngineTimer
) -> Iterator[Floats]:
    """Yield the logits of all codes that can be computed from the first `codes` of an image, in generation order.

    Each pass gives float32 `[rows, codes, vocab_size]`. The first pass, over the prefixes, gives one code.
    """
    for output, lengths, (pass_layout,) in _run_passes_over_codes(model, layout, rows, [codes], timer):
        if pass_layout is None:  # the prefill, whose rows differ in length
            pass_layout = layout.lay_out_prefix_end()
            logits = output.logits[np.arange(len(rows)), lengths - 1][:, None]
        else:
            logits = output.logits[:, : lengths[0]]
        yield pass_layout.logits(logits, slice(None), slice(None))


def compute_sequence_hidden_states(
    model: LoadedModel, layout: ImageLayout, rows: Sequence[PrefixRow], codes: Sequence[Ints]
) -> list[Floats]:
    """Return the target's hidden states of each row, float32 `[prefix + tokens, hidden_size]` each.

    `codes` are the known codes of each row, int64 `[count]`, with the same `count` for all rows.
    """
    parts: list[list[Floats]] = [[] for _ in rows]
    for output, lengths, _ in _run_passes_over_codes(model, layout, rows, codes, EngineTimer()):
        for row, count in enumerate(lengths.tolist()):
            parts[row].append(output.hidden[np.full(count, row), np.arange(count)])
    return [np.concatenate(states) for states in parts]


def _run_passes_over_codes(
    model: LoadedModel, layout: ImageLayout, rows: Sequence[PrefixRow], codes: Sequence[Ints], timer: EngineTimer
) -> Iterator[tuple[PassOutput, Ints, Sequence[PassLayout | None]]]:
    """Run a pass over the prefixes, then passes over consecutive parts of the known codes, and yield their outputs.

    `codes` is one array for all rows together, or one array for each row, int64 `[count]`.

    Yields:
        Output of the pass, number of nodes of each row, and layout of the pass for each array in `codes`; the layout of
        the pass over prefixes is None.
    """
    target = model.target
    prefixes = PrefixBatch(rows)
    parts = [*zip(*(layout.lay_out_known_codes(known, MAX_PASS_NODES) for known in codes), strict=True)]
    counts = [len(layouts[0].tokens) for layouts in parts]
    cache = target.make_cache(len(rows), int(prefixes.lengths.max()) + sum(counts) + MIN_NODES)
    output = timer.run_pass(target, prefixes.build_prefill_input(target, cache), cache)
    timer.append_to_cache(cache, output.new_kv, [np.arange(length) for length in prefixes.lengths])
    yield output, prefixes.lengths, [None] * len(codes)
    # With one array in `codes`, all rows belong to the same image. Otherwise every row belongs to a separate image.
    rows_of = [slice(None)] if len(codes) == 1 else [slice(row, row + 1) for row in range(len(rows))]
    for layouts, count in zip(parts, counts, strict=True):
        placed = zip(rows_of, layouts, strict=True)
        batch = prefixes.build_pass_input(target, cache, placed, count, model.num_positions - 1)
        output = timer.run_pass(target, batch, cache)
        timer.append_to_cache(cache, output.new_kv, [np.arange(count)] * len(rows))
        yield output, np.full(len(rows), count), layouts
