"""Parts of pictures drawn anew with the embedded model: the same under every exact method, in any company."""

from __future__ import annotations

import queue
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from lantern_rt import Pipeline, StreamStep
from lantern_rt.service import Service

EXACT = ("ar", "eagle:tree=chain-3", "eagle:tree=dynamic-16", "sjd:window=7")
CELL = 16
CELLS = 16
Cells = NDArray[np.bool_]


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return Pipeline.from_bundle("scenes", threads=2)


def pixels(cells: Cells) -> Cells:
    return cells.repeat(CELL, 0).repeat(CELL, 1)


def random_cells(rng: np.random.Generator) -> Cells:
    """One or two rectangles, perhaps among scattered cells."""
    cells = rng.random((CELLS, CELLS)) < (0.2 if rng.random() < 0.3 else 0.0)
    for _ in range(rng.integers(1, 3)):
        top, left = rng.integers(0, CELLS - 2, 2)
        cells[top : top + rng.integers(1, 9), left : left + rng.integers(1, 9)] = True
    return cells


def together(service: Service, requests: list[dict[str, Any]], method: str) -> list[StreamStep]:
    """The last steps of requests that share passes."""
    news = [queue.SimpleQueue[StreamStep | BaseException]() for _ in requests]
    for own, options in zip(news, requests, strict=True):
        service.submit(own.put, steps=False, method=method, **options)
    last = [own.get(timeout=120) for own in news]
    return [one for one in last if isinstance(one, StreamStep)]


def check(pipe: Pipeline, masks: list[Cells], images: list[Image.Image], prompts: list[str]) -> None:
    """Draw each under every method, alone and four at a time."""
    requests: list[dict[str, Any]] = [
        {"prompts": prompt, "seed": 90 + i, "image": image, "mask": pixels(cells)}
        for i, (cells, image, prompt) in enumerate(zip(masks, images, prompts, strict=True))
    ]
    expected = [pipe(**one, method=EXACT[0]) for one in requests]
    for request, result, cells in zip(requests, expected, masks, strict=True):
        kept = pipe.check(**request).images[0].edit.preserved  # type: ignore[union-attr]
        assert (result.codes[0] == kept)[~cells.ravel()].all()
        near = np.pad(cells, 1)
        near = sum(np.roll(near, (y, x), (0, 1)) for y in (-1, 0, 1) for x in (-1, 0, 1))[1:-1, 1:-1] > 0
        assert (np.asarray(result.images[0]) == np.asarray(request["image"]))[~pixels(near)].all()
    with Service(pipe, together=4) as service:
        for method in EXACT:
            alone = [pipe(**one, method=method) for one in requests] if method != EXACT[0] else expected
            groups = [requests[i : i + 4] for i in range(0, len(requests), 4)]
            shared = [one for group in groups for one in together(service, group, method)]
            for one, last, result in zip(alone, shared, expected, strict=True):
                assert one.codes[0].tolist() == last.codes[0].tolist() == result.codes[0].tolist(), method
                assert one.images[0].tobytes() == last.image(0).tobytes() == result.images[0].tobytes(), method


def test_an_edit_is_the_same_picture_under_every_exact_method_alone_and_beside_others(pipe: Pipeline) -> None:
    before = [Image.linear_gradient("L").convert("RGB")] * 2
    small, other = np.zeros((2, CELLS, CELLS), bool)
    small[1:3, 6:9] = other[0, 0] = other[2, 3:6] = True  # what is kept at the end takes no pass
    check(pipe, [small, other], before, ["a blue cube on sand", "a green cone on snow"])


def test_of_several_tries_that_is_kept_which_fits_what_lies_below(pipe: Pipeline) -> None:
    hole = np.zeros((CELLS, CELLS), bool)
    hole[3:6, 5:9] = True
    request: dict[str, Any] = {"prompts": "a red cube on sand", "seed": 4, "num_images": 3, "method": "sjd:window=7"}
    edit = {**request, "image": pipe(**request | {"num_images": 1}).images[0], "mask": pixels(hole)}
    every = pipe(**edit)
    alone = pipe.likelihoods(every.codes, **request)
    drawn = [12 * one.nats for one in pipe.likelihoods(every.codes, **edit | {"mask": pixels(~hole)})]
    first = int(np.argmin(256 * np.array([one.nats for one in alone]) - drawn))
    assert pipe.likelihoods(every.codes, **edit | {"mask": pixels(hole | True)}) == alone
    best = pipe.edit(**edit | {"num_images": 1}, tries=3)
    assert best.seeds == [4 + first] == [5]
    assert best.images[0].tobytes() == every.images[first].tobytes()


@pytest.mark.slow
def test_fifty_masks_give_the_same_pictures_under_every_exact_method_and_keep_what_is_around(pipe: Pipeline) -> None:
    rng = np.random.default_rng(39)
    prompts = pipe.bundle.path("prompts").read_text("utf-8").splitlines()[:50]
    before = [pipe(prompt, seed=i, method="sjd:window=7").images[0] for i, prompt in enumerate(prompts)]
    check(pipe, [random_cells(rng) for _ in prompts], before, prompts[1:] + prompts[:1])
