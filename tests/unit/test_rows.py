"""Row-parallel decoding (method `rows`), compared with a simple implementation that generates token by token."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chisquare
from toy_distributions import compute_naive_distribution
from toy_engine import AnyOrderTarget, ToyModel, ToyTarget, collect_codes, decode, make_prompt, make_raster_layout

from lantern_rt import Pipeline
from lantern_rt.methods import Autoregressive, Eagle, MethodConfig, RowParallel, Sampling, SpeculativeJacobi
from lantern_rt.results import StreamStep
from lantern_rt.runtime.noise import Noise
from lantern_rt.runtime.raster import TwoGridLayout
from lantern_rt.runtime.rows import TokenGrid
from lantern_rt.runtime.state import Prompt
from lantern_rt.service import Service

GUIDED = Sampling(cfg_scale=2.0, temperature=0.9)
HALF_GUIDED = Sampling(cfg_scale=2.0, cfg_tokens="50%")
Known = dict[int, int]  # known tokens by cell


def make_row_model(rows: int, columns: int, vocabulary: int = 5, ends: bool = False, first_codes: int = 0) -> ToyModel:
    row_end = vocabulary if ends else None
    target = AnyOrderTarget(vocabulary, row_end=row_end)
    layout = make_raster_layout(rows * columns, columns, row_end)
    if first_codes:
        layout = TwoGridLayout(first_codes + rows * columns, columns, first_grid=(1, first_codes))
    return ToyModel(target, None, 200, image=layout)


def generate_tokens(
    model: ToyModel, prompts: Sequence[Prompt], window: int, seeds: Sequence[int], sampling: Sampling, drafts: int = 0
) -> list[list[int]]:
    method = RowParallel(window=window, drafts=drafts)
    return collect_codes(decode(model, prompts, seeds, sampling, method), len(prompts))


def compute_distribution(
    model: ToyModel, prompt: Prompt, attended: Known, sampling: Sampling, index: int
) -> NDArray[np.float64]:
    """Return the target's distribution of a token, float64 `[vocabulary]`, without the runtime."""
    target = model.target
    rows = []
    assert isinstance(target, ToyTarget)
    for prefix_row in (prompt.cond, prompt.uncond):
        prefix_hashes = target.hash_prefix(prefix_row.embeds)[prefix_row.is_real_token]
        cells = np.array([*attended], np.int64)
        codes = np.array([*attended.values()], np.int64)
        hashes = np.append(prefix_hashes, target.hash_codes(codes, len(prefix_row.is_real_token) + cells))
        rows.append(target.compute_logits(hashes.sum(dtype=np.uint64, keepdims=True))[0].astype(np.float64))
    scale = sampling.cfg_scale if index < sampling.count_guided_tokens(model.num_codes) else 1.0
    return compute_naive_distribution(rows[1] + scale * (rows[0] - rows[1]), sampling)


def find_attended_cells(row: int, count: int, columns: int, window: int) -> set[int]:
    """Return the cells to which a row's next token attends; each row is `window` columns ahead of the row below."""
    return {
        earlier_row * columns + earlier_column
        for earlier_row in range(row + 1)
        for earlier_column in range(min(columns, count + (row - earlier_row) * window))
    }


def generate_tokens_without_runtime(
    model: ToyModel, prompt: Prompt, window: int, sampling: Sampling, choose_token: Callable[[int, NDArray], int]
) -> list[int]:
    """Return the tokens of an image in raster order; row ends are cells whose token is known before the row's.

    Tokens before the grid attend to all before them, and all others attend to these.
    """
    ends = model.row_end is not None
    columns = model.raster.columns + ends
    start = model.raster.grid_start
    known: Known = {}
    count = start + columns * (model.num_codes - start) // model.raster.columns
    if model.row_end is not None:
        known = dict.fromkeys(range(columns - 1, count, columns), model.row_end)
    codes: list[int] = []
    for cell in (p for p in range(count) if p not in known):
        row, column = divmod(cell - start, columns)
        visible = {*range(start), *(start + p for p in find_attended_cells(row, column, columns, window))}
        attended = {p: known[p] for p in visible if p < cell}
        if column == 0 and row > 0 and window < columns:
            attended[cell - 1] = known[cell - 1 if ends else cell - columns + window - 1]
        codes.append(choose_token(len(codes), compute_distribution(model, prompt, attended, sampling, len(codes))))
        known[cell] = codes[-1]
    return codes


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize(
    "model",
    [
        make_row_model(3, 4),
        make_row_model(3, 4, ends=True),
        make_row_model(3, 3, first_codes=3),
        make_row_model(9, 1, first_codes=1),
    ],
    ids=["", "with row ends", "after three tokens", "one column after a token"],
)
@given(
    preserved_codes=st.lists(st.sampled_from([-1, 0, 1, 2]), min_size=12, max_size=12).map(np.array),
    window=st.integers(1, 4),
)
@settings(max_examples=10, deadline=None)
def test_preserved_tokens_agree_with_the_simple_implementation(
    preserved_codes: NDArray[np.int64], window: int, model: ToyModel, drafts: int
) -> None:
    preserved_codes = preserved_codes[: model.num_codes]
    prompt = make_prompt(3, padding=1)
    noise = Noise(5)

    def choose_token(cell: int, p: NDArray) -> int:
        if preserved_codes[cell] >= 0:
            return int(preserved_codes[cell])
        return int((np.log(p) + noise.gumbel(cell, 1, len(p))[0]).argmax())

    expected = generate_tokens_without_runtime(model, prompt, window, GUIDED, choose_token)
    edit = replace(prompt, preserved_codes=preserved_codes)
    assert generate_tokens(model, [edit], window, [5], GUIDED, drafts) == [expected]


