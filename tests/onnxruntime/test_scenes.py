"""Public interface with the trained weights of the embedded model `scenes`.

A seed determines an image: with every exact method, in any batch, on any number of threads.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from lantern_rt import Pipeline, Result
from lantern_rt.memory import PeakMemoryMonitor, estimate_image_memory
from lantern_rt.requests import resolve_settings

RELAXED_METHODS = ("lantern", "lantern++")
TREES = ["eagle:tree=chain-3", "eagle:tree=mc-25:drafter=eagle", "eagle:tree=dynamic-16"]
EXACT_METHODS = [*TREES, "sjd:window=3", "sjd:window=7", "sjd:window=15"]
FILTER_OPTIONS: list[dict[str, Any]] = [{}, {"top_k": 100}, {"top_p": 0.9}, {"top_k": 200, "top_p": 0.95}]
SAMPLINGS = [{"temperature": temperature, **filters} for temperature in (0.7, 1.0, 1.3) for filters in FILTER_OPTIONS]
Codes = NDArray[np.int64]
BATCH_SIZE = 4  # images of the batch whose memory is measured


@pytest.fixture(scope="module")
def pipe_by_threads() -> dict[int, Pipeline]:
    return {threads: Pipeline.from_bundle("scenes", threads=threads) for threads in (1, 2)}


@pytest.fixture(scope="module")
def prompts(pipe_by_threads: dict[int, Pipeline]) -> list[str]:
    return pipe_by_threads[1].bundle.path("prompts").read_text("utf-8").splitlines()[:50]


def generate(pipe: Pipeline, prompts: list[str], batch: int, **options: Any) -> Codes:
    """Generate an image of each prompt with the seeds 7000, 7001 and so on."""
    seeds = [7000 + i for i in range(len(prompts))]
    codes = []
    for start in range(0, len(prompts), batch):
        batch_slice = slice(start, start + batch)
        codes += pipe(prompts[batch_slice], seed=seeds[batch_slice], **options).codes
    return np.array(codes)


@pytest.fixture(scope="module")
def pipe(pipe_by_threads: dict[int, Pipeline]) -> Pipeline:
    return pipe_by_threads[2]


class ResultsByMethod:
    texts: ClassVar = ["a red cube on grass at sunset", "a red cube on sand at night"]
    seeds: ClassVar = [5, 6]

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe
        self._results: dict[str, Result] = {}

    def __getitem__(self, method: str) -> Result:
        if method not in self._results:
            self._results[method] = self._pipe(self.texts, seed=self.seeds, method=method)
        return self._results[method]


@pytest.fixture(scope="module")
def results_by_method(pipe_by_threads: dict[int, Pipeline]) -> ResultsByMethod:
    return ResultsByMethod(pipe_by_threads[1])


@pytest.mark.parametrize("method", ["sjd", *RELAXED_METHODS])
def test_an_image_in_a_batch_has_the_tokens_of_one_alone(
    pipe: Pipeline, results_by_method: ResultsByMethod, method: str
) -> None:
    alone = pipe(results_by_method.texts[1], seed=results_by_method.seeds[1], method=method)
    np.testing.assert_array_equal(alone.codes[0], results_by_method[method].codes[1])


@pytest.mark.parametrize("method", ["eagle", "sjd"])
def test_exact_methods_generate_the_tokens_of_ar_in_batches(results_by_method: ResultsByMethod, method: str) -> None:
    np.testing.assert_array_equal(results_by_method[method].codes, results_by_method["ar"].codes)


def test_a_seed_gives_the_same_tokens_with_every_onnx_runtime(results_by_method: ResultsByMethod) -> None:
    digests = [sha256(codes.tobytes()).hexdigest()[:16] for codes in results_by_method["ar"].codes]
    assert digests == ["3d544c6198e0a242", "187f4e63af9b9894"]  # `.ci/run` checks the lowest and the newest release


@pytest.mark.parametrize("options", [{"temperature": 0.7, "top_k": 200, "top_p": 0.95}, {"temperature": 0}], ids=str)
def test_filtered_and_greedy_tokens_do_not_depend_on_threads(
    pipe_by_threads: dict[int, Pipeline], prompts: list[str], options: dict[str, Any]
) -> None:
    expected = generate(pipe_by_threads[1], prompts[:1], 1, method="ar", **options)
    for method, threads in (("eagle:tree=dynamic-16", 1), ("sjd:window=7", 2)):
        np.testing.assert_array_equal(
            generate(pipe_by_threads[threads], prompts[:1], 1, method=method, **options), expected
        )


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"temperature": 0}, *SAMPLINGS], ids=str)
def test_fifty_prompts_give_equal_tokens_with_exact_methods(
    pipe_by_threads: dict[int, Pipeline], prompts: list[str], options: dict[str, Any]
) -> None:
    expected = generate(pipe_by_threads[2], prompts, 8, method="ar", **options)
    codes_by_method = {
        method: generate(pipe_by_threads[2], prompts, 8, method=method, **options) for method in EXACT_METHODS
    }
    assert [(codes != expected).any(1).sum() for codes in codes_by_method.values()] == [0] * len(EXACT_METHODS)


@pytest.mark.parametrize("count", [40, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, "50%", 255))])
def test_guidance_of_the_first_token_is_exact_with_every_method(
    pipe: Pipeline, prompts: list[str], count: int | str
) -> None:
    options = {"cfg_scale": 3.0, "cfg_tokens": count}
    expected = generate(pipe, prompts[:2], 1, method="ar", **options)
    for method in ("sjd:window=7", "eagle:tree=chain-3", "eagle:tree=chain-3:drafter=eagle"):
        np.testing.assert_array_equal(generate(pipe, prompts[:2], 2, method=method, **options), expected)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ar", *EXACT_METHODS])
def test_batch_size_and_threads_change_no_token(
    pipe_by_threads: dict[int, Pipeline], prompts: list[str], method: str
) -> None:
    expected = generate(pipe_by_threads[1], prompts, 1, method=method)
    for batch, threads in [(3, 1), (8, 2)]:
        np.testing.assert_array_equal(generate(pipe_by_threads[threads], prompts, batch, method=method), expected)


def test_relaxed_methods_commit_several_tokens_per_pass(
    pipe: Pipeline, prompts: list[str], results_by_method: ResultsByMethod
) -> None:
    jacobi_result = pipe(prompts[0], seed=3, method="sjd:lambda=2")
    for stats in (results_by_method["lantern"].stats, results_by_method["lantern++"].stats, jacobi_result.stats):
        assert stats.tokens_per_forward_pass > 1.5
        assert stats.realised_tvd > 0


@pytest.mark.parametrize("method", ["ar", *RELAXED_METHODS])
def test_sunset_is_redder_than_night_and_grass_is_green(results_by_method: ResultsByMethod, method: str) -> None:
    sunset, night = results_by_method[method].images
    sky_colors = [np.asarray(image)[: image.height * 5 // 16].mean((0, 1)) for image in (sunset, night)]
    assert sky_colors[0][0] > sky_colors[1][0] + 60
    red, green, blue = np.asarray(sunset)[-sunset.height // 8 :, sunset.width // 2 :].mean((0, 1))
    assert green > red
    assert green > blue


@pytest.mark.parametrize(
    "method", ["sjd:window=31", *(pytest.param(m, marks=pytest.mark.slow) for m in ("ar", "eagle:tree=dynamic-32-6-6"))]
)
def test_the_predicted_memory_agrees_with_the_measured_memory(
    pipe: Pipeline, call_in_new_process: Any, method: str
) -> None:
    settings = resolve_settings(pipe.bundle.manifest, {"method": method})
    predicted = BATCH_SIZE * sum(estimate_image_memory(pipe.bundle.manifest, settings).values())
    measured = call_in_new_process(measure_image_memory, method)
    if measured is None:
        pytest.skip("this system does not report the peak memory")
    assert 0.2 * predicted < measured < 1.5 * predicted


def measure_image_memory(method: str) -> int | None:
    """Return the bytes by which a batch of images raises the peak memory; None if the peak memory is not reported."""
    with Pipeline.from_bundle("scenes", threads=1) as pipe:
        pipe("a red cube", method=method)
        with PeakMemoryMonitor() as peak:
            before = peak.bytes
            pipe("a red cube", num_images=BATCH_SIZE, method=method)
    return None if before is None or peak.bytes is None else peak.bytes - before
