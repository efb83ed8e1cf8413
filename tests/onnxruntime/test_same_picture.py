"""A seed names a picture: the embedded model under every exact method, in any batch, on any number of threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lantern_rt import Pipeline

TREES = ["eagle:tree=chain-3", "eagle:tree=mc-25", "eagle:tree=dynamic-16"]
METHODS = [*TREES, "sjd:window=3", "sjd:window=7", "sjd:window=15"]
FILTERS: list[dict[str, Any]] = [{}, {"top_k": 100}, {"top_p": 0.9}, {"top_k": 200, "top_p": 0.95}]
Codes = NDArray[np.int64]


@pytest.fixture(scope="module")
def pipes() -> dict[int, Pipeline]:
    return {threads: Pipeline.from_bundle("scenes", threads=threads) for threads in (1, 2)}


@pytest.fixture(scope="module")
def prompts(pipes: dict[int, Pipeline]) -> list[str]:
    return pipes[1].bundle.path("prompts").read_text("utf-8").splitlines()[:50]


def drawn(pipe: Pipeline, prompts: list[str], batch: int, **options: Any) -> Codes:
    """Codes `[prompts, cells]`, seed 7000 and up, `batch` images at a time."""
    seeds, codes = [7000 + i for i in range(len(prompts))], []
    for start in range(0, len(prompts), batch):
        some = slice(start, start + batch)
        codes += pipe(prompts[some], seed=seeds[some], **options).codes
    return np.array(codes)


@pytest.mark.parametrize("options", [{"temperature": 0.7, "top_k": 200, "top_p": 0.95}])
def test_two_prompts_have_the_same_codes_under_every_exact_method(
    pipes: dict[int, Pipeline], prompts: list[str], options: dict[str, Any]
) -> None:
    expected = drawn(pipes[2], prompts[:2], 2, method="ar", **options)
    for method in ("eagle:tree=chain-3", "eagle:tree=dynamic-16", "sjd:window=7"):
        np.testing.assert_array_equal(drawn(pipes[2], prompts[:2], 2, method=method, **options), expected)
    np.testing.assert_array_equal(drawn(pipes[1], prompts[:1], 1, method="ar", **options), expected[:1])


@pytest.mark.slow
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_fifty_prompts_have_the_same_codes_under_every_exact_method(
    pipes: dict[int, Pipeline], prompts: list[str], temperature: float, filters: dict[str, Any]
) -> None:
    options = {"temperature": temperature, **filters}
    expected = drawn(pipes[2], prompts, 8, method="ar", **options)
    others = {method: drawn(pipes[2], prompts, 8, method=method, **options) for method in METHODS}
    assert [(codes != expected).any(1).sum() for codes in others.values()] == [0] * len(METHODS)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ar", *METHODS])
def test_batches_and_threads_do_not_move_a_bit(pipes: dict[int, Pipeline], prompts: list[str], method: str) -> None:
    expected = drawn(pipes[1], prompts, 1, method=method)
    for batch, threads in [(3, 1), (8, 2)]:
        np.testing.assert_array_equal(drawn(pipes[threads], prompts, batch, method=method), expected)
