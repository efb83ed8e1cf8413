"""Sizes of pictures and ends of rows: what a manifest may say, what a request may ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bundle_folder import make_bundle, read_manifest, write_manifest
from pydantic import ValidationError
from refusals import refused

from lantern_rt import open_bundle
from lantern_rt.bundle.manifest import Manifest, Size
from lantern_rt.errors import BundleError, RequestError
from lantern_rt.requests import resolve_settings

SQUARE = {"name": "16x16", "rows": 4, "columns": 4, "tokens": [7]}
WIDE = {"name": "24x8", "rows": 2, "columns": 6, "tokens": [8]}
AR = {"method": "ar"}
EMPTY = {"kind": "tokens", "prefix": 4, "layout": {"after": [3], "uncond": []}}


@pytest.fixture(scope="module")
def fields(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    read = read_manifest(make_bundle(tmp_path_factory.mktemp("sizes") / "tiny"))
    return {**read, "files": {**read["files"], "tokenizer": read["files"]["target"]}}


def test_a_bundle_of_one_size_has_that_one(fields: dict[str, Any]) -> None:
    manifest = Manifest.model_validate(fields)
    assert manifest.size() == manifest.size("16x16") == Size(name="16x16", rows=4, columns=4)
    assert resolve_settings(manifest, AR).size is None
    assert resolve_settings(manifest, {**AR, "size": "16x16"}).as_dict() == resolve_settings(manifest, AR).as_dict()
    with refused(RequestError, "size: found '24x8', expected 16x16"):
        resolve_settings(manifest, {**AR, "size": "24x8"})


def test_a_bundle_of_several_sizes_takes_each_by_its_name(fields: dict[str, Any]) -> None:
    manifest = Manifest.model_validate({**fields, "sizes": [WIDE, SQUARE], "row_end": 16})
    assert manifest.size().name == "16x16"
    assert resolve_settings(manifest, AR).size == "16x16"
    assert resolve_settings(manifest, {**AR, "size": "24x8"}).as_dict()["size"] == "24x8"
    assert manifest.pixels(manifest.size("24x8")) == (24, 8)
    assert manifest.picture_tokens == 19  # 4 rows of 4, and the ends of three
    for wrong in ("8x24", "", "24 x 8", 24, ["24x8"]):
        with refused(RequestError, "size: found", "expected 24x8, 16x16"):
            resolve_settings(manifest, {**AR, "size": wrong})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": [WIDE]}, "`sizes` lacks the default grid, 4 x 4"),
        ({"sizes": [SQUARE, {**WIDE, "name": "16x16"}]}, "`sizes` has a name or a grid twice"),
        ({"sizes": [SQUARE, {**SQUARE, "name": "17x17"}]}, "`sizes` has a name or a grid twice"),
        ({"sizes": [SQUARE, {**WIDE, "name": "wide"}]}, "should match pattern"),
        ({"sizes": [SQUARE, {**WIDE, "columns": 0}]}, "greater than or equal to 1"),
        ({"image_width": 8192, "sizes": [SQUARE, WIDE]}, "size 24x8 has more than 8192 pixels along a side"),
        ({"row_end": 15}, "row_end 15 is a code, expected a row behind the 16 of them"),
        ({"row_end": 2_000_000}, "row_end 2000000 is a code, expected a row behind"),
        ({"sizes": [SQUARE, {**WIDE, "rows": 16, "columns": 2}], "row_end": 16}, "take 47 positions, but .* is 32"),
        ({"condition": EMPTY}, "`uncond` is empty, and so are the tokens of a size"),
        ({"condition": EMPTY, "sizes": [SQUARE, {**WIDE, "tokens": []}]}, "`uncond` is empty, and so are the tokens"),
    ],
)
def test_sizes_and_row_ends_that_contradict_a_manifest_are_refused(
    fields: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        Manifest.model_validate(fields | changes)


def test_an_unconditional_row_may_be_the_tokens_of_the_size_alone(fields: dict[str, Any]) -> None:
    Manifest.model_validate(fields | {"condition": EMPTY, "sizes": [SQUARE, WIDE]})


def test_the_table_of_embeddings_reaches_the_end_of_a_row(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "tiny")
    write_manifest(folder, read_manifest(folder) | {"row_end": 16})
    with refused(BundleError, "code_embeddings.npy", "[16, 8]", "[17, 8]"):
        _ = open_bundle(folder).code_embeddings
