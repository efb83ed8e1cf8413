"""The embedded default bundle: real weights, through the public interface."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from lantern_rt import Pipeline, Result
from lantern_rt.auto.memory import image_bytes
from lantern_rt.cli.memory import PeakMemory
from lantern_rt.requests import resolve_settings

METHODS = ("ar", "eagle", "lantern", "lantern++", "sjd")
SOLIDS = ("red sphere", "blue cube", "green cone", "yellow cylinder", "pink pyramid", "white torus", "black star")
GROUNDS = ("on grass", "on sand", "in the snow", "on water", "on stone", "on wood")
SKIES = ("at sunset", "at night", "under a clear sky", "on a cloudy day")


def prompts(count: int) -> list[str]:
    """Different prompts that the bundle understands."""
    return [
        f"a {SOLIDS[i % len(SOLIDS)]} {GROUNDS[i % len(GROUNDS)]} {SKIES[i // 7 % len(SKIES)]}" for i in range(count)
    ]


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return Pipeline.from_bundle("scenes")


class Batches:
    """Three prompts drawn together, once for every method: several tests look at the same pictures."""

    texts: ClassVar = ["a red cube on sand at sunset", "a red cube on sand at night", "a cube on grass"]
    seeds: ClassVar = [5, 6, 7]

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe
        self._drawn: dict[str, Result] = {}

    def __getitem__(self, method: str) -> Result:
        if method not in self._drawn:
            self._drawn[method] = self._pipe(self.texts, seed=self.seeds, method=method)
        return self._drawn[method]


@pytest.fixture(scope="module")
def batches(pipe: Pipeline) -> Batches:
    return Batches(pipe)


def codes_of(pipe: Pipeline, texts: list[str], seeds: list[int], **options: Any) -> list[list[int]]:
    result = pipe(texts, seed=seeds, **options)
    return [codes.tolist() for codes in result.codes]


@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_among_others_gives_its_own_codes(pipe: Pipeline, batches: Batches, method: str) -> None:
    alone = pipe(batches.texts[1], seed=batches.seeds[1], method=method)
    assert alone.codes[0].tolist() == batches[method].codes[1].tolist()


def test_greedy_eagle_and_sjd_give_the_codes_of_greedy_ar(pipe: Pipeline) -> None:
    texts = prompts(2)
    plain = codes_of(pipe, texts, [0] * 2, method="ar", temperature=0)
    assert codes_of(pipe, texts, [0] * 2, method="eagle", temperature=0) == plain
    assert codes_of(pipe, texts, [0] * 2, method="sjd", temperature=0) == plain


@pytest.mark.slow
@pytest.mark.parametrize("tree", ["chain-4", "dynamic-59", "balanced-25"])
def test_greedy_eagle_gives_the_codes_of_greedy_ar_for_fifty_prompts(pipe: Pipeline, tree: str) -> None:
    texts = prompts(50)
    for i in range(0, 50, 10):
        batch, seeds = texts[i : i + 10], [0] * 10
        exact = codes_of(pipe, batch, seeds, method="eagle", tree=tree, temperature=0)
        assert exact == codes_of(pipe, batch, seeds, method="ar", temperature=0)


def test_another_seed_gives_another_image(pipe: Pipeline, batches: Batches) -> None:
    other = pipe(batches.texts[0], seed=batches.seeds[0] + 1, method="eagle")
    assert other.codes[0].tolist() != batches["eagle"].codes[0].tolist()


def test_relaxed_methods_commit_several_codes_a_pass(pipe: Pipeline, batches: Batches) -> None:
    window = pipe(prompts(3), seed=3, method="sjd", lambda_=2.0)
    for stats in (batches["lantern"].stats, batches["lantern++"].stats, window.stats):
        assert stats.tokens_per_forward_pass > 1.5
        assert stats.realised_tvd > 0


@pytest.mark.parametrize("method", METHODS)
def test_a_sunset_is_redder_than_a_night_and_grass_is_green(batches: Batches, method: str) -> None:
    sunset, night, grass = batches[method].images
    sky = [np.asarray(image)[: image.height * 5 // 16].mean((0, 1)) for image in (sunset, night)]
    assert sky[0][0] > sky[1][0] + 60
    red, green, blue = np.asarray(grass)[-grass.height // 8 :].mean((0, 1))
    assert green > red
    assert green > blue


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's record of peak memory")
def test_one_image_takes_less_than_400_megabytes() -> None:
    program = (
        "from lantern_rt import Pipeline\n"
        "Pipeline.from_bundle('scenes')('a red sphere on sand at night', seed=1)\n"
        "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')))\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(found.stdout.split()[1]) < 400 * 1024  # kilobytes


@pytest.mark.parametrize(
    "method", ["sjd:window=31", *(pytest.param(m, marks=pytest.mark.slow) for m in ("ar", "eagle:tree=dynamic-32-6-6"))]
)
def test_what_an_image_is_said_to_take_is_what_it_takes(pipe: Pipeline, method: str) -> None:
    images, settings = 6, resolve_settings(pipe.bundle.manifest, {"method": method})
    pipe("a red cube", method=method)
    with PeakMemory() as peak:
        before = peak.bytes
        pipe("a red cube", num_images=images, method=method)
    if before is None or peak.bytes is None:
        pytest.skip("this system does not tell")
    said = images * sum(image_bytes(pipe.bundle.manifest, settings).values())
    assert 0.2 * said < peak.bytes - before < 1.5 * said
