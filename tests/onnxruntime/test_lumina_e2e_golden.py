"""Lumina-mGPT's whole greedy generations of the published solver, grids of several shapes, through the exported graphs.

The published solver lets the model write the size itself; here it is part of the prompt, which gives the same state.
"""

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
from PIL import Image

from lantern_rt import Pipeline
from lantern_rt.cli.main import run_program
from lantern_rt.engines.ort.engine import OrtDeviceEngine
from lantern_rt.results import StreamStep
from lantern_rt.service import Service

DATA = Path(__file__).parent.parent / "data/lumina-mgpt"
TRACES: list[dict[str, Any]] = json.loads((DATA / "traces.json").read_text())
GOLDEN = np.load(DATA / "golden.npz")
EXACT = ["ar", "sjd:window=1", "sjd:window=7", "eagle:tree=chain-4", "eagle:tree=mc-25", "eagle:tree=dynamic-59-5-10"]


def named(trace: dict[str, Any]) -> str:
    return f"{trace['latent'][0]}x{trace['latent'][1]}-cfg{trace['cfg']:g}"


def asked(trace: dict[str, Any]) -> dict[str, Any]:
    return {"size": f"{trace['width']}x{trace['height']}", "temperature": 0, "cfg_scale": trace["cfg"]}


@pytest.fixture(scope="module")
def pipe(lumina_bundle: Path) -> Pipeline:
    return Pipeline.from_bundle(lumina_bundle, threads=1)


@pytest.mark.parametrize("method", [*EXACT, "rows:window=6"])  # no grid is wider, so `rows` is exact, too
@pytest.mark.parametrize("trace", TRACES, ids=named)
def test_greedy_generations_of_every_grid_give_the_published_ids_and_row_ends(
    pipe: Pipeline, trace: dict[str, Any], method: str
) -> None:
    result = pipe(trace["caption"], method=method, **asked(trace))
    assert result.codes[0].reshape(trace["latent"]).tolist() == trace["codes"]
    manifest = pipe.bundle.manifest
    raster = replace(pipe.model(pipe.engines, []).raster, codes=result.codes[0].size, columns=trace["latent"][1])
    written = raster.spell(result.codes[0]) + trace["generated_ids"][3] - trace["codes"][0][0]
    assert manifest.row_end is not None
    assert written.tolist() == trace["generated_ids"][3:-3]  # then the last row's end, that of the image, of the turn


@pytest.fixture(scope="module")
def on_device(lumina_bundle: Path) -> Pipeline:
    """Drawn by the graphs that accelerators run, here on the CPU."""
    pipe = device_pipeline(lumina_bundle)
    assert isinstance(pipe.engines.target, OrtDeviceEngine)
    return pipe


@pytest.mark.parametrize(
    "method", ["ar", "sjd:window=7", "eagle:tree=mc-25", "eagle:tree=dynamic-59-5-10", "rows:window=6"]
)
def test_greedy_generations_on_the_device_path_give_the_published_ids(on_device: Pipeline, method: str) -> None:
    for trace in TRACES:
        result = on_device(trace["caption"], method=method, **asked(trace))
        assert result.codes[0].reshape(trace["latent"]).tolist() == trace["codes"]


@pytest.mark.parametrize("trace", TRACES, ids=named)
def test_prompts_are_laid_out_as_the_published_solver_does(pipe: Pipeline, trace: dict[str, Any]) -> None:
    (image,) = pipe.check(trace["caption"], **asked(trace)).images
    assert image.tokens is not None
    cond, uncond = (ids.tolist() for ids in image.tokens)
    assert cond == [*trace["prompt_ids"], *trace["generated_ids"][:3]]
    assert uncond == (trace["unconditional_prefix"] or trace["generated_ids"][:3])


@pytest.mark.parametrize("i", range(3), ids="run{}_greedy_cfg3_image".format)
def test_pictures_of_every_shape_are_the_published_ones_up_to_rounding(pipe: Pipeline, i: int) -> None:
    trace = next(one for one in TRACES if one["prompt"] == i and one["name"] == "greedy_cfg3")
    image, expected = pipe(trace["caption"], **asked(trace)).images[0], GOLDEN[f"run{i}_greedy_cfg3_image"]
    assert np.abs(np.asarray(image).astype(int) - expected).max() <= 1


