"""Codes that a request keeps: the same picture under every exact method, in any batch, and never another code there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from toy_engine import ToyDrafter, codes_of, decode, make_model, make_prompt, next_distribution

from lantern_rt.methods import Ar, Eagle, Lantern, LanternPlusPlus, MethodConfig, RowParallel, Sampling, Sjd
from lantern_rt.runtime.decode import Step
from lantern_rt.runtime.noise import Noise

VOCABULARY = 5
CODES = 12
COLUMNS = 4
NEAR = np.array([[n for n in range(VOCABULARY) if n != code] for code in range(VOCABULARY)])
EXACT = [Ar(), Eagle(tree="tree-3-210-100"), Eagle(tree="dynamic-8-3-3"), Sjd(window=3)]
RELAXED: list[MethodConfig] = [
    Lantern(tree="dynamic-8-3-3", neighbors=3, delta=0.2),
    LanternPlusPlus(tree="tree-3-210-100", neighbors=3),
    Sjd(window=3, neighbors=3, lambda_=1.5),
    RowParallel(window=COLUMNS),
]
GUIDED = Sampling(cfg_scale=2.0, cfg_tokens=CODES // 2, temperature=0.8)
Ints = NDArray[np.int64]
masks = st.lists(st.sampled_from([-1, 0, 1, 2, 3, 4]), min_size=CODES, max_size=CODES).map(np.array)


def steps(kept: Sequence[Ints | None], method: MethodConfig, sampling: Sampling, ends: bool = False) -> list[Step]:
    model = make_model(VOCABULARY, CODES, columns=COLUMNS, neighbors=NEAR, row_ends=ends)
    prompts = [replace(make_prompt(i, padding=i % 3), preserved=own) for i, own in enumerate(kept)]
    return list(decode(model, prompts, range(len(kept)), sampling, method))


def drawn_one_by_one(kept: Ints, sampling: Sampling) -> list[int]:
    """The codes of seed 0, from the table, without any engine or runtime."""
    model = make_model(VOCABULARY, CODES, columns=COLUMNS)
    noise = Noise(0)
    codes = list[int]()
    for cell, code in enumerate(kept.tolist()):
        values = np.log(next_distribution(model, make_prompt(0), codes, sampling))
        codes.append(code if code >= 0 else int((values + noise.gumbel(cell, 1, VOCABULARY)[0]).argmax()))
    return codes


@pytest.mark.parametrize("method", EXACT, ids=str)
@given(kept=masks, other=masks)
@settings(max_examples=20, deadline=None)
def test_exact_methods_draw_around_kept_codes_what_plain_decoding_would(
    method: MethodConfig, kept: Ints, other: Ints
) -> None:
    together = [kept, None, other]
    codes = codes_of(steps(together, method, GUIDED), 3)
    assert codes[0] == drawn_one_by_one(kept, GUIDED)
    assert codes == codes_of(steps(together, EXACT[0], GUIDED), 3)


@pytest.mark.parametrize("method", [*EXACT, *RELAXED], ids=str)
@pytest.mark.parametrize("ends", [False, True])
@given(kept=masks, greedy=st.booleans())
@settings(max_examples=10, deadline=None)
def test_a_kept_code_is_what_it_is_under_every_method(
    method: MethodConfig, ends: bool, kept: Ints, greedy: bool
) -> None:
    taken = steps([kept, None], method, Sampling(temperature=0) if greedy else GUIDED, ends)
    codes = np.array(codes_of(taken, 2))
    np.testing.assert_array_equal(codes[0][kept >= 0], kept[kept >= 0])
    assert (taken[-1].done, taken[-1].total) == (2 * CODES, 2 * CODES)


def test_runs_of_kept_codes_take_one_pass_and_those_at_the_end_none() -> None:
    kept = np.array([1, 1, 1, 1, -1, 2, 2, 2, -1, 3, 3, 3])
    taken = steps([kept], Ar(), GUIDED)
    assert [len(step.parts[0].codes) for step in taken] == [1, 4, 7]  # with the prefill, of the first code
    assert taken[-1].stats is not None
    assert taken[-1].stats.tokens_per_forward_pass == 2 / 3


def test_the_drafter_runs_a_long_row_of_kept_codes_in_pieces_that_fit() -> None:
    kept = np.full(40, -1)
    kept[3:30] = 1
    prompts = [replace(make_prompt(0), preserved=kept), make_prompt(1)]
    drawn: dict[str, list[list[int]]] = {}
    for method in (Ar(), Eagle(tree="chain-2")):
        model = replace(make_model(VOCABULARY, 40, columns=COLUMNS, round_span=4), max_nodes=8)
        drawn[method.method] = codes_of(decode(model, prompts, [1, 2], GUIDED, method), 2)
    assert drawn["eagle"] == drawn["ar"]
    assert isinstance(model.drafter, ToyDrafter)
    prefix = len(prompts[0].cond.embeds)
    assert 2 < max(nodes for _, nodes in model.drafter.passes) <= 8 + prefix
