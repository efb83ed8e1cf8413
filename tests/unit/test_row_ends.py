"""Images with row ends: after the last token of each grid row, the sequence has a fixed row-end token."""

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
from toy_distributions import compute_next_distribution
from toy_engine import (
    ToyModel,
    collect_codes,
    compute_likelihood,
    decode,
    make_model,
    make_plan,
    make_prompt,
    make_raster_layout,
)
from toy_methods import NEIGHBORS, RELAXED_METHODS, VOCABULARY

from lantern_rt.methods import Autoregressive, Eagle, MethodConfig, Sampling, SpeculativeJacobi
from lantern_rt.runtime.batch import Batch
from lantern_rt.runtime.head_drafter import DraftHeadState
from lantern_rt.runtime.heads import DraftHeads, draft_head_shapes
from lantern_rt.runtime.noise import Noise
from lantern_rt.runtime.state import ImageSequence, Prompt
from lantern_rt.runtime.tree import DraftTree

LUMINA = Path(__file__).parent.parent / "data/lumina-mgpt"
CODES = 12
EXACT_METHODS: dict[str, MethodConfig] = {
    "ar": Autoregressive(),
    "sjd": SpeculativeJacobi(window=5),
    "eagle, chain": Eagle(tree="chain-4"),
    "eagle, static": Eagle(tree="tree-3-210-100"),
    "eagle, dynamic": Eagle(tree="dynamic-16-5-3"),
}
METHODS = EXACT_METHODS | RELAXED_METHODS
SAMPLINGS = [
    Sampling(),
    Sampling(cfg_scale=2.0, temperature=0.8, top_k=4),
    Sampling(cfg_scale=2.0, cfg_tokens=5),
    Sampling(cfg_scale=3.0, temperature=0),
]


def make_row_end_model(columns: int, **options: Any) -> ToyModel:
    defaults = {"vocabulary": VOCABULARY, "codes": CODES, "past_length_multiple": 4, "neighbors": NEIGHBORS}
    return make_model(**(defaults | options), columns=columns, row_ends=True)


def add_row_ends(codes: Sequence[int], columns: int, num_codes: int = CODES) -> list[int]:
    """Return codes in raster order with a row-end token after each complete grid row except the last."""
    tokens: list[int] = []
    for cell, code in enumerate(codes):
        tokens += [code, VOCABULARY] if (cell + 1) % columns == 0 and cell + 1 < num_codes else [code]
    return tokens


def generate_tokens_without_runtime(model: ToyModel, prompt: Prompt, seed: int, sampling: Sampling) -> list[int]:
    codes: list[int] = []
    for cell in range(model.num_codes):
        tokens = add_row_ends(codes, model.raster.columns, model.num_codes)
        p = compute_next_distribution(model, prompt, tokens, sampling)
        noise = 0 if sampling.greedy else Noise(seed).gumbel(cell, 1, VOCABULARY)[0]
        with np.errstate(divide="ignore"):
            codes.append(int(np.argmax(np.log(p) + noise)))
    return codes


def generate_tokens(
    model: ToyModel, prompts: Sequence[Prompt], sampling: Sampling, method: MethodConfig
) -> list[list[int]]:
    return collect_codes(decode(model, prompts, range(len(prompts)), sampling, method), len(prompts))


