"""Preserved tokens of an edit: no method changes them, and all exact methods generate the same other tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from toy_distributions import compute_next_distribution
from toy_engine import ToyDrafter, collect_codes, decode, make_model, make_plan, make_prompt, make_raster_layout
from toy_methods import EXACT_METHODS, METHODS, NEIGHBORS, VOCABULARY

from lantern_rt.methods import Autoregressive, Eagle, MethodConfig, RowParallel, Sampling
from lantern_rt.runtime.decode import DecodeStep
from lantern_rt.runtime.noise import Noise
from lantern_rt.runtime.state import ImageSequence
from lantern_rt.runtime.tree_drafts import TreeDraft, make_chain

CODES = 12
COLUMNS = 4
GUIDED = Sampling(cfg_scale=2.0, cfg_tokens=CODES // 2, temperature=0.8)
Ints = NDArray[np.int64]
# The preserved token of each cell; -1 marks a cell whose token is generated.
preserved_tokens = st.lists(st.sampled_from([-1, 0, 1, 2, 3, 4]), min_size=CODES, max_size=CODES).map(np.array)


def decode_with_preserved_tokens(
    preserved_codes: Sequence[Ints | None], method: MethodConfig, sampling: Sampling, row_ends: bool = False
) -> list[DecodeStep]:
    model = make_model(VOCABULARY, CODES, columns=COLUMNS, neighbors=NEIGHBORS, row_ends=row_ends)
    prompts = [replace(make_prompt(i, padding=i % 3), preserved_codes=row) for i, row in enumerate(preserved_codes)]
    return list(decode(model, prompts, range(len(preserved_codes)), sampling, method))


def generate_tokens_without_runtime(preserved_codes: Ints, sampling: Sampling) -> list[int]:
    model = make_model(VOCABULARY, CODES, columns=COLUMNS)
    noise = Noise(0)
    codes = list[int]()
    for cell, code in enumerate(preserved_codes.tolist()):
        log_probabilities = np.log(compute_next_distribution(model, make_prompt(0), codes, sampling))
        codes.append(code if code >= 0 else int((log_probabilities + noise.gumbel(cell, 1, VOCABULARY)[0]).argmax()))
    return codes


@pytest.mark.parametrize("method", EXACT_METHODS.values(), ids=str)
@given(preserved_codes=preserved_tokens, preserved_codes_of_neighbor=preserved_tokens)
@settings(max_examples=20, deadline=None)
def test_exact_methods_agree_around_preserved_tokens(
    method: MethodConfig, preserved_codes: Ints, preserved_codes_of_neighbor: Ints
) -> None:
    batch = [preserved_codes, None, preserved_codes_of_neighbor]
    codes = collect_codes(decode_with_preserved_tokens(batch, method, GUIDED), 3)
    assert codes[0] == generate_tokens_without_runtime(preserved_codes, GUIDED)
    assert codes == collect_codes(decode_with_preserved_tokens(batch, Autoregressive(), GUIDED), 3)


@pytest.mark.parametrize("method", [*METHODS.values(), RowParallel(window=COLUMNS)], ids=str)
@pytest.mark.parametrize("row_ends", [False, True])
@given(preserved_codes=preserved_tokens, greedy=st.booleans())
@settings(max_examples=10, deadline=None)
def test_every_method_leaves_preserved_tokens_unchanged(
    method: MethodConfig, row_ends: bool, preserved_codes: Ints, greedy: bool
) -> None:
    sampling = Sampling(temperature=0) if greedy else GUIDED
    steps = decode_with_preserved_tokens([preserved_codes, None], method, sampling, row_ends)
    codes = np.array(collect_codes(steps, 2))
    np.testing.assert_array_equal(codes[0][preserved_codes >= 0], preserved_codes[preserved_codes >= 0])
    assert (steps[-1].done, steps[-1].total) == (2 * CODES, 2 * CODES)


def test_consecutive_preserved_tokens_need_one_pass() -> None:
    preserved_codes = np.array([1, 1, 1, 1, -1, 2, 2, 2, -1, 3, 3, 3])
    steps = decode_with_preserved_tokens([preserved_codes], Autoregressive(), GUIDED)
    assert [len(step.parts[0].codes) for step in steps] == [1, 4, 7]  # the prefill's step commits the first token
    assert steps[-1].stats is not None
    assert steps[-1].stats.tokens_per_forward_pass == 2 / 3


def test_the_drafter_reads_preserved_tokens_in_limited_passes() -> None:
    preserved_codes = np.full(40, -1)
    preserved_codes[3:30] = 1
    prompts = [replace(make_prompt(0), preserved_codes=preserved_codes), make_prompt(1)]
    codes: dict[str, list[list[int]]] = {}
    for method in (Autoregressive(), Eagle(tree="chain-2")):
        model = replace(make_model(VOCABULARY, 40, columns=COLUMNS, past_length_multiple=4), max_nodes=8)
        codes[method.method] = collect_codes(decode(model, prompts, [1, 2], GUIDED, method), 2)
    assert codes["eagle"] == codes["ar"]
    assert isinstance(model.drafter, ToyDrafter)
    prefix = len(prompts[0].cond.embeds)
    assert 2 < max(nodes for _, nodes in model.drafter.passes) <= 8 + prefix


@pytest.mark.parametrize(
    ("tokens", "num_preserved_tokens"),
    [([2, 3, 3], 0), ([2, 3, 4], 2), ([2, 3, 3, 1], 3), ([0, 3, 3], 2)],
    ids=["not preserved", "another token", "too many", "another root"],
)
def test_a_draft_begins_with_the_preserved_tokens_of_its_image(tokens: list[int], num_preserved_tokens: int) -> None:
    prompt = replace(make_prompt(0), preserved_codes=np.array([-1, 3, 3, -1]))
    plan = make_plan(make_raster_layout(4), GUIDED, Autoregressive())
    sequence = ImageSequence(0, plan, prompt, seed=0)
    sequence.codes.append(2)
    TreeDraft(sequence, make_chain([2, 3, 3, 1], 2))
    with pytest.raises(AssertionError, match="preserved"):
        TreeDraft(sequence, make_chain(tokens, num_preserved_tokens))
