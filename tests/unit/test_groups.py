"""Drawing in groups gives what its definition says, written down once more here, plainly and for one picture."""

from __future__ import annotations

import itertools
import json
import queue
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from pydantic import ValidationError
from refusals import error_of
from scipy.stats import chisquare
from tiny_bundle import CODES, make_order_bundle
from toy_engine import AnyOrder, Hashes, ToyCache, make_prompt, naive_distribution

from lantern_rt import BundleError, Pipeline, RequestError, open_bundle
from lantern_rt.bundle.manifest import Manifest
from lantern_rt.cli.main import run_program
from lantern_rt.methods import Ar, Groups, Sampling
from lantern_rt.output.trace import Trace
from lantern_rt.requests import Settings
from lantern_rt.results import StreamState, StreamStep
from lantern_rt.runtime.decode import decode
from lantern_rt.runtime.engine import Pass, PassOutput
from lantern_rt.runtime.likelihood import likelihood
from lantern_rt.runtime.noise import Noise
from lantern_rt.runtime.order import Order
from lantern_rt.runtime.state import Model, Prompt
from lantern_rt.service import Service

GUIDED = Sampling(cfg_scale=2.0, temperature=0.9)
PART = Sampling(cfg_scale=2.0, cfg_tokens=5, repetition_penalty=1.4)
VOCABULARY = 5
Groups_ = tuple[tuple[int, ...], ...]
REGIONS: Groups_ = ((0,), (2,), (8,), (10,), (1, 3, 9, 11), (4, 6, 12, 14), (5, 7, 13, 15))
GROWING: Groups_ = ((3,), (0, 1), (2, 5, 4))


@dataclass
class GroupTarget(AnyOrder):
    """Logits that differ between the nodes of a pass, though all of them see the same."""

    def _sums(self, batch: Pass, cache: ToyCache, new: Hashes) -> tuple[Hashes, NDArray[np.bool_]]:
        context, right = super()._sums(batch, cache, new)
        return (context if batch.embeds is not None else context + np.uint64(3) * new), right


class WobblyTarget(GroupTarget):
    """Logits that move a little with the shape of a pass."""

    def run(self, batch: Pass, cache: Any) -> PassOutput:
        output = super().run(batch, cache)
        moves = np.random.default_rng([*batch.positions.shape, int(cache.lengths.sum())])
        return output._replace(logits=output.logits + moves.uniform(-0.01, 0.01, output.logits.shape).astype("f4"))


def toy(groups: Groups_ = REGIONS, kind: type[GroupTarget] = GroupTarget, **fields: Any) -> Model:
    target, cells = kind(VOCABULARY, vectors=3), sum(map(len, groups))
    return Model(target, None, cells, 100, columns=2, order=Order(groups, VOCABULARY), **fields)


def drawn(model: Model, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: Sampling) -> list[list[int]]:
    """Pictures in raster order."""
    state = StreamState(len(prompts), model.num_codes)
    for step in decode(model, prompts, seeds, sampling, Groups()):
        shown = state.add(step, Settings(Groups(), sampling), lambda i, codes: Image.new("RGB", (8, 8)))
        assert shown.done == sum(int((cells >= 0).sum()) for cells in shown.cells)
    return [codes.tolist() for codes in shown.codes]


def passes_of(model: Model) -> list[tuple[int, int]]:
    """Rows and nodes of every pass of the target."""
    assert isinstance(model.target, GroupTarget)
    return model.target.passes


def distributions(model: Model, prompt: Prompt, sampling: Sampling, group: int, known: dict[int, int]) -> list[NDArray]:
    """The target's distribution of every cell of a group after the codes of the groups before, from its table."""
    target, order = model.target, model.order
    assert isinstance(target, GroupTarget)
    assert order is not None
    rows, drawn_before = [], sum(map(len, order.groups[:group]))
    for side in (prompt.cond, prompt.uncond):
        seen, own = [target.prefix_hash(side.embeds)[side.real]], None
        for number in range(1, group + 1):
            fed = [(known[cell], cell) for cell in order.groups[number - 1]]
            vectors = len(order.groups[number]) - len(fed)
            fed += [(VOCABULARY + i, model.num_codes) for i in range(vectors)]
            tokens, places = np.array(fed).T
            own = target.code_hash(tokens, len(side.real) + places)
            seen.append(own)
        context = np.concatenate(seen).sum(dtype=np.uint64, keepdims=True)
        contexts = context if own is None else context + np.uint64(3) * own
        rows.append(target.logits(contexts).astype(np.float64))
    before = {known[cell] for cell in itertools.chain(*order.groups[:group])}
    penalty = sampling.repetition_penalty or 1.0
    found = []
    for i, (cond, uncond) in enumerate(zip(*rows, strict=True)):
        for code in before:
            cond[code] = cond[code] * penalty if cond[code] < 0 else cond[code] / penalty
        guided = drawn_before + i < sampling.count_guided(model.num_codes)
        found.append(naive_distribution(uncond + (sampling.cfg_scale if guided else 1.0) * (cond - uncond), sampling))
    return found


