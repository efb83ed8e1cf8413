"""Rows that end with a token which is no choice: on toy engines that notice every wrong mask, position or commit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_engine import (
    ToyModel,
    codes_of,
    decode,
    likelihood,
    make_model,
    make_prompt,
    next_distribution,
    plan_of,
    raster_layout,
)

from lantern_rt.methods import Ar, Eagle, Lantern, LanternPlusPlus, MethodConfig, Sampling, Sjd
from lantern_rt.runtime.batch import Batch
from lantern_rt.runtime.head_drafter import DraftHeadState
from lantern_rt.runtime.heads import DraftHeads, head_shapes
from lantern_rt.runtime.noise import Noise
from lantern_rt.runtime.state import ImageSequence, Prompt
from lantern_rt.runtime.tree import DraftTree

LUMINA = Path(__file__).parent.parent / "data/lumina-mgpt"
VOCABULARY = 5
CODES = 12
NEAR = np.array([[n for n in range(VOCABULARY) if n != code] for code in range(VOCABULARY)])
EXACT: dict[str, MethodConfig] = {
    "ar": Ar(),
    "sjd": Sjd(window=5),
    "eagle, chain": Eagle(tree="chain-4"),
    "eagle, static": Eagle(tree="tree-3-210-100"),
    "eagle, dynamic": Eagle(tree="dynamic-16-5-3"),
}
RELAXED: dict[str, MethodConfig] = {
    "lantern": Lantern(tree="dynamic-8-3-3", neighbors=3, delta=0.2),
    "lantern++": LanternPlusPlus(tree="tree-3-210-100", neighbors=3),
    "sjd, relaxed": Sjd(window=3, neighbors=3, lambda_=1.5),
}
SAMPLINGS = [
    Sampling(),
    Sampling(cfg_scale=2.0, temperature=0.8, top_k=4),
    Sampling(cfg_scale=2.0, cfg_tokens=5),
    Sampling(cfg_scale=3.0, temperature=0),
]


def model(columns: int, **options: Any) -> ToyModel:
    given: dict[str, Any] = {"vocabulary": VOCABULARY, "codes": CODES, "round_span": 4, "neighbors": NEAR}
    return make_model(**(given | options), columns=columns, row_ends=True)


def spelled(codes: Sequence[int], columns: int, codes_in_all: int = CODES) -> list[int]:
    """The tokens of codes, and of the end of a row that follows them."""
    tokens: list[int] = []
    for cell, code in enumerate(codes):
        tokens += [code, VOCABULARY] if (cell + 1) % columns == 0 and cell + 1 < codes_in_all else [code]
    return tokens


def plain(one: ToyModel, prompt: Prompt, seed: int, sampling: Sampling) -> list[int]:
    """The codes by the definition, from the table."""
    codes: list[int] = []
    for cell in range(one.num_codes):
        p = next_distribution(one, prompt, spelled(codes, one.raster.columns, one.num_codes), sampling)
        noise = 0 if sampling.greedy else Noise(seed).gumbel(cell, 1, VOCABULARY)[0]
        with np.errstate(divide="ignore"):
            codes.append(int(np.argmax(np.log(p) + noise)))
    return codes


def decoded(one: ToyModel, prompts: Sequence[Prompt], sampling: Sampling, method: MethodConfig) -> list[list[int]]:
    return codes_of(decode(one, prompts, range(len(prompts)), sampling, method), len(prompts))


@pytest.mark.parametrize("columns", [1, 2, 3, 6, 12])
@pytest.mark.parametrize("method", EXACT.values(), ids=EXACT)
def test_every_exact_method_draws_each_code_after_the_ends_of_rows_before_it(
    method: MethodConfig, columns: int
) -> None:
    prompts = [make_prompt(i, padding=i % 3) for i in range(3)]
    for sampling in SAMPLINGS:
        expected = [plain(model(columns), prompt, i, sampling) for i, prompt in enumerate(prompts)]
        assert decoded(model(columns), prompts, sampling, method) == expected


@pytest.mark.parametrize("method", [*EXACT.values(), *RELAXED.values()], ids=[*EXACT, *RELAXED])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["sampling", "guided", "guided for five", "greedy"])
def test_pictures_of_other_shapes_that_share_passes_change_nothing(method: MethodConfig, sampling: Sampling) -> None:
    one = model(3)
    layouts = [raster_layout(*size, VOCABULARY) for size in ((12, 3), (8, 2), (10, 5))]

    def run(numbers: Sequence[int]) -> list[list[int]]:
        batch = Batch(one)
        plans = [plan_of(layout, sampling, method) for layout in layouts]
        requests = [ImageSequence(i, plans[i], make_prompt(i), i) for i in numbers]
        batch.join(requests)
        while batch.active:
            batch.step()
        return [request.codes[: request.layout.num_codes] for request in requests]

    assert run(range(3)) == [*run([0]), *run([1]), *run([2])]


@pytest.mark.parametrize("columns", [1, 3])
def test_the_end_of_a_row_takes_no_pass_of_its_own(columns: int) -> None:
    *_, last = decode(model(columns), [make_prompt(0)], [0], Sampling(), Ar())
    assert last.stats is not None
    assert last.stats.target_passes == CODES


@pytest.mark.parametrize("tree", ["chain-4", "dynamic-5-4-1"])
def test_drafts_go_on_beyond_the_end_of_a_row(tree: str) -> None:
    """A perfect drafter has every chain accepted whole, wherever rows end."""
    steps = [*decode(model(3, agreement=1.0, codes=42), [make_prompt(0)], [0], Sampling(), Eagle(tree=tree))]
    assert all(len(part.codes) == 5 for step in steps[1:-1] for part in step.parts)


@pytest.mark.parametrize("columns", [1, 3, 5])
@pytest.mark.parametrize("tree", ["", "chain-4", "tree-3-210-100", "dynamic-16-5-3"])
def test_heads_read_the_states_from_which_codes_are_drawn(
    tree: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States know their position. A state in front of the end of a row, where there is one, gives no code."""
    rng = np.random.default_rng(1)  # `at`: the position among the numbers of a toy's state
    at = 3
    prefix = 3
    tables = {name: rng.normal(0, 1, shape) for name, shape in head_shapes(VOCABULARY, 6, 1, 1).items()}
    tables["states"] = np.zeros((2, 6, 1))
    tables["gate"] = np.zeros((6, 1))
    tables["gate_bias"] = np.zeros(1)
    tables["states"][:, at] = tables["gate"][at] = 0.01
    one = replace(model(columns, codes=17), heads=DraftHeads(**tables), drafter=None)
    unaccepted = []
    update = DraftHeadState.update

    def checked(state: DraftHeadState, commit: Any) -> None:
        update(state, commit)
        before = 0.01 * (prefix - 1 + np.array([state.sequence.raster.position(cell) for cell in range(17)]))
        done = len(state.sequence.codes)
        np.testing.assert_allclose(state.context[:done, 0, 0], before[:done], rtol=1e-6)
        for cell, late in state.unaccepted.items():
            np.testing.assert_allclose(late.gate, 1 / (1 + np.exp(-before[cell])), rtol=1e-6)
            unaccepted.append(cell)

    monkeypatch.setattr(DraftHeadState, "update", checked)
    prompts = [make_prompt(i, padding=i) for i in range(2)]
    method = Eagle(tree=tree, drafter="heads") if tree else Sjd(window=5)
    for sampling in SAMPLINGS:
        expected = [plain(one, prompt, i, sampling) for i, prompt in enumerate(prompts)]
        assert decoded(one, prompts, sampling, method) == expected
    assert 0 in {cell % columns for cell in unaccepted}


