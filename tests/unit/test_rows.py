"""Row-parallel decoding draws what its definition says, written down once more here, plainly and for one picture."""

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
from toy_engine import AnyOrder, ToyModel, ToyTarget, codes_of, decode, make_prompt, naive_distribution, raster_layout

from lantern_rt import Pipeline
from lantern_rt.methods import Ar, Eagle, MethodConfig, RowParallel, Sampling, Sjd
from lantern_rt.results import StreamStep
from lantern_rt.runtime.noise import Noise
from lantern_rt.runtime.rows import Grid
from lantern_rt.runtime.state import Prompt
from lantern_rt.service import Service

GUIDED = Sampling(cfg_scale=2.0, temperature=0.9)
HALF = Sampling(cfg_scale=2.0, cfg_tokens="50%")
Known = dict[int, int]  # codes by cell


def toy(rows: int, columns: int, vocabulary: int = 5, ends: bool = False) -> ToyModel:
    row_end = vocabulary if ends else None
    target = AnyOrder(vocabulary, row_end=row_end)
    return ToyModel(target, None, 200, image=raster_layout(rows * columns, columns, row_end))


def drawn(
    model: ToyModel, prompts: Sequence[Prompt], window: int, seeds: Sequence[int], sampling: Sampling, drafts: int = 0
) -> list[list[int]]:
    method = RowParallel(window=window, drafts=drafts)
    return codes_of(decode(model, prompts, seeds, sampling, method), len(prompts))


def distribution(model: ToyModel, prompt: Prompt, seen: Known, sampling: Sampling, index: int) -> NDArray[np.float64]:
    """The target's distribution of code `index` after these tokens in these cells, from its table."""
    target = model.target
    sides = []
    assert isinstance(target, ToyTarget)
    for side in (prompt.cond, prompt.uncond):
        parts = target.prefix_hash(side.embeds)[side.real]
        cells = np.array([*seen], np.int64)
        hashes = np.append(parts, target.code_hash(np.array([*seen.values()], np.int64), len(side.real) + cells))
        sides.append(target.logits(hashes.sum(dtype=np.uint64, keepdims=True))[0].astype(np.float64))
    scale = sampling.cfg_scale if index < sampling.count_guided(model.num_codes) else 1.0
    return naive_distribution(sides[1] + scale * (sides[0] - sides[1]), sampling)


def sight(row: int, count: int, columns: int, window: int) -> set[int]:
    """The cells that a row sees which has so many tokens."""
    return {q * columns + d for q in range(row + 1) for d in range(min(columns, count + (row - q) * window))}


def told(
    model: ToyModel, prompt: Prompt, window: int, sampling: Sampling, draw: Callable[[int, NDArray], int]
) -> list[int]:
    """The picture by the definition, cell by cell in raster order; `draw(cell, p)` draws from a distribution.

    What ends a row is a cell of its own, known before those of its row.
    """
    ends = model.row_end is not None
    columns = model.raster.columns + ends
    known: Known = {}
    count = columns * model.num_codes // model.raster.columns
    if model.row_end is not None:
        known = dict.fromkeys(range(columns - 1, count, columns), model.row_end)
    codes: list[int] = []
    for place in (p for p in range(count) if p not in known):
        row, column = divmod(place, columns)
        seen = {p: known[p] for p in sight(row, column, columns, window) if p < place}
        if column == 0 and row > 0 and window < columns:
            seen[place - 1] = known[place - 1 if ends else place - columns + window - 1]
        codes.append(draw(len(codes), distribution(model, prompt, seen, sampling, len(codes))))
        known[place] = codes[-1]
    return codes


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("ends", [False, True], ids=["", "with row ends"])
@given(kept=st.lists(st.sampled_from([-1, 0, 1, 2]), min_size=12, max_size=12).map(np.array), window=st.integers(1, 4))
@settings(max_examples=10, deadline=None)
def test_kept_codes_stand_where_the_definition_would_draw(
    kept: NDArray[np.int64], window: int, ends: bool, drafts: int
) -> None:
    model = toy(3, 4, ends=ends)
    prompt = make_prompt(3, padding=1)
    noise = Noise(5)

    def draw(cell: int, p: NDArray) -> int:
        return int((np.log(p) + noise.gumbel(cell, 1, len(p))[0]).argmax()) if kept[cell] < 0 else int(kept[cell])

    expected = told(model, prompt, window, GUIDED, draw)
    assert drawn(model, [replace(prompt, preserved=kept)], window, [5], GUIDED, drafts) == [expected]


