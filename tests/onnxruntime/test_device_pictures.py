"""The embedded model on a device generates the tokens that it generates on a CPU, with as many accepted drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from device_pipeline import device_pipeline

from lantern_rt import Pipeline, open_bundle
from lantern_rt.engines.ort import cache_pool
from lantern_rt.engines.ort.cache_pool import BoundForwardPass, CacheBlock, CachePool
from lantern_rt.engines.ort.engine import OrtDeviceEngine, OrtEngine
from lantern_rt.engines.ort.providers import PROVIDERS
from lantern_rt.prepared import load_model
from lantern_rt.runtime.batch import Batch
from lantern_rt.runtime.raster import RasterLayout
from lantern_rt.runtime.state import ImageSequence

LENGTH = 48  # tokens of each image: three rows
LAYOUT = RasterLayout(LENGTH, 16)
PROMPTS = ["a red sphere on sand", "a blue cube on grass at night", "a cone"]
SEEDS = [3, 4, 5]  # no logits of these seeds are so close that rounding could change a token
FILTERS = {"temperature": 0.8, "top_k": 200, "top_p": 0.95}
METHODS: list[dict[str, Any]] = [
    {"method": "ar"},
    {"method": "sjd:window=7"},
    {"method": "eagle:tree=mc-25:drafter=eagle"},
    {"method": "eagle:tree=mc-25:drafter=eagle", **FILTERS},
    {"method": "eagle:tree=dynamic-16-6-4:drafter=eagle"},
    {"method": "eagle:tree=dynamic-16-6-4:drafter=eagle", "temperature": 0.0},
    {"method": "rows:window=3"},
    {"method": "lantern++"},
    {"method": "lantern:tree=dynamic-16-6-4:drafter=eagle", "cfg_scale": 1.0},
]
HALF = {"cfg_scale": 2.0, "cfg_tokens": LENGTH // 2}
METHODS += [
    {"method": method, **HALF} for method in ("sjd:window=7", "eagle:tree=mc-25:drafter=eagle", "rows:window=3")
]
METHODS += [{"method": "lantern++:drafter=eagle", **HALF, **FILTERS}]


@pytest.fixture(scope="module")
def on_cpu(float_scenes_bundle: Path) -> Pipeline:
    return Pipeline.from_bundle(float_scenes_bundle, threads=1)


@pytest.fixture(scope="module")
def on_device(float_scenes_bundle: Path) -> Pipeline:
    pipe = device_pipeline(float_scenes_bundle)
    assert all(isinstance(engine, OrtDeviceEngine) for engine in (pipe.engines.target, pipe.engines.drafter))
    return pipe


def make_sequences(pipe: Pipeline, picked: list[int], options: dict[str, Any]) -> list[ImageSequence]:
    sequences = []
    for i in picked:
        checked = pipe.check(PROMPTS[i], seed=SEEDS[i], **options)
        prepared = pipe.prepare(checked)
        (prompt,) = prepared.prompts()
        sequences.append(ImageSequence(i, replace(prepared.plan, layout=LAYOUT), prompt, SEEDS[i]))
    return sequences


def generate(pipe: Pipeline, picked: list[int], options: dict[str, Any]) -> list[ImageSequence]:
    """Generate images in a batch; `picked` lists the numbers of their prompts."""
    sequences = make_sequences(pipe, picked, options)
    batch = Batch(load_model(pipe.bundle, pipe.engines, [sequence.method for sequence in sequences]))
    batch.add(sequences)
    while batch.active_sequences:
        batch.step()
    return sequences


@pytest.mark.parametrize("options", METHODS, ids=str)
def test_a_device_generates_the_tokens_of_a_cpu(on_cpu: Pipeline, on_device: Pipeline, options: dict[str, Any]) -> None:
    expected, sequences = (generate(pipe, [0, 1, 2], options) for pipe in (on_cpu, on_device))
    for sequence, cpu_sequence in zip(sequences, expected, strict=True):
        assert sequence.codes == cpu_sequence.codes
        assert not cpu_sequence.statistics.tie_passes  # otherwise rounding could change tokens
        passes, cpu_passes = (len(item.statistics.accepted_per_step) for item in (sequence, cpu_sequence))
        assert abs(passes - cpu_passes) <= 1, "the drafts differ"
    if options["method"] not in ("ar", "rows:window=3"):
        assert len({tuple(sequence.statistics.accepted_per_step) for sequence in sequences}) == 3  # ragged rows
    (alone,) = generate(on_device, [1], options)
    assert alone.codes == sequences[1].codes


@pytest.mark.parametrize("options", [METHODS[3], METHODS[5], METHODS[7]], ids=str)
def test_a_drafter_on_another_provider_generates_the_same_tokens(
    on_cpu: Pipeline, float_scenes_bundle: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setitem(PROVIDERS, "twin", PROVIDERS["cpu"]._replace(name="twin"))
    mixed = device_pipeline(float_scenes_bundle, "cpu,drafter=twin")
    assert isinstance(mixed.engines.target, OrtDeviceEngine)
    assert isinstance(mixed.engines.drafter, OrtEngine)
    expected, sequences = (generate(pipe, [0, 1], options) for pipe in (on_cpu, mixed))
    assert [sequence.codes for sequence in sequences] == [sequence.codes for sequence in expected]


def test_evicted_shapes_are_bound_again_and_generate_the_same_tokens(
    on_cpu: Pipeline, float_scenes_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    bound = CachePool.get_bound_pass

    def count_bound(pool: CachePool, block: CacheBlock, *arguments: Any) -> BoundForwardPass:
        bound_pass = bound(pool, block, *arguments)
        counts.append(len(block.bound_passes))
        return bound_pass

    monkeypatch.setattr(CachePool, "get_bound_pass", count_bound)
    monkeypatch.setattr(cache_pool, "MAX_BOUND_PASSES", 2)
    options = {"method": "eagle:tree=dynamic-16-6-4:drafter=eagle"}
    expected, sequences = (generate(pipe, [0, 1], options) for pipe in (on_cpu, device_pipeline(float_scenes_bundle)))
    assert [sequence.codes[:LENGTH] for sequence in sequences] == [sequence.codes[:LENGTH] for sequence in expected]
    assert max(counts) == 2


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_the_embedded_manifest_has_the_architecture_that_export_writes(float_scenes_bundle: Path, role: str) -> None:
    embedded, exported = (getattr(open_bundle(name).manifest, role) for name in ("scenes", float_scenes_bundle))
    assert embedded.architecture == exported.architecture is not None


def test_likelihoods_on_a_device_agree_with_those_on_a_cpu() -> None:
    """Compare with a tolerance, as the CPU has int8 matmuls and the device float matmuls."""
    pipes = [Pipeline.from_bundle("scenes", threads=1), device_pipeline("scenes")]
    codes = pipes[0](PROMPTS, seed=3, method="eagle:drafter=eagle").codes
    expected, nats = ([image.nats for image in pipe.likelihoods(codes, PROMPTS)] for pipe in pipes)
    assert nats == pytest.approx(expected, abs=0.02)
