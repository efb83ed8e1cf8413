"""Edits with bundles of other families: several image sizes, row ends, classes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from lantern_rt import Pipeline

RED: dict[str, Any] = {"prompts": "a red cube"}


@pytest.mark.parametrize(
    ("family", "subject"), [("lumina", RED), ("lumina2", RED), ("emu3", RED), ("anole", RED), ("c2i", {"class_ids": 3})]
)
def test_preserved_tokens_are_those_of_the_image_encoder(
    family: str, subject: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    with Pipeline.from_bundle(request.getfixturevalue(f"{family}_bundle"), threads=1) as pipe:
        manifest = pipe.bundle.manifest
        size = [*manifest.sizes, manifest.size()][-1]
        image = Image.linear_gradient("L").resize(manifest.size_in_pixels(size)).convert("RGB")
        options = {"image": image, "keep_rows": size.rows - 1, **subject}
        preserved_codes = pipe.check(**options).images[0].edit.preserved_codes
        assert len(preserved_codes) == size.codes
        results = [pipe(method=method, **options) for method in ("ar", "sjd:window=3", "rows:window=2")]
        assert all((result.codes[0] == preserved_codes)[preserved_codes >= 0].all() for result in results)
        assert results[0].codes[0].tolist() == results[1].codes[0].tolist()
        above = image.height // size.rows * (size.rows - 2)
        np.testing.assert_array_equal(np.asarray(results[0].images[0])[:above], np.asarray(image)[:above])