@pytest.mark.parametrize("sampling", [Sampling(), GUIDED, HALF_GUIDED, Sampling(cfg_scale=2.0, temperature=0)])
@pytest.mark.parametrize("ends", [False, True], ids=["", "with row ends"])
@pytest.mark.parametrize(
    ("rows", "columns", "window"),
    [(3, 4, 1), (4, 3, 2), (3, 5, 3), (5, 6, 2), (3, 4, 7), (4, 3, 4), (3, 4, 4), (4, 1, 1)],
)
def test_rows_generate_the_tokens_of_the_simple_implementation(
    rows: int, columns: int, window: int, sampling: Sampling, ends: bool
) -> None:
    model = make_row_model(rows, columns, ends=ends)
    prompt = make_prompt(3, padding=1)
    for seed in range(3):
        noise = Noise(seed)

        def choose_token(cell: int, p: NDArray, noise: Noise = noise) -> int:
            gumbel = 0 if sampling.greedy else noise.gumbel(cell, 1, len(p))[0]
            return int(np.argmax(np.log(p) + gumbel))

        expected = [generate_tokens_without_runtime(model, prompt, window, sampling, choose_token)]
        for drafts in (0, 1, 2, 5):
            assert generate_tokens(model, [prompt], window, [seed], sampling, drafts) == expected
        two_node_model = replace(make_row_model(rows, columns, ends=ends), max_nodes=2)
        assert generate_tokens(two_node_model, [prompt], window, [seed], sampling, drafts=1) == expected
        passes: list[tuple[int, int]] = two_node_model.target.passes  # type: ignore[attr-defined]
        assert {nodes for _, nodes in passes[1:]} == {2}
        row_counts = {1, 2} if sampling == HALF_GUIDED else {1 + sampling.uses_guidance}
        assert {num_rows for num_rows, _ in passes} == row_counts


