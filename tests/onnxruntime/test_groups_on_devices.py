"""Models that generate groups of cells per forward pass (NAR, PAR): graphs for devices compared with the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_pipeline import load_device_pipeline

from lantern_rt import Pipeline
from lantern_rt.engines.ort.engine import OrtDeviceEngine

SEEDS = [3, 4, 5, 6]
CLASSES = [5, 0, 9, 2]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"cfg_scale": 4.0, "cfg_tokens": 25},
    {"cfg_scale": 1.0, "temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    {"repetition_penalty": 1.3},
]


@pytest.fixture(scope="module", params=["par_bundle", "nar_bundle"])
def bundle(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture(scope="module")
def cpu_pipe(bundle: Path) -> Pipeline:
    return Pipeline.from_bundle(bundle, threads=1)


@pytest.fixture(scope="module")
def device_pipe(bundle: Path) -> Pipeline:
    pipe = load_device_pipeline(bundle)
    assert isinstance(pipe.engines.target, OrtDeviceEngine)
    return pipe


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_groups_have_the_same_tokens_as_on_the_cpu(
    cpu_pipe: Pipeline, device_pipe: Pipeline, options: dict[str, Any]
) -> None:
    expected = cpu_pipe(class_ids=CLASSES, seed=SEEDS, **options)
    device_result = device_pipe(class_ids=CLASSES, seed=SEEDS, **options)
    assert [codes.tolist() for codes in device_result.codes] == [codes.tolist() for codes in expected.codes]
    passes = {"par": 19, "nar": 15}[cpu_pipe.bundle.manifest.family]
    for stats in (device_result.stats, expected.stats):
        assert stats.target_passes - sum(image.tie_passes for image in stats.per_image) == passes
    alone = device_pipe(class_ids=CLASSES[2], seed=SEEDS[2], **options)
    assert alone.codes[0].tolist() == expected.codes[2].tolist()


def test_edits_and_likelihoods_are_the_same_as_on_the_cpu(cpu_pipe: Pipeline, device_pipe: Pipeline) -> None:
    result = cpu_pipe(class_ids=3, seed=1)
    mask = np.zeros((128, 128), np.uint8)
    mask[40:100, 20:90] = 255
    edit_results = [pipe.edit(result.images[0], mask, class_ids=7, seed=2, tries=2) for pipe in (cpu_pipe, device_pipe)]
    assert edit_results[0].codes[0].tolist() == edit_results[1].codes[0].tolist()
    preserved = cpu_pipe.engines.encode_images(
        np.asarray(result.images[0])[None].transpose(0, 3, 1, 2) / np.float32(127.5) - 1
    )
    is_preserved = mask.reshape(8, 16, 8, 16).max((1, 3)).ravel() == 0
    assert edit_results[0].codes[0][is_preserved].tolist() == preserved[0][is_preserved].tolist()
    assert edit_results[0].codes[0][~is_preserved].tolist() != result.codes[0][~is_preserved].tolist()
    nats = [pipe.likelihoods(result.codes, class_ids=3)[0].nats for pipe in (cpu_pipe, device_pipe)]
    assert nats[0] == pytest.approx(nats[1], abs=1e-4)