@pytest.mark.parametrize("columns", [1, 2, 3, 6, 12])
@pytest.mark.parametrize("method", EXACT_METHODS.values(), ids=EXACT_METHODS)
def test_exact_methods_generate_the_simple_tokens_with_row_ends(method: MethodConfig, columns: int) -> None:
    prompts = [make_prompt(i, padding=i % 3) for i in range(3)]
    for sampling in SAMPLINGS:
        expected = [
            generate_tokens_without_runtime(make_row_end_model(columns), prompt, i, sampling)
            for i, prompt in enumerate(prompts)
        ]
        assert generate_tokens(make_row_end_model(columns), prompts, sampling, method) == expected


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["sampling", "guided", "guided for five", "greedy"])
def test_other_grids_in_the_batch_do_not_change_an_image(method: MethodConfig, sampling: Sampling) -> None:
    model = make_row_end_model(3)
    layouts = [make_raster_layout(*size, VOCABULARY) for size in ((12, 3), (8, 2), (10, 5))]

    def generate_batch(indices: Sequence[int]) -> list[list[int]]:
        batch = Batch(model)
        plans = [make_plan(layout, sampling, method) for layout in layouts]
        sequences = [ImageSequence(i, plans[i], make_prompt(i), i) for i in indices]
        batch.add(sequences)
        while batch.active_sequences:
            batch.step()
        return [sequence.codes[: sequence.plan.layout.num_codes] for sequence in sequences]

    assert generate_batch(range(3)) == [*generate_batch([0]), *generate_batch([1]), *generate_batch([2])]


@pytest.mark.parametrize("columns", [1, 3])
def test_row_ends_need_no_additional_forward_passes(columns: int) -> None:
    *_, last = decode(make_row_end_model(columns), [make_prompt(0)], [0], Sampling(), Autoregressive())
    assert last.stats is not None
    assert last.stats.target_passes == CODES


@pytest.mark.parametrize("tree", ["chain-4", "dynamic-5-4-1"])
def test_a_draft_may_continue_in_the_next_grid_row(tree: str) -> None:
    """Check that all 4 draft tokens are accepted if the drafter has the target's distribution."""
    model = make_row_end_model(3, agreement=1.0, codes=42)
    steps = [*decode(model, [make_prompt(0)], [0], Sampling(), Eagle(tree=tree))]
    # Each step commits 4 draft tokens and a bonus token.
    assert all(len(part.codes) == 5 for step in steps[1:-1] for part in step.parts)


