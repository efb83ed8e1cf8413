"""Tokens and numbers of accepted drafts of the embedded model, with the graphs for devices and for CPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from device_pipeline import load_device_pipeline

from lantern_rt import Pipeline, open_bundle
from lantern_rt.engines.ort import cache_pool
from lantern_rt.engines.ort.cache_pool import BoundForwardPass, CacheBlock, CachePool
from lantern_rt.engines.ort.engine import OrtDeviceEngine, OrtEngine
from lantern_rt.engines.ort.providers import PROVIDERS
from lantern_rt.prepared import load_model
from lantern_rt.runtime.batch import Batch
from lantern_rt.runtime.raster import RasterLayout
from lantern_rt.runtime.state import ImageSequence

CODES_PER_IMAGE = 48  # three grid rows of 16 codes
LAYOUT = RasterLayout(CODES_PER_IMAGE, 16)
PROMPTS = ["a red sphere on sand", "a blue cube on grass at night", "a cone under an overcast sky"]
SEEDS = [3, 4, 5]  # no logits of these images are so close that rounding could change a token
FILTER_OPTIONS = {"temperature": 0.8, "top_k": 200, "top_p": 0.95}
METHOD_OPTIONS: list[dict[str, Any]] = [
    {"method": "ar"},
    {"method": "sjd:window=7"},
    {"method": "eagle:tree=mc-25:drafter=eagle"},
    {"method": "eagle:tree=mc-25:drafter=eagle", **FILTER_OPTIONS},
    {"method": "eagle:tree=dynamic-16-6-4:drafter=eagle"},
    {"method": "eagle:tree=dynamic-16-6-4:drafter=eagle", "temperature": 0.0},
    {"method": "rows:window=3"},
    {"method": "lantern++"},
    {"method": "lantern:tree=dynamic-16-6-4:drafter=eagle", "cfg_scale": 1.0},
]
HALF_GUIDED = {"cfg_scale": 2.0, "cfg_tokens": CODES_PER_IMAGE // 2}
METHOD_OPTIONS += [
    {"method": method, **HALF_GUIDED} for method in ("sjd:window=7", "eagle:tree=mc-25:drafter=eagle", "rows:window=3")
]
METHOD_OPTIONS += [{"method": "lantern++:drafter=eagle", **HALF_GUIDED, **FILTER_OPTIONS}]


@pytest.fixture(scope="module")
def cpu_pipe(float_scenes_bundle: Path) -> Pipeline:
    return Pipeline.from_bundle(float_scenes_bundle, threads=1)


@pytest.fixture(scope="module")
def device_pipe(float_scenes_bundle: Path) -> Pipeline:
    pipe = load_device_pipeline(float_scenes_bundle)
    assert all(isinstance(engine, OrtDeviceEngine) for engine in (pipe.engines.target, pipe.engines.drafter))
    return pipe


def make_sequences(pipe: Pipeline, prompt_numbers: list[int], options: dict[str, Any]) -> list[ImageSequence]:
    sequences = []
    for i in prompt_numbers:
        request = pipe.check(PROMPTS[i], seed=SEEDS[i], **options)
        prepared = pipe.prepare(request)
        (prompt,) = prepared.prompts()
        sequences.append(ImageSequence(i, replace(prepared.plan, layout=LAYOUT), prompt, SEEDS[i]))
    return sequences


def generate_sequences(pipe: Pipeline, prompt_numbers: list[int], options: dict[str, Any]) -> list[ImageSequence]:
    sequences = make_sequences(pipe, prompt_numbers, options)
    batch = Batch(load_model(pipe.bundle, pipe.engines, [sequence.plan.method for sequence in sequences]))
    batch.add(sequences)
    while batch.active_sequences:
        batch.step()
    return sequences


@pytest.mark.parametrize("options", METHOD_OPTIONS, ids=str)
def test_graphs_for_devices_generate_the_same_tokens(
    cpu_pipe: Pipeline, device_pipe: Pipeline, options: dict[str, Any]
) -> None:
    expected, sequences = (generate_sequences(pipe, [0, 1, 2], options) for pipe in (cpu_pipe, device_pipe))
    for sequence, cpu_sequence in zip(sequences, expected, strict=True):
        assert sequence.codes == cpu_sequence.codes
        assert not cpu_sequence.statistics.tie_passes  # otherwise rounding could change tokens
        passes, cpu_passes = (len(item.statistics.accepted_per_step) for item in (sequence, cpu_sequence))
        assert abs(passes - cpu_passes) <= 1, "the drafts differ"
    if options["method"] not in ("ar", "rows:window=3"):
        assert (
            len({tuple(sequence.statistics.accepted_per_step) for sequence in sequences}) == 3
        )  # the images accepted different numbers of drafts
    (single_sequence,) = generate_sequences(device_pipe, [1], options)
    assert single_sequence.codes == sequences[1].codes


@pytest.mark.parametrize("options", [METHOD_OPTIONS[3], METHOD_OPTIONS[5], METHOD_OPTIONS[7]], ids=str)
def test_target_and_drafter_may_be_on_different_providers(
    cpu_pipe: Pipeline, float_scenes_bundle: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setitem(PROVIDERS, "twin", PROVIDERS["cpu"]._replace(name="twin"))
    mixed_pipe = load_device_pipeline(float_scenes_bundle, "cpu,drafter=twin")
    assert isinstance(mixed_pipe.engines.target, OrtDeviceEngine)
    assert isinstance(mixed_pipe.engines.drafter, OrtEngine)
    expected, sequences = (generate_sequences(pipe, [0, 1], options) for pipe in (cpu_pipe, mixed_pipe))
    assert [sequence.codes for sequence in sequences] == [sequence.codes for sequence in expected]


def test_evicting_bindings_changes_no_token(
    cpu_pipe: Pipeline, float_scenes_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    get_bound_pass = CachePool.get_bound_pass

    def count_bound_passes(pool: CachePool, block: CacheBlock, *arguments: Any) -> BoundForwardPass:
        bound_pass = get_bound_pass(pool, block, *arguments)
        counts.append(len(block.bound_passes))
        return bound_pass

    monkeypatch.setattr(CachePool, "get_bound_pass", count_bound_passes)
    monkeypatch.setattr(cache_pool, "MAX_BOUND_PASSES", 2)
    options = {"method": "eagle:tree=dynamic-16-6-4:drafter=eagle"}
    expected, sequences = (
        generate_sequences(pipe, [0, 1], options) for pipe in (cpu_pipe, load_device_pipeline(float_scenes_bundle))
    )
    assert [sequence.codes[:CODES_PER_IMAGE] for sequence in sequences] == [
        sequence.codes[:CODES_PER_IMAGE] for sequence in expected
    ]
    assert max(counts) == 2


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_the_embedded_bundle_has_the_exported_architecture(float_scenes_bundle: Path, role: str) -> None:
    embedded, exported = (getattr(open_bundle(name).manifest, role) for name in ("scenes", float_scenes_bundle))
    assert embedded.architecture == exported.architecture


def test_likelihoods_on_a_device_agree_with_likelihoods_on_a_cpu() -> None:
    """Compare with a tolerance, because the CPU graphs have int8 matmuls and the device graphs float matmuls."""
    pipes = [Pipeline.from_bundle("scenes", threads=1), load_device_pipeline("scenes")]
    codes = pipes[0](PROMPTS, seed=3, method="eagle:drafter=eagle").codes
    expected, device_nats = ([image.nats for image in pipe.likelihoods(codes, PROMPTS)] for pipe in pipes)
    assert device_nats == pytest.approx(expected, abs=0.02)