def test_rows_have_the_joint_distribution_of_the_simple_one() -> None:
    model = make_row_model(2, 2, vocabulary=3)
    prompt = make_prompt(1)
    count = 6000
    expected = np.zeros((3,) * 4)
    for codes in itertools.product(range(3), repeat=4):
        probability = 1.0

        def choose_token(cell: int, p: NDArray, codes: tuple[int, ...] = codes) -> int:
            nonlocal probability
            probability *= p[codes[cell]]
            return codes[cell]

        generate_tokens_without_runtime(model, prompt, 1, GUIDED, choose_token)
        expected[codes] = probability
    assert expected.sum() == pytest.approx(1)
    counts = np.zeros_like(expected)
    for codes in generate_tokens(model, [prompt] * count, 1, range(count), GUIDED):
        counts[tuple(codes)] += 1
    assert chisquare(counts.ravel(), count * expected.ravel()).pvalue > 1e-4


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 7), st.integers(1, 9), st.integers(1, 10), st.integers(0, 4),
    st.sampled_from([1, 2, 5, 64]), st.integers(0, 2**32 - 1), st.booleans(),
)  # fmt: skip
def test_every_cell_follows_the_cells_it_attends_to(
    rows: int, codes: int, window: int, max_drafts: int, max_nodes: int, seed: int, ends: bool
) -> None:
    grid = TokenGrid(make_raster_layout(rows * codes, codes, 9 if ends else None), [0], window, max_nodes=max_nodes)
    columns = grid.columns
    window = grid.window
    passes = 0
    rng = np.random.default_rng(seed)
    while -1 in grid.cells:
        known = {cell for cell, code in enumerate(grid.cells) if code >= 0}
        grid.num_drafts = int(rng.integers(0, max_drafts + 1))
        batch = grid.plan_next_pass()
        passes = passes + 1
        assert 0 < len(batch.tokens) <= max_nodes
        attending_cells = batch.cells[batch.num_attended_tokens > 0]
        for cells in (attending_cells, batch.cells[batch.sampled_nodes] + 1, batch.cached_cells):
            assert len({*cells.tolist()}) == len(cells)
        assert not {*attending_cells.tolist()} & {*batch.cached_cells.tolist()}
        is_stand_in = batch.num_attended_tokens == 0
        assert (batch.tree_structure.ancestor_mask.sum(0)[is_stand_in] == 1).all(), "another node attends to a stand-in"
        random_codes = rng.integers(0, 2, len(batch.sampled_nodes))  # some drafts are right
        accepted, generate = grid.verify_drafts(batch, random_codes)
        assert len(generate) + len(accepted) > 0  # every pass makes progress
        assert not known & {*generate.tolist()}
        for cell in generate.tolist():
            attended = find_attended_cells(*divmod(cell, columns), columns, window)
            assert {c for c in attended if c < cell} <= known | {*generate.tolist()}
        counts = [sum(grid.cells[row * columns + c] >= 0 for c in range(codes)) for row in range(rows)]
        assert grid.lengths == [columns if count == codes else count for count in counts]
        assert {*batch.cells[accepted].tolist()} <= {cell for cell, code in enumerate(grid.cells) if code >= 0}
    if max_nodes == 64:
        assert passes <= min(window, codes) * (rows - 1) + codes - 1
        assert max_drafts or passes == min(window, codes) * (rows - 1) + codes - 1


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3), st.integers(1, 5), st.booleans())
def test_the_number_of_drafts_does_not_change_an_image(drafts: int, window: int, ends: bool) -> None:
    model = make_row_model(4, 4, ends=ends)
    prompts = [make_prompt(i) for i in range(3)]
    seeds = [5, 6, 7]
    expected = generate_tokens(model, prompts, window, seeds, GUIDED)
    method = RowParallel(window=window, drafts=drafts)
    assert collect_codes(decode(model, prompts, seeds, GUIDED, method, max_images=2), 3) == expected


@pytest.mark.parametrize("ends", [False, True], ids=["", "with row ends"])
def test_a_window_of_all_columns_generates_the_image_of_ar(ends: bool) -> None:
    model = make_row_model(3, 4, ends=ends)
    prompt = make_prompt(2)
    expected_codes = collect_codes(decode(model, [prompt], [5], GUIDED, Autoregressive()), 1)
    assert generate_tokens(model, [prompt], 4, [5], GUIDED) == expected_codes
    assert generate_tokens(model, [prompt], 1, [5], GUIDED) != expected_codes


@pytest.mark.parametrize("method", [SpeculativeJacobi(window=4), Eagle(tree="chain-2"), Autoregressive()])
def test_other_methods_in_the_batch_do_not_change_an_image(pipe: Pipeline, method: MethodConfig) -> None:
    alone = pipe("red cube", seed=9, method="rows:window=2").codes[0]
    with Service(pipe, max_images_per_pass=4) as service:
        news_queue: queue.Queue[StreamStep | BaseException] = queue.Queue()
        for seed in (1, 2):
            service.submit(lambda news: None, "a green sphere", seed=seed, method=method)
        service.submit(news_queue.put, "red cube", seed=9, method="rows:window=2")
        while not isinstance(news := news_queue.get(timeout=60), StreamStep) or news.stats is None:
            assert not isinstance(news, BaseException), news
    assert np.array_equal(news.codes[0], alone)


def test_steps_show_all_generated_cells(pipe: Pipeline) -> None:
    steps = list(pipe.stream("red cube", seed=1, method="rows:window=2"))
    last_step = steps[-1]
    manifest = pipe.bundle.manifest
    partial_steps = [step for step in steps if (step.cells[0] < 0).any()]
    # Some steps have tokens of a lower row before the row above is complete.
    assert any((step.cells[0] >= 0).sum() > len(step.codes[0]) for step in partial_steps)
    for step in partial_steps:
        known = step.cells[0] >= 0
        assert np.array_equal(step.cells[0][known], last_step.codes[0][known])
        assert step.done == known.sum()
        assert np.array_equal(step.codes[0], last_step.codes[0][: len(step.codes[0])])
    pixels = np.array(partial_steps[0].image(0))
    rows, columns = manifest.grid_rows, manifest.grid_columns
    cells = (partial_steps[0].cells[0] >= 0).reshape(rows, columns)
    is_grey = (pixels == 128).all(2).reshape(rows, -1, columns, pixels.shape[1] // columns)
    assert is_grey.all((1, 3))[~cells].all()
    assert np.array_equal(np.concatenate([step.new_codes[0] for step in steps]), last_step.codes[0])
