"""Tests of image edits with bundles of several families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lantern_rt import Pipeline
from lantern_rt.subjects.image_files import convert_to_encoder_input

RED_CUBE: dict[str, Any] = {"prompts": "a red cube"}


@pytest.mark.parametrize(
    ("family", "prompt"),
    [
        ("lumina", RED_CUBE),
        ("lumina2", RED_CUBE),
        ("emu3", RED_CUBE),
        ("anole", RED_CUBE),
        ("c2i", {"class_ids": 3}),
        ("rar", {"class_ids": 3}),
        ("prologue", {"class_ids": 3}),
    ],
)
def test_edits_preserve_codes_and_pixels_of_the_upper_rows(
    family: str, prompt: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    with Pipeline.from_bundle(request.getfixturevalue(f"{family}_bundle"), threads=1) as pipe:
        manifest = pipe.bundle.manifest
        size = [*manifest.sizes, manifest.size()][-1]
        image = Image.linear_gradient("L").resize(manifest.size_in_pixels(size)).convert("RGB")
        options = {"image": image, "keep_rows": size.rows - 1, **prompt}
        preserved_codes = pipe.check(**options).images[0].preserved_codes
        assert len(preserved_codes) == size.codes
        results = [pipe(method=method, **options) for method in ("ar", "sjd:window=3", "rows:window=2")]
        assert all((result.codes[0] == preserved_codes)[preserved_codes >= 0].all() for result in results)
        assert results[0].codes[0].tolist() == results[1].codes[0].tolist()
        # Pixels depend on neighbouring grid rows, so only pixels above the last preserved row are compared.
        height = image.height // size.rows * (size.rows - 2)
        np.testing.assert_array_equal(np.asarray(results[0].images[0])[:height], np.asarray(image)[:height])


def test_an_edit_can_preserve_the_prologue_alone(prologue_bundle: Path) -> None:
    with Pipeline.from_bundle(prologue_bundle, threads=1) as pipe:
        image = Image.linear_gradient("L").resize((16, 16)).convert("RGB")
        (encoded,) = pipe.engines.encode_images(convert_to_encoder_input(np.asarray(image)))
        edits = [pipe.edit(image, keep_rows=0, class_ids=3, seed=seed, tries=2) for seed in (1, 5)]
    codes = [edit.codes[0].tolist() for edit in edits]
    assert codes[0][:5] == codes[1][:5] == encoded[:5].tolist()
    assert codes[0][5:] != codes[1][5:]