def told(model: Model, prompt: Prompt, sampling: Sampling, draw: Callable[[int, NDArray], int]) -> list[int]:
    """The picture by the definition; `draw(cell, p)` draws from a distribution."""
    assert model.order is not None
    known: dict[int, int] = {}
    for number, group in enumerate(model.order.groups):
        shares = distributions(model, prompt, sampling, number, known)
        known |= {cell: draw(cell, p) for cell, p in zip(group, shares, strict=True)}
    return [known[cell] for cell in range(model.num_codes)]


@pytest.mark.parametrize("groups", [REGIONS, GROWING, ((0,), (1,), (2,))])
@pytest.mark.parametrize("sampling", [Sampling(), GUIDED, PART, Sampling(cfg_scale=3.0, cfg_tokens=2, temperature=0)])
def test_every_code_is_the_choice_after_the_groups_before_with_the_noise_of_its_cell(
    groups: Groups_, sampling: Sampling
) -> None:
    model, prompts, seeds = toy(groups), [make_prompt(i, padding=i % 3) for i in range(8)], range(8)
    expected = []
    for prompt, seed in zip(prompts, seeds, strict=True):
        noise = Noise(seed)

        def draw(cell: int, p: NDArray, noise: Noise = noise) -> int:
            loud = 0 if sampling.greedy else noise.gumbel(cell, 1, len(p))[0]
            return int(np.argmax(np.log(p) + loud))

        expected.append(told(model, prompt, sampling, draw))
    assert drawn(model, prompts, seeds, sampling) == expected
    assert len(passes_of(model)) == len(groups)
    for i in (0, 5):
        assert drawn(toy(groups), [prompts[i]], [seeds[i]], sampling) == [expected[i]]
    assert drawn(toy(groups), prompts[2:5], seeds[2:5], sampling) == expected[2:5]


def test_guidance_ends_with_the_rows_that_it_needs() -> None:
    model = toy()
    drawn(model, [make_prompt(1)], [3], PART)
    assert [rows for rows, _ in passes_of(model)] == [
        2,
        2,
        2,
        2,
        2,
        1,
        1,
    ]  # the fifth pass draws four codes, of which one is guided


def test_the_codes_of_a_group_have_the_joint_distribution_of_the_definition() -> None:
    model, prompt, count = toy(GROWING[:2]), make_prompt(2), 6000
    expected = np.zeros((VOCABULARY,) * 3)
    renumbered = toy(((0,), (1, 2)))
    for codes in itertools.product(range(VOCABULARY), repeat=3):
        chances: list[float] = []

        def draw(cell: int, p: NDArray, codes: tuple[int, ...] = codes, chances: list[float] = chances) -> int:
            chances.append(p[codes[cell]])
            return codes[cell]

        told(renumbered, prompt, GUIDED, draw)
        expected[codes] = np.prod(chances)
    assert expected.sum() == pytest.approx(1)
    counts = np.zeros_like(expected)
    for codes in drawn(renumbered, [prompt] * count, range(count), GUIDED):
        counts[tuple(codes)] += 1
    likely = expected * count >= 5
    observed = np.append(counts[likely], counts[~likely].sum())
    assert chisquare(observed, count * np.append(expected[likely], expected[~likely].sum())).pvalue > 1e-3
    assert model.order is not None


@given(kept=st.lists(st.sampled_from([-1, -1, 0, 4]), min_size=16, max_size=16).map(np.array), seed=st.integers(0, 99))
@settings(max_examples=25)
def test_preserved_codes_stand_in_their_cells_wherever_the_order_has_them(kept: NDArray[np.int64], seed: int) -> None:
    model, prompt, noise = toy(), make_prompt(3, padding=1), Noise(seed)

    def draw(cell: int, p: NDArray) -> int:
        return int((np.log(p) + noise.gumbel(cell, 1, len(p))[0]).argmax()) if kept[cell] < 0 else int(kept[cell])

    assert drawn(model, [replace(prompt, preserved=kept)], [seed], GUIDED) == [told(model, prompt, GUIDED, draw)]