def test_likelihoods_count_codes_and_not_the_ends_of_rows() -> None:
    one = model(3)
    sampling = SAMPLINGS[1]
    prompt = make_prompt(1)
    codes = plain(one, prompt, 7, sampling)
    unfiltered = sampling.model_copy(update={"top_k": 0})
    nats = [
        -np.log(next_distribution(one, prompt, spelled(codes[:cell], 3), unfiltered)[code])
        for cell, code in enumerate(codes)
    ]
    assert likelihood(one, prompt, np.array(codes), sampling).nats == pytest.approx(np.mean(nats), abs=1e-5)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 99), min_size=1, max_size=12), st.integers(1, 5), st.integers(0, 6))
def test_a_chain_is_laid_out_as_its_codes_are_spelled(codes: list[int], columns: int, first: int) -> None:
    raster = raster_layout(columns * 30, columns, 100)
    tree = DraftTree(np.array(codes), np.arange(len(codes)) - 1)
    laid = raster.lay_out(tree, first)
    whole = raster.insert_tokens(np.array([*[0] * first, *codes, 0]))[:-1]
    start = raster.position(first)
    assert laid.tokens.tolist() == whole[start:].tolist()
    assert laid.positions.tolist() == list(range(start, start + len(laid.tokens)))
    assert np.array_equal(laid.ancestors, np.tri(len(laid.tokens), dtype=bool))
    assert [start + last + 1 for last in laid.sampling_nodes(np.arange(len(codes)))] == [
        raster.position(first + 1 + n) for n in range(len(codes))
    ]
    assert laid.path_nodes(range(len(codes))).tolist() == list(range(len(laid.tokens)))


def test_children_see_the_end_of_their_own_row_and_not_that_of_a_sibling() -> None:
    tree = DraftTree(np.array([1, 2, 3, 4, 5]), np.array([-1, 0, 0, 1, 2]))
    laid = raster_layout(9, 3, 9).lay_out(tree, 1)  # nodes of depth 1 end a row
    assert laid.tokens.tolist() == [1, 2, 9, 3, 9, 4, 5]
    assert laid.positions.tolist() == [1, 2, 3, 2, 3, 4, 4]
    seen = [[0], [0, 1], [0, 1, 2], [0, 3], [0, 3, 4], [0, 1, 2, 5], [0, 3, 4, 6]]
    assert [np.flatnonzero(row).tolist() for row in laid.ancestors] == seen
    assert laid.sampling_nodes(np.arange(5)).tolist() == [0, 2, 4, 5, 6]
    assert laid.path_nodes([0, 2, 4]).tolist() == [0, 3, 4, 6]


@pytest.mark.parametrize("shape", [(24, 24), (18, 32), (32, 16)], ids="official_forced_{0[0]}x{0[1]}".format)
def test_sequences_of_official_sizes_end_their_rows_where_the_published_constraint_does(shape: tuple[int, int]) -> None:
    high, wide = shape
    official = np.load(LUMINA / "golden.npz")[f"official_forced_{high}x{wide}"].tolist()
    row_end, end_of_image = (json.loads((LUMINA / "protocol.json").read_text())["tokens"][name][0] for name in NAMES)
    codes = 2 * high * 2 * wide
    ours = raster_layout(codes, 2 * wide, row_end)
    assert [
        *ours.insert_tokens(np.full(codes, -1)).tolist(),
        row_end,
        end_of_image,
    ] == official  # these two draw nothing
    assert ours.num_tokens == len(official) - 2


NAMES = ("<reserved08799>", "<eoss>")
