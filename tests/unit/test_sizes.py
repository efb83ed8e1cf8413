"""Image sizes and row ends: fields of the manifest, and the option `size` of requests."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from bundle_folder import read_manifest, write_bundle_manifest
from refusals import expect_error

from lantern_rt import open_bundle
from lantern_rt.bundle.manifest import Manifest, Size
from lantern_rt.errors import BundleError, RequestError
from lantern_rt.requests import resolve_settings

AR = {"method": "ar"}
SQUARE_SIZE = {"name": "24x24", "rows": 6, "columns": 6, "tokens": [7]}
WIDE_SIZE = {"name": "36x12", "rows": 3, "columns": 9, "tokens": [8]}


def test_a_bundle_with_one_image_size_rejects_other_sizes(class_bundle: Path) -> None:
    manifest = open_bundle(class_bundle).manifest
    assert manifest.size() == manifest.size("24x24") == Size(name="24x24", rows=6, columns=6)
    assert resolve_settings(manifest, AR).size is None
    assert resolve_settings(manifest, {**AR, "size": "24x24"}).as_dict() == resolve_settings(manifest, AR).as_dict()
    with expect_error(RequestError, "size: found '36x12', expected 24x24"):
        resolve_settings(manifest, {**AR, "size": "36x12"})


def test_a_bundle_accepts_the_name_of_each_size(class_bundle: Path) -> None:
    fields = read_manifest(class_bundle) | {"sizes": [WIDE_SIZE, SQUARE_SIZE], "row_end": 32}
    manifest = Manifest.model_validate(fields)
    assert manifest.size().name == "24x24"
    assert resolve_settings(manifest, AR).size == "24x24"
    assert resolve_settings(manifest, {**AR, "size": "36x12"}).as_dict()["size"] == "36x12"
    assert manifest.size_in_pixels(manifest.size("36x12")) == (36, 12)
    assert manifest.max_image_tokens == 41  # 6 rows of 6 tokens, and 5 row ends
    for wrong in ("12x36", "", "36 x 12", 24, ["36x12"]):
        with expect_error(RequestError, "size: found", "expected 36x12, 24x24"):
            resolve_settings(manifest, {**AR, "size": wrong})


def test_embeddings_without_the_row_end_token_are_rejected(class_bundle: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(class_bundle, tmp_path / "tiny"))
    write_bundle_manifest(folder, read_manifest(folder) | {"row_end": 32})
    with expect_error(BundleError, "code_embeddings.npy", "[32, 8]", "[33, 8]"):
        _ = open_bundle(folder).code_embeddings


def test_a_small_first_grid_adds_codes(class_bundle: Path) -> None:
    fields = read_manifest(class_bundle) | {"drafter": None, "presets": {}}
    files = {role: entry for role, entry in fields["files"].items() if not role.startswith("vq_")}
    size = SQUARE_SIZE | {"first_grid": [2, 3], "first_position": 1}
    manifest = Manifest.model_validate(fields | {"files": files, "sizes": [size]})
    assert (manifest.size().first_codes, manifest.codes_per_image, manifest.max_image_tokens) == (6, 42, 42)
    assert not manifest.makes_images
    for wrong, words in (
        (
            {"sizes": [size], "row_end": 32},
            "size 24x24 has a first_grid or first_position, which `row_end` does not support",
        ),
        ({"files": files, "sizes": [size | {"first_position": 900}]}, "first_position 900 is not in 1 .. "),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            Manifest.model_validate(fields | wrong)
