"""Editing with the embedded model `scenes`: every exact method and any batch must generate the same edit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from shared_passes import generate_in_shared_passes

from lantern_rt import Pipeline

EXACT_METHODS = ("ar", "eagle:tree=chain-3", "eagle:tree=dynamic-16", "sjd:window=7")
CELL_PIXELS = 16
GRID_CELLS = 16
Cells = NDArray[np.bool_]


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return Pipeline.from_bundle("scenes", threads=2)


def expand_to_pixels(cells: Cells) -> Cells:
    return cells.repeat(CELL_PIXELS, 0).repeat(CELL_PIXELS, 1)


def make_random_mask(rng: np.random.Generator) -> Cells:
    """Return a grid mask `[16, 16]` of one or two rectangles, sometimes with scattered cells."""
    cells = rng.random((GRID_CELLS, GRID_CELLS)) < (0.2 if rng.random() < 0.3 else 0.0)
    for _ in range(rng.integers(1, 3)):
        first_row, first_column = rng.integers(0, GRID_CELLS - 2, 2)
        cells[first_row : first_row + rng.integers(1, 9), first_column : first_column + rng.integers(1, 9)] = True
    return cells


def check_edits(pipe: Pipeline, masks: list[Cells], images: list[Image.Image], prompts: list[str]) -> None:
    """Check that every exact method generates the same edits, alone and in batches of four."""
    requests: list[dict[str, Any]] = [
        {"prompts": prompt, "seed": 90 + i, "image": image, "mask": expand_to_pixels(cells)}
        for i, (cells, image, prompt) in enumerate(zip(masks, images, prompts, strict=True))
    ]
    expected = [pipe(**request, method=EXACT_METHODS[0]) for request in requests]
    for request, result, cells in zip(requests, expected, masks, strict=True):
        preserved_codes = pipe.check(**request).images[0].preserved_codes  # type: ignore[union-attr]
        assert (result.codes[0] == preserved_codes)[~cells.ravel()].all()
        near_regenerated = np.pad(cells, 1)
        near_regenerated = (
            sum(np.roll(near_regenerated, (y, x), (0, 1)) for y in (-1, 0, 1) for x in (-1, 0, 1))[1:-1, 1:-1] > 0
        )
        assert (np.asarray(result.images[0]) == np.asarray(request["image"]))[~expand_to_pixels(near_regenerated)].all()
    for method in EXACT_METHODS:
        requests = [request | {"method": method} for request in requests]
        alone = [pipe(**request) for request in requests] if method != EXACT_METHODS[0] else expected
        shared = generate_in_shared_passes(pipe, requests, 4)
        for edit, last_step, result in zip(alone, shared, expected, strict=True):
            assert edit.codes[0].tolist() == last_step.codes[0].tolist() == result.codes[0].tolist(), method
            assert edit.images[0].tobytes() == last_step.image(0).tobytes() == result.images[0].tobytes(), method


def test_exact_methods_generate_the_same_edit_in_any_batch(pipe: Pipeline) -> None:
    images = [Image.linear_gradient("L").convert("RGB")] * 2
    first_mask, second_mask = np.zeros((2, GRID_CELLS, GRID_CELLS), bool)
    # Preserved tokens at the end of an image need no pass.
    first_mask[1:3, 6:9] = second_mask[0, 0] = second_mask[2, 3:6] = True
    check_edits(pipe, [first_mask, second_mask], images, ["a blue cube on sand", "a green cone on snow"])


def test_edit_returns_the_try_with_the_most_probable_border(pipe: Pipeline) -> None:
    edited_cells = np.zeros((GRID_CELLS, GRID_CELLS), bool)
    edited_cells[3:6, 5:9] = True
    request: dict[str, Any] = {"prompts": "a red cube on sand", "seed": 4, "num_images": 3, "method": "sjd:window=7"}
    edit = {**request, "image": pipe(**request | {"num_images": 1}).images[0], "mask": expand_to_pixels(edited_cells)}
    all_tries = pipe(**edit)
    image_likelihoods = pipe.likelihoods(all_tries.codes, **request)
    edited_nats = [
        12 * likelihood.nats
        for likelihood in pipe.likelihoods(all_tries.codes, **edit | {"mask": expand_to_pixels(~edited_cells)})
    ]
    best_index = int(np.argmin(256 * np.array([likelihood.nats for likelihood in image_likelihoods]) - edited_nats))
    assert (
        pipe.likelihoods(all_tries.codes, **edit | {"mask": expand_to_pixels(edited_cells | True)}) == image_likelihoods
    )
    chosen = pipe.edit(**edit | {"num_images": 1}, tries=3)
    assert chosen.seeds == [4 + best_index] == [6]
    assert chosen.images[0].tobytes() == all_tries.images[best_index].tobytes()


@pytest.mark.slow
def test_edits_of_fifty_masks_are_exact_with_every_method(pipe: Pipeline) -> None:
    rng = np.random.default_rng(39)
    prompts = pipe.bundle.path("prompts").read_text("utf-8").splitlines()[:50]
    images = [pipe(prompt, seed=i, method="sjd:window=7").images[0] for i, prompt in enumerate(prompts)]
    check_edits(pipe, [make_random_mask(rng) for _ in prompts], images, prompts[1:] + prompts[:1])
