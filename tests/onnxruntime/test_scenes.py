"""The embedded default bundle: real weights, through the public interface."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lantern_rt import Pipeline
from lantern_rt.requests import Options

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


def codes_of(pipe: Pipeline, texts: list[str], seeds: list[int], **options: object) -> list[list[int]]:
    result = pipe(texts, seed=seeds, **Options(**options))  # type: ignore[typeddict-item]
    return [codes.tolist() for codes in result.codes]


@pytest.mark.parametrize("method", METHODS)
def test_three_prompts_together_give_the_codes_of_each_alone(pipe: Pipeline, method: str) -> None:
    together = codes_of(pipe, prompts(3), [5, 6, 7], method=method)
    alone = [codes_of(pipe, [text], [seed], method=method)[0] for text, seed in zip(prompts(3), (5, 6, 7), strict=True)]
    assert together == alone


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_eight_prompts_together_give_bit_for_bit_the_images_of_the_same_eight_alone(
    pipe: Pipeline, method: str
) -> None:
    texts, seeds = prompts(8), list(range(20, 28))
    together = pipe(texts, seed=seeds, method=method)
    for i, (text, seed) in enumerate(zip(texts, seeds, strict=True)):
        alone = pipe(text, seed=seed, method=method)
        assert alone.codes[0].tolist() == together.codes[i].tolist()
        assert alone.images[0].tobytes() == together.images[i].tobytes()


def test_greedy_eagle_and_sjd_give_the_codes_of_greedy_ar(pipe: Pipeline) -> None:
    texts = prompts(4)
    plain = codes_of(pipe, texts, [0] * 4, method="ar", temperature=0)
    assert codes_of(pipe, texts, [0] * 4, method="eagle", temperature=0) == plain
    assert codes_of(pipe, texts, [0] * 4, method="sjd", temperature=0) == plain


def test_a_tree_that_stops_early_spares_drafter_passes_and_no_batch_changes_an_image(pipe: Pipeline) -> None:
    options = {"method": "eagle", "tree": "chain-4", "children": "likeliest"}
    texts, seeds = prompts(3), [5, 6, 7]
    stopping = pipe(texts, seed=seeds, stop=0.5, **options)  # type: ignore[arg-type]
    alone = [pipe(text, seed=seed, stop=0.5, **options) for text, seed in zip(texts, seeds, strict=True)]  # type: ignore[arg-type]
    assert [codes.tolist() for codes in stopping.codes] == [one.codes[0].tolist() for one in alone]
    whole = pipe(texts[0], seed=5, **options).stats  # type: ignore[arg-type]
    assert alone[0].stats.drafter_passes / alone[0].stats.target_passes < whole.drafter_passes / whole.target_passes


@pytest.mark.slow
@pytest.mark.parametrize("tree", ["chain-4", "dynamic-59", "balanced-25"])
def test_greedy_eagle_gives_the_codes_of_greedy_ar_for_fifty_prompts(pipe: Pipeline, tree: str) -> None:
    texts = prompts(50)
    for i in range(0, 50, 10):
        batch, seeds = texts[i : i + 10], [0] * 10
        exact = codes_of(pipe, batch, seeds, method="eagle", tree=tree, temperature=0)
        assert exact == codes_of(pipe, batch, seeds, method="ar", temperature=0)


def test_sampled_images_depend_on_the_seed_and_on_nothing_else(pipe: Pipeline) -> None:
    first = codes_of(pipe, prompts(1), [1])
    assert first == codes_of(pipe, prompts(1), [1])
    assert first != codes_of(pipe, prompts(1), [2])


def test_relaxed_methods_commit_several_codes_a_pass(pipe: Pipeline) -> None:
    for options in ({"method": "lantern"}, {"method": "lantern++"}, {"method": "sjd", "lambda_": 2.0}):
        stats = pipe(prompts(4), seed=3, **options).stats  # type: ignore[arg-type]
        assert stats.tokens_per_target_pass > 1.5
        assert stats.realised_tvd > 0


def test_a_sunset_is_redder_than_a_night_and_grass_is_green(pipe: Pipeline) -> None:
    texts = ["a red cube on sand at sunset", "a red cube on sand at night", "a cube on grass"]
    sunset, night, grass = pipe(texts).images
    sky = [np.asarray(image)[:40].mean((0, 1)) for image in (sunset, night)]
    assert sky[0][0] > sky[1][0] + 60
    red, green, blue = np.asarray(grass)[-16:].mean((0, 1))
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