@pytest.mark.parametrize("where", ["pipe", "on_device"])
@pytest.mark.parametrize("method", ["ar", "sjd:window=7", "eagle:tree=mc-25", "eagle:tree=dynamic-59-5-10"])
def test_requests_for_several_sizes_share_passes_and_give_the_published_ids(
    request: pytest.FixtureRequest, where: str, method: str
) -> None:
    pipe: Pipeline = request.getfixturevalue(where)
    heard: queue.Queue[tuple[int, StreamStep | BaseException]] = queue.Queue()
    with Service(pipe, together=5) as service:
        for i, trace in enumerate(TRACES):
            listener = partial(lambda i, news: heard.put((i, news)), i)
            service.submit(listener, trace["caption"], steps=False, method=method, **asked(trace))
        found = dict(heard.get(timeout=60) for _ in TRACES)
    for i, trace in enumerate(TRACES):
        step = found[i]
        assert isinstance(step, StreamStep), step
        assert step.codes[0].reshape(trace["latent"]).tolist() == trace["codes"]
        assert step.image(0).size == (4 * trace["latent"][1], 4 * trace["latent"][0])


@pytest.mark.parametrize("size", ["64x64", "64x128", "128x32"])
def test_a_seed_names_one_picture_whatever_exact_method_draws_it(pipe: Pipeline, size: str) -> None:
    expected = pipe("a red fox", size=size, seed=5, method="ar")
    for method in EXACT:
        assert np.array_equal(pipe("a red fox", size=size, seed=5, method=method).codes[0], expected.codes[0])
    nats = pipe.likelihoods(expected.codes, "a red fox", size=size)[0]
    assert 0 < nats.nats < 2 * nats.entropy


@pytest.mark.parametrize("method", ["lantern", "lantern++", "sjd:lambda=2", "rows:window=2"])
def test_inexact_methods_draw_pictures_of_any_shape_the_same_in_any_batch(pipe: Pipeline, method: str) -> None:
    captions = ["a red fox", "a boat on a lake at night in the rain"]
    together = pipe(captions, size="64x96", seed=[1, 2], method=method)
    for caption, seed, codes in zip(captions, (1, 2), together.codes, strict=True):
        assert np.array_equal(pipe(caption, size="64x96", seed=seed, method=method).codes[0], codes)
    assert [image.size for image in together.images] == [(16, 24)] * 2


def test_a_picture_records_its_size_and_is_drawn_again(lumina_bundle: Path, tmp_path: Path) -> None:
    first, again = tmp_path / "fox.png", tmp_path / "again.png"
    common = ["run", str(lumina_bundle)]
    asked = ["a red fox", "--size", "96x64", "--method", "ar", "--trace", str(tmp_path / "fox.trace.npz")]
    assert run_program([*common, *asked, "--output", str(first)]) == 0
    assert run_program([*common, "--from", str(first), "--output", str(again)]) == 0
    with Image.open(first) as one, Image.open(again) as other:
        assert one.size == (24, 16)
        assert json.loads(one.info["settings"])["size"] == "96x64"
        assert one.tobytes() == other.tobytes()
    with np.load(tmp_path / "fox.trace.npz") as trace:
        assert trace["grid"].tolist() == [4, 6]


def test_a_size_that_the_bundle_does_not_draw_is_refused_with_those_that_it_does(
    lumina_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_program(["run", str(lumina_bundle), "a fox", "--size", "512x512"]) == 2
    listed = "128x32, 128x64, 96x64, 96x96, 64x96, 64x128, 32x128, 64x64"
    assert f"--size: found '512x512', expected {listed}" in capsys.readouterr().err
    assert run_program(["inspect", str(lumina_bundle)]) == 0
    assert listed in " ".join(capsys.readouterr().out.split())