@pytest.mark.parametrize("sampling", [Sampling(), GUIDED, PART])
def test_the_likelihood_is_that_of_the_definition(sampling: Sampling) -> None:
    model, prompt = toy(), make_prompt(3, padding=1)
    (codes,) = drawn(model, [prompt], [4], sampling)
    nats: dict[int, float] = {}

    def draw(cell: int, p: NDArray) -> int:
        nats[cell] = -np.log(p[codes[cell]])
        return codes[cell]

    told(model, prompt, sampling, draw)
    counted = np.arange(16) % 3 == 0
    found = likelihood(model, prompt, np.array(codes), sampling, counted)
    assert found.nats == pytest.approx(np.mean([nats[cell] for cell in range(0, 16, 3)]), abs=1e-5)


@pytest.mark.parametrize("sampling", [GUIDED, Sampling(top_k=3), Sampling(temperature=0)])
def test_rounding_that_depends_on_the_batch_changes_no_code(sampling: Sampling) -> None:
    model = toy(kind=WobblyTarget, rounding=0.02)
    prompts, seeds = [make_prompt(i) for i in range(8)], range(8)
    together = drawn(model, prompts, seeds, sampling)
    alone = [drawn(model, [prompt], [seed], sampling)[0] for prompt, seed in zip(prompts, seeds, strict=True)]
    assert together == alone
    steps = [*decode(model, prompts, seeds, sampling, Groups())]
    assert steps[-1].stats is not None
    assert sum(image.tie_passes for image in steps[-1].stats.per_image) > 0


def test_noise_is_forgotten_as_far_as_the_image_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[int] = []
    monkeypatch.setattr(Noise, "forget", lambda own, before: forgotten.append(before))
    drawn(toy(), [make_prompt(1)], [3], Sampling())
    assert forgotten == [1, 1, 1, 4, 5, 16]


# ---------------------------------------------------------------- bundles


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_order_bundle(tmp_path_factory.mktemp("order") / "tiny")


@pytest.fixture(scope="module")
def pipe(folder: Path) -> Pipeline:
    return Pipeline.from_bundle(folder, threads=1)


def test_a_hundred_seeds_give_the_same_picture_alone_in_batches_streamed_and_served(pipe: Pipeline) -> None:
    seeds = list(range(100))
    classes = [seed % 10 for seed in seeds]
    expected = [pipe(class_ids=classes[i], seed=i).codes[0].tolist() for i in seeds]
    assert len({*map(tuple, expected)}) > 90
    for size in (3, 8):
        for start in range(0, 100, size):
            part = slice(start, start + size)
            result = pipe(class_ids=classes[part], seed=seeds[part])
            assert [codes.tolist() for codes in result.codes] == expected[part]
    for i in seeds[:10]:
        steps = list(pipe.stream(class_ids=classes[i], seed=i))
        assert steps[-1].cells[0].tolist() == steps[-1].codes[0].tolist() == expected[i]
    with Service(pipe, together=4) as service:
        heard: list[queue.Queue[StreamStep | BaseException]] = [queue.Queue() for _ in seeds[:12]]
        for i, listener in enumerate(heard):
            service.submit(listener.put, class_ids=classes[i], seed=i, caller=str(i % 3))
        for i, listener in enumerate(heard):
            while not isinstance(news := listener.get(timeout=60), StreamStep) or news.stats is None:
                assert not isinstance(news, BaseException), news
            assert news.codes[0].tolist() == expected[i]


def test_steps_show_the_cells_of_every_group_and_codes_in_raster_order(pipe: Pipeline) -> None:
    order = pipe.bundle.manifest.order
    assert order is not None
    steps, trace = list(pipe.stream(class_ids=3, seed=1)), Trace(4, 4)
    shown: set[int] = set()
    for step, group in zip(steps, order.groups, strict=True):
        trace.add(step)
        shown |= {*group}
        assert {*np.flatnonzero(step.cells[0] >= 0).tolist()} == shown
        assert step.done == len(shown)
    assert np.concatenate([step.new_codes[0] for step in steps]).tolist() == steps[-1].cells[0].tolist()
    assert trace._cells(lambda part: part.codes)[0].tolist() == steps[-1].cells[0].tolist()
    pixels = np.array(steps[3].image(0)).reshape(4, 4, 4, 4, 3)  # row, line, column, dot, colour
    grey = (pixels == 128).all((1, 3, 4))
    assert {*np.flatnonzero(~grey.ravel()).tolist()} == {0, 2, 8, 10}