@pytest.mark.parametrize("sampling", [Sampling(), GUIDED, HALF, Sampling(cfg_scale=2.0, temperature=0)])
@pytest.mark.parametrize("ends", [False, True], ids=["", "with row ends"])
@pytest.mark.parametrize(
    ("rows", "columns", "window"),
    [(3, 4, 1), (4, 3, 2), (3, 5, 3), (5, 6, 2), (3, 4, 7), (4, 3, 4), (3, 4, 4), (4, 1, 1)],
)
def test_every_token_is_the_choice_after_what_the_definition_lets_it_see(
    rows: int, columns: int, window: int, sampling: Sampling, ends: bool
) -> None:
    model = toy(rows, columns, ends=ends)
    prompt = make_prompt(3, padding=1)
    for seed in range(3):
        noise = Noise(seed)

        def draw(cell: int, p: NDArray, noise: Noise = noise) -> int:
            own = 0 if sampling.greedy else noise.gumbel(cell, 1, len(p))[0]
            return int(np.argmax(np.log(p) + own))

        expected = [told(model, prompt, window, sampling, draw)]
        for drafts in (0, 1, 2, 5):
            assert drawn(model, [prompt], window, [seed], sampling, drafts) == expected
        narrow = replace(toy(rows, columns, ends=ends), max_nodes=2)
        assert drawn(narrow, [prompt], window, [seed], sampling, drafts=1) == expected
        passes: list[tuple[int, int]] = narrow.target.passes  # type: ignore[attr-defined]
        assert {nodes for _, nodes in passes[1:]} == {2}
        assert {num_rows for num_rows, _ in passes} == ({1, 2} if sampling == HALF else {1 + sampling.guided})


def test_pictures_are_distributed_as_the_definition_says() -> None:
    model = toy(2, 2, vocabulary=3)
    prompt = make_prompt(1)
    count = 6000
    expected = np.zeros((3,) * 4)
    for codes in itertools.product(range(3), repeat=4):
        probability = 1.0

        def draw(cell: int, p: NDArray, codes: tuple[int, ...] = codes) -> int:
            nonlocal probability
            probability *= p[codes[cell]]
            return codes[cell]

        told(model, prompt, 1, GUIDED, draw)
        expected[codes] = probability
    assert expected.sum() == pytest.approx(1)
    counts = np.zeros_like(expected)
    for codes in drawn(model, [prompt] * count, 1, range(count), GUIDED):
        counts[tuple(codes)] += 1
    assert chisquare(counts.ravel(), count * expected.ravel()).pvalue > 1e-4


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 7), st.integers(1, 9), st.integers(1, 10), st.integers(0, 4),
    st.sampled_from([1, 2, 5, 64]), st.integers(0, 2**32 - 1), st.booleans(),
)  # fmt: skip
def test_every_cell_is_drawn_once_after_those_that_it_sees(
    rows: int, codes: int, window: int, ahead: int, most: int, seed: int, ends: bool
) -> None:
    grid = Grid(raster_layout(rows * codes, codes, 9 if ends else None), 0, window, max_nodes=most)
    columns = grid.columns
    window = grid.window
    passes = 0
    rng = np.random.default_rng(seed)
    while -1 in grid.cells:
        known = {cell for cell, code in enumerate(grid.cells) if code >= 0}
        grid.num_drafts = int(rng.integers(0, ahead + 1))
        batch = grid.next_pass()
        passes = passes + 1
        assert 0 < batch.nodes <= most
        for cells in (batch.cells[batch.attended > 0], batch.cells[batch.sampled] + 1, batch.cached_cells):
            assert len({*cells.tolist()}) == len(cells)
        assert not {*batch.cells[batch.attended > 0].tolist()} & {*batch.cached_cells.tolist()}
        assert (batch.structure.ancestors.sum(0)[batch.attended == 0] == 1).all()  # no other sees what stands in
        kept, drawn = grid.commit(batch, rng.integers(0, 2, len(batch.sampled)))  # drafts are right now and then
        assert len(drawn) + len(kept) > 0  # or nothing would ever happen
        assert not known & {*drawn.tolist()}
        for cell in drawn.tolist():
            assert {c for c in sight(*divmod(cell, columns), columns, window) if c < cell} <= known | {*drawn.tolist()}
        counts = [sum(grid.cells[row * columns + c] >= 0 for c in range(codes)) for row in range(rows)]
        assert grid.lengths == [columns if count == codes else count for count in counts]
        assert {*batch.cells[kept].tolist()} <= {cell for cell, code in enumerate(grid.cells) if code >= 0}
    if most == 64:
        assert passes <= min(window, codes) * (rows - 1) + codes - 1
        assert ahead or passes == min(window, codes) * (rows - 1) + codes - 1


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3), st.integers(1, 5), st.booleans())
def test_a_picture_is_the_same_whatever_number_of_drafts_passes_take(drafts: int, window: int, ends: bool) -> None:
    model = toy(4, 4, ends=ends)
    prompts = [make_prompt(i) for i in range(3)]
    seeds = [5, 6, 7]
    expected = drawn(model, prompts, window, seeds, GUIDED)
    method = RowParallel(window=window, drafts=drafts)
    assert codes_of(decode(model, prompts, seeds, GUIDED, method, max_images=2), 3) == expected


