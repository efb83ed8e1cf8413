"""Images of Prologue: the published program's, by exact methods on the CPU and by the graphs for devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_pipeline import load_device_pipeline

from lantern_rt import Pipeline

DATA = Path(__file__).parent.parent / "data/prologue"
RUNS: dict[str, dict[str, Any]] = {
    "run0": {},
    "run1": {"cfg_scale": 1},
    "run2": {"cfg_scale": 4, "cfg_schedule": "cosine-1.75"},
    "run3": {"cfg_scale": 3, "cfg_schedule": "constant"},
}


@pytest.fixture(scope="module", params=["cpu", "device"])
def pipe(request: pytest.FixtureRequest, prologue_bundle: Path) -> Pipeline:
    if request.param == "device":
        return load_device_pipeline(prologue_bundle)
    return Pipeline.from_bundle(prologue_bundle, threads=1)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("method", ["ar", "sjd:window=1", "sjd:window=7"])
def test_greedy_images_are_those_of_the_published_program(pipe: Pipeline, name: str, method: str) -> None:
    (trace,) = (trace for trace in json.loads((DATA / "traces.json").read_text()) if trace["name"] == name)
    result = pipe(class_ids=trace["class_ids"], method=method, temperature=0, **RUNS[name])
    assert [codes.tolist() for codes in result.codes] == trace["ids"]
    if name == "run0":
        with np.load(DATA / "golden.npz") as arrays:
            np.testing.assert_array_equal(
                np.stack([np.asarray(image) for image in result.images]), arrays["run0_uint8"]
            )


def test_exact_methods_sample_the_same_images(pipe: Pipeline) -> None:
    for options in ({}, {"cfg_scale": 1, "top_k": 30, "top_p": 0.9, "temperature": 1000}):
        results = [pipe(class_ids=[1, 4, 9], seed=7, method=m, **options) for m in ("ar", "sjd", "sjd:window=16")]
        codes = [np.stack(result.codes).tolist() for result in results]
        assert codes[1:] == codes[:1] * 2
        # Codes of the prologue, the end mark and codes of the image, each at their positions only.
        kinds = np.digitize(codes[0], [96, 120])
        assert kinds.tolist() == [[1] * 4 + [2] + [0] * 16] * 3


def test_rows_generates_an_image_after_the_prologue(pipe: Pipeline) -> None:
    exact = pipe(class_ids=3, seed=1, method="ar").codes[0]
    result = pipe(class_ids=3, seed=1, method="rows:window=2")
    assert result.codes[0][:6].tolist() == exact[:6].tolist()
    assert result.stats.tokens_per_forward_pass > 1.2
    assert (result.codes[0][5:] < 96).all()


def test_an_image_is_blank_until_its_prologue_is_complete(pipe: Pipeline) -> None:
    images = [np.asarray(step.image(0)) for step in pipe.stream(class_ids=3, method="ar")]
    assert len(images) == 21
    assert all(len(np.unique(image)) == 1 for image in images[:5])
    assert (images[5][:4, :4] != images[4][:4, :4]).any()  # the first cell
    assert len(np.unique(images[5][:, 4:])) == 1