@pytest.mark.parametrize("columns", [1, 3, 5])
@pytest.mark.parametrize("tree", ["", "chain-4", "tree-3-210-100", "dynamic-16-5-3"])
def test_heads_use_states_that_predict_codes_and_not_row_ends(
    tree: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use draft heads that return the position of their hidden state, and compare this position with the expected."""
    rng = np.random.default_rng(1)
    position_index = 3  # index of the position in the toy's hidden state
    prefix = 3
    tables = {name: rng.normal(0, 1, shape) for name, shape in draft_head_shapes(VOCABULARY, 6, 1, 1).items()}
    tables["states"] = np.zeros((2, 6, 1))
    tables["gate"] = np.zeros((6, 1))
    tables["gate_bias"] = np.zeros(1)
    tables["states"][:, position_index] = tables["gate"][position_index] = 0.01
    model = replace(make_row_end_model(columns, codes=17), heads=DraftHeads(**tables), drafter=None)
    unaccepted_cells = []
    update = DraftHeadState.update

    def update_and_check(state: DraftHeadState, commit: Any) -> None:
        update(state, commit)
        find_position = state.sequence.plan.raster_layout.find_token_position
        expected_states = 0.01 * (prefix - 1 + np.array([find_position(cell) for cell in range(17)]))
        num_codes = len(state.sequence.codes)
        np.testing.assert_allclose(state.context[:num_codes, 0, 0], expected_states[:num_codes], rtol=1e-6)
        for cell, unaccepted_position in state.unaccepted.items():
            np.testing.assert_allclose(unaccepted_position.gate, 1 / (1 + np.exp(-expected_states[cell])), rtol=1e-6)
            unaccepted_cells.append(cell)

    monkeypatch.setattr(DraftHeadState, "update", update_and_check)
    prompts = [make_prompt(i, padding=i) for i in range(2)]
    method = Eagle(tree=tree, drafter="heads") if tree else SpeculativeJacobi(window=5)
    for sampling in SAMPLINGS:
        expected = [generate_tokens_without_runtime(model, prompt, i, sampling) for i, prompt in enumerate(prompts)]
        assert generate_tokens(model, prompts, sampling, method) == expected
    assert 0 in {cell % columns for cell in unaccepted_cells}


def test_the_likelihood_includes_codes_but_not_row_ends() -> None:
    model = make_row_end_model(3)
    sampling = SAMPLINGS[1]
    prompt = make_prompt(1)
    codes = generate_tokens_without_runtime(model, prompt, 7, sampling)
    unfiltered = sampling.model_copy(update={"top_k": 0})
    nats = [
        -np.log(compute_next_distribution(model, prompt, add_row_ends(codes[:cell], 3), unfiltered)[code])
        for cell, code in enumerate(codes)
    ]
    assert compute_likelihood(model, prompt, np.array(codes), sampling).nats == pytest.approx(np.mean(nats), abs=1e-5)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 99), min_size=1, max_size=12), st.integers(1, 5), st.integers(0, 6))
def test_a_draft_chain_contains_the_row_ends_between_its_codes(codes: list[int], columns: int, first_cell: int) -> None:
    raster = make_raster_layout(columns * 30, columns, 100)
    tree = DraftTree(np.array(codes), np.arange(len(codes)) - 1)
    layout = raster.lay_out_tree(tree, first_cell)
    tokens = raster.insert_row_ends(np.array([*[0] * first_cell, *codes, 0]))[:-1]
    start = raster.find_token_position(first_cell)
    assert layout.tokens.tolist() == tokens[start:].tolist()
    assert layout.positions.tolist() == list(range(start, start + len(layout.tokens)))
    assert np.array_equal(layout.ancestor_mask, np.tri(len(layout.tokens), dtype=bool))
    assert [start + last + 1 for last in layout.find_sampling_nodes(np.arange(len(codes)))] == [
        raster.find_token_position(first_cell + 1 + n) for n in range(len(codes))
    ]
    assert layout.find_path_nodes(range(len(codes))).tolist() == list(range(len(layout.tokens)))


def test_nodes_attend_only_to_row_ends_of_their_ancestors() -> None:
    tree = DraftTree(np.array([1, 2, 3, 4, 5]), np.array([-1, 0, 0, 1, 2]))
    layout = make_raster_layout(9, 3, 9).lay_out_tree(tree, 1)  # the root is in cell 1, so depth 1 is column 2
    assert layout.tokens.tolist() == [1, 2, 9, 3, 9, 4, 5]
    assert layout.positions.tolist() == [1, 2, 3, 2, 3, 4, 4]
    attended = [[0], [0, 1], [0, 1, 2], [0, 3], [0, 3, 4], [0, 1, 2, 5], [0, 3, 4, 6]]
    assert [np.flatnonzero(row).tolist() for row in layout.ancestor_mask] == attended
    assert layout.find_sampling_nodes(np.arange(5)).tolist() == [0, 2, 4, 5, 6]
    assert layout.find_path_nodes([0, 2, 4]).tolist() == [0, 3, 4, 6]


@pytest.mark.parametrize("shape", [(24, 24), (18, 32), (32, 16)], ids="official_forced_{0[0]}x{0[1]}".format)
def test_row_ends_are_where_lumina_puts_them(shape: tuple[int, int]) -> None:
    rows, columns = shape
    official = np.load(LUMINA / "golden.npz")[f"official_forced_{rows}x{columns}"].tolist()
    tokens = json.loads((LUMINA / "protocol.json").read_text())["tokens"]
    row_end, end_of_image = (tokens[name][0] for name in END_TOKEN_NAMES)
    codes = 2 * rows * 2 * columns
    layout = make_raster_layout(codes, 2 * columns, row_end)
    ours = layout.insert_row_ends(np.full(codes, -1)).tolist()
    assert [*ours, row_end, end_of_image] == official  # our images omit the last row end and the end token
    assert layout.num_tokens == len(official) - 2


END_TOKEN_NAMES = ("<reserved08799>", "<eoss>")