def test_ar_is_the_bundles_order_and_other_methods_are_refused(pipe: Pipeline, words_bundle: Path) -> None:
    picture = pipe(class_ids=3, seed=1)
    assert picture.settings.method == Groups()
    for method in ("ar", "groups", Ar(), Groups()):
        assert np.array_equal(pipe(class_ids=3, seed=1, method=method).codes[0], picture.codes[0])
    for method in ("sjd", "rows:window=2", "eagle", "lantern++"):
        error = error_of(RequestError, pipe, class_ids=3, method=method)
        name = method.partition(":")[0]
        text = "bundle tiny draws groups of cells, in an order of its own; use method groups"
        assert str(error) == f"method {name}: {text}"
    raster = Pipeline.from_bundle(words_bundle, threads=1)
    error = error_of(RequestError, raster, "red cube", method="groups")
    assert str(error) == "method groups: bundle tiny draws one token after another; use method ar or sjd"


def test_bench_inspect_and_run_take_the_bundle(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_program(["inspect", str(folder)]) == 0
    assert "7 groups, one per pass" in capsys.readouterr().out
    assert run_program(["bench", str(folder), "--count", "1", "--threads", "1"]) == 0
    output = ["--output", str(tmp_path / "eval")]
    assert run_program(["eval", str(folder), "--count", "10", "--threads", "1", *output]) == 0
    assert run_program(["run", str(folder), "--class-id", "3", "--output", str(tmp_path / "a.png")]) == 0
    assert (
        run_program(["run", "--from", str(tmp_path / "a.png"), str(folder), "--output", str(tmp_path / "b.png")]) == 0
    )
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"order": {"groups": [[0], [1]], "vectors": 0}}, "`order` lacks cell 2; expected every cell once"),
    ({"order": {"groups": [[0], [1, 1]], "vectors": 1}}, "`order` has cell 1 twice; expected every cell once"),
    ({"order": {"groups": [[0], [16]], "vectors": 0}}, "`order` has cell 16, but the image has 16 cells"),
    ({"order": {"groups": [[0, 1], [2, 3]], "vectors": 0}}, "the first group has 2 cells"),
    ({"order": {"groups": [[0], [1, 2], [3]], "vectors": 1}}, "a group of 1 cells follows one of 2"),
    ({"order": {"groups": [[0], [1, 2, 3]], "vectors": 1}}, "needs 2 learned vectors, but `vectors` is 1"),
    ({"order": {"groups": [[0], []]}}, "order.groups.1"),
    ({"order": {"groups": [[0], list(range(1, 99))], "vectors": 63}}, "order.groups.1"),
    ({"order": {"groups": [[-1]]}}, "order.groups.0.0"),
    ({"presets": {}}, "preset strict, sjd"),
    ({"order": None}, "preset strict, groups: method groups is for bundles with an `order`, and only it"),
    ({"row_end": CODES}, "`row_end` is for raster order, but the bundle has an `order`"),
    ({"sizes": [{"name": "16x16", "rows": 4, "columns": 4}]}, "`sizes` is for raster order"),
]


@pytest.mark.parametrize(("changes", "expected"), HOSTILE, ids=str)
def test_a_manifest_whose_order_does_not_fit_is_refused_in_a_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], expected: str
) -> None:
    shutil.copytree(folder, tmp_path / "tiny")
    path = tmp_path / "tiny" / "bundle.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert run_program(["inspect", str(path.parent)]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert expected in text


def test_positions_and_embeddings_for_the_vectors_must_exist(folder: Path, tmp_path: Path) -> None:
    fields = open_bundle(folder).manifest.model_dump(mode="json")
    fields["target"]["max_positions"] = 17
    with pytest.raises(ValidationError, match="prefix, image and learned vectors need 18 positions"):
        Manifest.model_validate(fields)
    without = make_order_bundle(tmp_path / "tiny", embedded=2)
    error = error_of(BundleError, Pipeline.from_bundle, without)
    assert f"[{CODES + 3}, 8]" in str(error)