@pytest.mark.parametrize("ends", [False, True], ids=["", "with row ends"])
def test_a_window_as_wide_as_the_grid_gives_the_picture_of_plain_decoding(ends: bool) -> None:
    model = toy(3, 4, ends=ends)
    prompt = make_prompt(2)
    plain = [code for step in decode(model, [prompt], [5], GUIDED, Ar()) for code in step.parts[0].codes.tolist()]
    assert drawn(model, [prompt], 4, [5], GUIDED) == [plain]
    assert drawn(model, [prompt], 1, [5], GUIDED) != [plain]


@pytest.mark.parametrize("method", [Sjd(window=4), Eagle(tree="chain-2"), Ar()])
def test_beside_requests_of_other_methods_a_picture_stays_the_same(pipe: Pipeline, method: MethodConfig) -> None:
    alone = pipe("red cube", seed=9, method="rows:window=2").codes[0]
    with Service(pipe, together=4) as service:
        heard: queue.Queue[StreamStep | BaseException] = queue.Queue()
        for seed in (1, 2):
            service.submit(lambda news: None, "a green sphere", seed=seed, method=method)
        service.submit(heard.put, "red cube", seed=9, method="rows:window=2")
        while not isinstance(news := heard.get(timeout=60), StreamStep) or news.stats is None:
            assert not isinstance(news, BaseException), news
    assert np.array_equal(news.codes[0], alone)


def test_steps_show_every_cell_that_is_drawn_and_hand_out_codes_in_raster_order(pipe: Pipeline) -> None:
    steps = list(pipe.stream("red cube", seed=1, method="rows:window=2"))
    last = steps[-1]
    manifest = pipe.bundle.manifest
    ahead = [step for step in steps if (step.cells[0] < 0).any()]
    assert any((step.cells[0] >= 0).sum() > len(step.codes[0]) for step in ahead), "lower rows are begun early"
    for step in ahead:
        known = step.cells[0] >= 0
        assert np.array_equal(step.cells[0][known], last.codes[0][known])
        assert step.done == known.sum()
        assert np.array_equal(step.codes[0], last.codes[0][: len(step.codes[0])])
    pixels = np.array(ahead[0].image(0))
    cells = (ahead[0].cells[0] >= 0).reshape(manifest.grid_rows, manifest.grid_columns)
    grey = (
        (pixels == 128)
        .all(2)
        .reshape(manifest.grid_rows, -1, manifest.grid_columns, pixels.shape[1] // manifest.grid_columns)
    )
    assert grey.all((1, 3))[~cells].all()
    assert np.array_equal(np.concatenate([step.new_codes[0] for step in steps]), last.codes[0])
