"""Emu3's whole greedy generations of the published program, grids of several shapes, from prompts to pictures."""

from __future__ import annotations

import json
import queue
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_pipeline import device_pipeline

from lantern_rt import Pipeline
from lantern_rt.engines.ort.engine import OrtDeviceEngine
from lantern_rt.results import StreamStep
from lantern_rt.service import Service

DATA = Path(__file__).parent.parent / "data/emu3"
SUFFIX = " masterpiece, film grained, best quality."  # of the program; a bundle adds it to prompts
TRACES: dict[str, dict[str, Any]] = {one["name"]: one for one in json.loads((DATA / "traces.json").read_text())}
RUNS = ["run0_cfg3", "run0_cfg1", "run1_cfg3", "run2_cfg3"]
EXACT = ["ar", "sjd:window=1", "sjd:window=7", "rows:window=12"]  # no grid is wider, so `rows` is exact, too
FIRST_CODE, ROW_END = 557, 549


def asked(trace: dict[str, Any]) -> dict[str, Any]:
    rows, columns = trace["grid"]
    shaping = {"size": f"{2 * columns}x{2 * rows}", "temperature": 0, "cfg_scale": trace["cfg"]}
    return {"prompts": trace["text"].removesuffix(SUFFIX), **shaping}


@pytest.fixture(scope="module")
def pipe(emu3_bundle: Path) -> Pipeline:
    return Pipeline.from_bundle(emu3_bundle, threads=1)


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("name", RUNS)
def test_greedy_generations_of_every_grid_give_the_published_ids_and_uint8_pictures(
    pipe: Pipeline, name: str, method: str
) -> None:
    trace = TRACES[name]
    rows, columns = trace["grid"]
    result = pipe(**asked(trace), method=method)
    assert result.codes[0].reshape(rows, columns).tolist() == trace["codes"]
    raster = replace(pipe.model(pipe.engines, []).raster, codes=rows * columns, columns=columns)
    spelled = raster.spell(result.codes[0])
    written = np.where(spelled == pipe.bundle.manifest.row_end, ROW_END, spelled + FIRST_CODE)
    assert written.tolist() == trace["generated_ids"][:-4]  # the last row's end, of frame, image and sequence
    if f"{name}_uint8" in (arrays := np.load(DATA / "golden.npz")):
        found = np.asarray(result.images[0]).astype(int)
        assert found.shape == (2 * rows, 2 * columns, 3)
        assert np.abs(found - arrays[f"{name}_uint8"]).max() <= 1


@pytest.fixture(scope="module")
def on_device(emu3_bundle: Path) -> Pipeline:
    """Drawn by the graphs that accelerators run, here on the CPU."""
    pipe = device_pipeline(emu3_bundle)
    assert isinstance(pipe.engines.target, OrtDeviceEngine)
    return pipe


@pytest.mark.parametrize("where", ["pipe", "on_device"])
@pytest.mark.parametrize("method", EXACT)
def test_requests_for_several_sizes_share_passes_and_give_the_published_codes(
    request: pytest.FixtureRequest, where: str, method: str
) -> None:
    pipe: Pipeline = request.getfixturevalue(where)
    heard: queue.Queue[tuple[str, StreamStep | BaseException]] = queue.Queue()
    with Service(pipe, together=len(RUNS)) as service:
        for name in RUNS:
            listener = partial(lambda name, news: heard.put((name, news)), name)
            service.submit(listener, **asked(TRACES[name]), steps=False, method=method)
        found = dict(heard.get(timeout=60) for _ in RUNS)
    for name, step in found.items():
        assert isinstance(step, StreamStep), step
        assert step.codes[0].reshape(TRACES[name]["grid"]).tolist() == TRACES[name]["codes"]


@pytest.mark.parametrize("size", ["8x8", "10x8", "24x4"])
def test_a_seed_names_one_picture_whatever_exact_method_draws_it(pipe: Pipeline, size: str) -> None:
    expected = pipe("a red fox", size=size, seed=5, method="ar").codes[0]
    for method in EXACT[1:3]:
        assert np.array_equal(pipe("a red fox", size=size, seed=5, method=method).codes[0], expected)


@pytest.mark.parametrize("method", ["sjd:lambda=2", "rows:window=2"])
def test_inexact_methods_draw_pictures_of_any_shape_the_same_in_any_batch(pipe: Pipeline, method: str) -> None:
    captions = ["a red fox", "a boat on a lake at night in the rain"]
    together = pipe(captions, size="6x10", seed=[1, 2], method=method)
    for caption, seed, codes in zip(captions, (1, 2), together.codes, strict=True):
        assert np.array_equal(pipe(caption, size="6x10", seed=seed, method=method).codes[0], codes)
    assert [image.size for image in together.images] == [(6, 10)] * 2
