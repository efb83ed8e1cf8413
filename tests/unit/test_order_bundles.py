"""Bundles that generate several tokens (a group) per forward pass: images, streams, service, commands, manifests."""

from __future__ import annotations

import io
import json
import queue
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from refusals import catch_error
from tiny_bundle import CODES, make_order_bundle

from lantern_rt import BundleError, Pipeline, RequestError, open_bundle
from lantern_rt.bundle.manifest import Manifest
from lantern_rt.bundle.order import GroupOrderSpec
from lantern_rt.methods import Autoregressive, GroupDecoding
from lantern_rt.output.trace import Trace
from lantern_rt.results import StreamStep
from lantern_rt.service import Service


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_order_bundle(tmp_path_factory.mktemp("order") / "tiny")


@pytest.fixture(scope="module")
def pipe(folder: Path) -> Pipeline:
    return Pipeline.from_bundle(folder, threads=1)


def test_100_images_are_the_same_alone_batched_and_served(pipe: Pipeline) -> None:
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
    with Service(pipe, max_images_per_pass=4) as service:
        news_queues: list[queue.Queue[StreamStep | BaseException]] = [queue.Queue() for _ in seeds[:12]]
        for i, news_queue in enumerate(news_queues):
            service.submit(news_queue.put, class_ids=classes[i], seed=i, caller=str(i % 3))
        for i, news_queue in enumerate(news_queues):
            while not isinstance(news := news_queue.get(timeout=60), StreamStep) or news.stats is None:
                assert not isinstance(news, BaseException), news
            assert news.codes[0].tolist() == expected[i]


def test_each_step_shows_the_cells_of_one_more_group(pipe: Pipeline) -> None:
    order = pipe.bundle.manifest.order
    assert order is not None
    steps = list(pipe.stream(class_ids=3, seed=1))
    trace = Trace(4, 4)
    expected_cells: set[int] = set()
    for step, group in zip(steps, order.groups, strict=True):
        trace.add_step(step)
        expected_cells |= {*group}
        assert {*np.flatnonzero(step.cells[0] >= 0).tolist()} == expected_cells
        assert step.done == len(expected_cells)
    assert np.concatenate([step.new_codes[0] for step in steps]).tolist() == steps[-1].cells[0].tolist()
    with np.load(io.BytesIO(trace.encode_npz())) as arrays:
        assert arrays["codes"][0].tolist() == steps[-1].cells[0].tolist()
    # Axes: grid row, pixel row, grid column, pixel column, colour.
    pixels = np.array(steps[3].image(0)).reshape(4, 4, 4, 4, 3)
    is_grey = (pixels == 128).all((1, 3, 4))
    assert {*np.flatnonzero(~is_grey.ravel()).tolist()} == {0, 2, 8, 10}


def test_only_methods_ar_and_groups_generate_groups(pipe: Pipeline, words_bundle: Path) -> None:
    result = pipe(class_ids=3, seed=1)
    assert result.settings.method == GroupDecoding()
    for method in ("ar", "groups", Autoregressive(), GroupDecoding()):
        assert np.array_equal(pipe(class_ids=3, seed=1, method=method).codes[0], result.codes[0])
    for method in ("sjd", "rows:window=2", "eagle", "lantern++"):
        error = catch_error(RequestError, pipe, class_ids=3, method=method)
        name = method.partition(":")[0]
        text = "bundle tiny generates groups of cells, in an order of its own; use method ar or groups"
        assert str(error) == f"method {name}: {text}"
    raster_pipe = Pipeline.from_bundle(words_bundle, threads=1)
    error = catch_error(RequestError, raster_pipe, "red cube", method="groups")
    methods = "ar, eagle, lantern, lantern++, sjd or rows"
    assert str(error) == f"method groups: bundle tiny generates one token after another; use method {methods}"


