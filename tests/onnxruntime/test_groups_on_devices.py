"""A bundle that generates cells in groups: the graphs for devices generate the same tokens, alone and in batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_pipeline import device_pipeline

from lantern_rt import Pipeline
from lantern_rt.engines.ort.engine import OrtDeviceEngine

SEEDS = [3, 4, 5, 6]
CLASSES = [5, 0, 9, 2]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"cfg_scale": 4.0, "cfg_tokens": 25},
    {"cfg_scale": 1.0, "temperature": 0.8, "top_k": 30, "top_p": 0.9},
    {"repetition_penalty": 1.3},
]


@pytest.fixture(scope="module", params=["par_bundle", "nar_bundle"])
def bundle(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture(scope="module")
def on_cpu(bundle: Path) -> Pipeline:
    return Pipeline.from_bundle(bundle, threads=1)


@pytest.fixture(scope="module")
def on_device(bundle: Path) -> Pipeline:
    pipe = device_pipeline(bundle)
    assert isinstance(pipe.engines.target, OrtDeviceEngine)
    return pipe


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_device_generates_the_tokens_of_the_cpu(
    on_cpu: Pipeline, on_device: Pipeline, options: dict[str, Any]
) -> None:
    expected = on_cpu(class_ids=CLASSES, seed=SEEDS, **options)
    on_device_result = on_device(class_ids=CLASSES, seed=SEEDS, **options)
    assert [codes.tolist() for codes in on_device_result.codes] == [codes.tolist() for codes in expected.codes]
    passes = {"par": 19, "nar": 15}[on_cpu.bundle.manifest.family]
    for stats in (on_device_result.stats, expected.stats):
        assert stats.target_passes - sum(image.tie_passes for image in stats.per_image) == passes
    alone = on_device(class_ids=CLASSES[2], seed=SEEDS[2], **options)
    assert alone.codes[0].tolist() == expected.codes[2].tolist()


def test_edits_and_likelihoods_are_the_same_on_device_and_cpu(on_cpu: Pipeline, on_device: Pipeline) -> None:
    result = on_cpu(class_ids=3, seed=1)
    mask = np.zeros((128, 128), np.uint8)
    mask[40:100, 20:90] = 255
    edits = [pipe.edit(result.images[0], mask, class_ids=7, seed=2, tries=2) for pipe in (on_cpu, on_device)]
    assert edits[0].codes[0].tolist() == edits[1].codes[0].tolist()
    preserved = on_cpu.engines.encode_images(
        np.asarray(result.images[0])[None].transpose(0, 3, 1, 2) / np.float32(127.5) - 1
    )
    outside = mask.reshape(8, 16, 8, 16).max((1, 3)).ravel() == 0
    assert edits[0].codes[0][outside].tolist() == preserved[0][outside].tolist()
    assert edits[0].codes[0][~outside].tolist() != result.codes[0][~outside].tolist()
    nats = [pipe.likelihoods(result.codes, class_ids=3)[0].nats for pipe in (on_cpu, on_device)]
    assert nats[0] == pytest.approx(nats[1], abs=1e-4)
