"""The embedded model on a device draws the codes that it draws on a CPU, and drafts as well."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from device_pipeline import device_pipeline

from lantern_rt import Pipeline, open_bundle
from lantern_rt.engines.ort import cache_pool
from lantern_rt.engines.ort.cache_pool import BoundPass, CacheBlock, CachePool
from lantern_rt.engines.ort.engine import OrtDeviceEngine, OrtEngine
from lantern_rt.engines.ort.providers import PROVIDERS
from lantern_rt.prepared import load_model
from lantern_rt.runtime.batch import Batch
from lantern_rt.runtime.raster import RasterLayout
from lantern_rt.runtime.state import ImageSequence

LENGTH = 48  # codes of each picture: three rows
LAYOUT = RasterLayout(LENGTH, 16)
PROMPTS = ["a red sphere on sand", "a blue cube on grass at night", "a cone"]
SEEDS = [3, 4, 5]  # no choice of theirs is a near tie: rounding turns none
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


def requests_of(pipe: Pipeline, picked: list[int], options: dict[str, Any]) -> list[ImageSequence]:
    requests = []
    for i in picked:
        checked = pipe.check(PROMPTS[i], seed=SEEDS[i], **options)
        prepared = pipe.prepare(checked)
        (prompt,) = prepared.prompts()
        requests.append(ImageSequence(i, replace(prepared.plan, layout=LAYOUT), prompt, SEEDS[i]))
    return requests


def drawn(pipe: Pipeline, picked: list[int], options: dict[str, Any]) -> list[ImageSequence]:
    """Requests that were drawn together."""
    requests = requests_of(pipe, picked, options)
    batch = Batch(load_model(pipe.bundle, pipe.engines, [one.method for one in requests]))
    batch.add(requests)
    while batch.active_sequences:
        batch.step()
    return requests


@pytest.mark.parametrize("options", METHODS, ids=str)
def test_pictures_of_a_device_have_the_codes_of_the_same_on_a_cpu(
    on_cpu: Pipeline, on_device: Pipeline, options: dict[str, Any]
) -> None:
    expected, found = (drawn(pipe, [0, 1, 2], options) for pipe in (on_cpu, on_device))
    for one, other in zip(found, expected, strict=True):
        assert one.codes == other.codes
        assert not other.statistics.tie_passes  # or rounding might decide
        passes, usual = (len(request.statistics.accepted_per_step) for request in (one, other))
        assert abs(passes - usual) <= 1  # else its drafts would be others
    if options["method"] not in ("ar", "rows:window=3"):
        assert len({tuple(one.statistics.accepted_per_step) for one in found}) == 3  # the rows were ragged
    (alone,) = drawn(on_device, [1], options)
    assert alone.codes == found[1].codes


@pytest.mark.parametrize("options", [METHODS[3], METHODS[5], METHODS[7]], ids=str)
def test_a_drafter_elsewhere_than_the_target_draws_the_same_codes(
    on_cpu: Pipeline, float_scenes_bundle: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setitem(PROVIDERS, "twin", PROVIDERS["cpu"]._replace(name="twin"))
    mixed = device_pipeline(float_scenes_bundle, "cpu,drafter=twin")
    assert isinstance(mixed.engines.target, OrtDeviceEngine)
    assert isinstance(mixed.engines.drafter, OrtEngine)
    expected, found = (drawn(pipe, [0, 1], options) for pipe in (on_cpu, mixed))
    assert [one.codes for one in found] == [one.codes for one in expected]


def test_shapes_that_make_room_for_others_are_bound_anew_and_draw_the_same(
    on_cpu: Pipeline, float_scenes_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    bound = CachePool.bound

    def count(own: CachePool, block: CacheBlock, *arguments: Any) -> BoundPass:
        found = bound(own, block, *arguments)
        counts.append(len(block.bound))
        return found

    monkeypatch.setattr(CachePool, "bound", count)
    monkeypatch.setattr(cache_pool, "MAX_BOUND_PASSES", 2)
    options = {"method": "eagle:tree=dynamic-16-6-4:drafter=eagle"}
    expected, found = (drawn(pipe, [0, 1], options) for pipe in (on_cpu, device_pipeline(float_scenes_bundle)))
    assert [one.codes[:LENGTH] for one in found] == [one.codes[:LENGTH] for one in expected]
    assert max(counts) == 2


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_the_embedded_bundle_describes_its_decoders_as_export_does(float_scenes_bundle: Path, role: str) -> None:
    embedded, exported = (getattr(open_bundle(name).manifest, role) for name in ("scenes", float_scenes_bundle))
    assert embedded.architecture == exported.architecture is not None


def test_the_embedded_bundle_on_a_device_gives_codes_the_likelihood_of_a_cpu() -> None:
    """The device multiplies floats where the CPU multiplies integers: a cause of small differences."""
    pipes = [Pipeline.from_bundle("scenes", threads=1), device_pipeline("scenes")]
    codes = pipes[0](PROMPTS, seed=3, method="eagle:drafter=eagle").codes
    expected, found = ([image.nats for image in pipe.likelihoods(codes, PROMPTS)] for pipe in pipes)
    assert found == pytest.approx(expected, abs=0.02)