def test_inspect_bench_eval_and_run_support_a_bundle_with_groups(folder: Path, program: Any) -> None:
    assert "7 groups, one per pass" in program("inspect", folder)[1]
    assert program("bench", folder, "--count", 1, "--threads", 1)[0] == 0
    assert program("eval", folder, "--count", 10, "--threads", 1)[0] == 0
    assert program("run", folder, "--class-id", 3, "--output", "a.png")[0] == 0
    assert program("run", "--from", "a.png", folder, "--output", "b.png")[0] == 0
    assert Path("a.png").read_bytes() == Path("b.png").read_bytes()


WRONG_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"order": {"groups": [[0], [1]], "vectors": 0}}, "`order` lacks cell 2; expected every cell once"),
    ({"order": {"groups": [[0], [1, 1]], "vectors": 1}}, "`order` has cell 1 twice; expected every cell once"),
    ({"order": {"groups": [[0], [16]], "vectors": 0}}, "`order` has cell 16, but the image has 16 cells"),
    ({"order": {"groups": [[0, 1], [2, 3]], "vectors": 0}}, "the first group has 2 cells"),
    ({"order": {"groups": [[0], [1, 2], [3]], "vectors": 1}}, "a group of 1 cells follows a group of 2 cells"),
    ({"order": {"groups": [[0], [1, 2, 3]], "vectors": 1}}, "needs 2 learned vectors, but `vectors` is 1"),
    ({"order": {"groups": [[0], []]}}, "order.groups.1"),
    ({"order": {"groups": [[0], list(range(1, 99))], "vectors": 63}}, "order.groups.1"),
    ({"order": {"groups": [[-1]]}}, "order.groups.0.0"),
    ({"presets": {}}, "preset strict, sjd"),
    ({"order": {"groups": [[0], [1, 4]], "two_heads": True}}, f"vocab_size {CODES} is not twice codebook_size {CODES}"),
    ({"order": None}, "preset strict, groups: the bundle generates one token after another"),
    ({"row_end": CODES}, "`row_end` is not allowed in a bundle with `order`"),
    ({"sizes": [{"name": "16x16", "rows": 4, "columns": 4}]}, "`sizes` is not allowed"),
]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([[0], [1, 2], [3]], ""),
        ([[0], [1], [2], [3]], "`order` samples cell 2 from logits after cell 0, which is not in the previous group"),
        ([[0], [1, 2, 3]], "`order` samples cell 3 from logits after cell 2, which is not in the previous group"),
        ([[1], [0, 3], [2]], "`order` samples cell 0 from logits after cell 0"),
    ],
)
def test_two_heads_need_a_neighbour_in_the_previous_group(groups: list[list[int]], expected: str) -> None:
    order = GroupOrderSpec.model_validate({"groups": groups, "two_heads": True})
    if not expected:
        return order.check_covers_all_cells(4, 2)
    assert str(catch_error(ValueError, order.check_covers_all_cells, 4, 2)).startswith(expected)
    with pytest.raises(ValidationError, match="`vectors` is 1, but `two_heads` needs no learned vectors"):
        GroupOrderSpec.model_validate({"groups": groups, "two_heads": True, "vectors": 1})


@pytest.mark.parametrize(("changes", "expected"), WRONG_FIELDS, ids=str)
def test_a_wrong_order_of_cells_is_rejected(folder: Path, program: Any, changes: Any, expected: str) -> None:
    path = Path(shutil.copytree(folder, "tiny")) / "bundle.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    code, _, err = program("inspect", "./tiny")
    assert (code, err.count("\n"), expected in err) == (2, 1, True), err


def test_too_few_positions_for_learned_vectors_are_rejected(folder: Path, tmp_path: Path) -> None:
    fields = open_bundle(folder).manifest.model_dump(mode="json")
    fields["target"]["max_positions"] = 17
    with pytest.raises(ValidationError, match="prefix, image and learned vectors need 18 positions"):
        Manifest.model_validate(fields)
    incomplete_bundle = make_order_bundle(tmp_path / "tiny", num_vectors=2)
    error = catch_error(BundleError, Pipeline.from_bundle, incomplete_bundle)
    assert f"[{CODES + 3}, 8]" in str(error)
