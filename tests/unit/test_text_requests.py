"""A request to a bundle of kind `text`: which prefix rows are real, and what such a manifest may say."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bundle_folder import make_bundle, read_manifest, write_manifest

from lantern_rt import open_bundle
from lantern_rt.bundle.manifest import Manifest
from lantern_rt.errors import BundleError
from lantern_rt.requests import check_request

PREFIX = 6


def text_manifest(folder: Path, **condition: Any) -> Manifest:
    fields = read_manifest(make_bundle(folder))
    (folder / "tokenizer.json").write_text("{}")
    fields["files"]["tokenizer"] = {"path": "tokenizer.json", "sha256": "0" * 64, "bytes": 0}
    fields["condition"] = {"kind": "text", "prefix": PREFIX} | condition
    write_manifest(folder, fields)
    return open_bundle(folder).manifest


def test_tokens_stand_at_the_end_of_the_prefix_and_the_rest_is_padding(tmp_path: Path) -> None:
    manifest = text_manifest(tmp_path / "tiny", cleaning="llamagen")
    ids = {"short": [7, 1], "full": [2, 3, 4, 5, 6, 1]}
    tokenizer: Any = SimpleNamespace(encode=lambda text, slots: np.array(ids[text], np.int64))
    short, full = check_request(manifest, tokenizer, ["short", "full"], method="ar").images
    assert short.inputs["token_ids"].tolist() == [[7, 1]]
    assert short.inputs["token_mask"].tolist() == [[1, 1]]
    assert short.real[0].tolist() == [False] * 4 + [True] * 2
    assert full.inputs["token_ids"].tolist() == [ids["full"]]
    assert full.real[0].all()
    assert all(array.dtype == np.int64 for array in short.inputs.values())


def test_a_text_bundle_needs_its_tokenizer(tmp_path: Path) -> None:
    text_manifest(tmp_path / "tiny")
    fields = json.loads((tmp_path / "tiny/bundle.json").read_text())
    del fields["files"]["tokenizer"]
    write_manifest(tmp_path / "tiny", fields)
    with pytest.raises(BundleError, match="`files` lacks tokenizer"):
        open_bundle(tmp_path / "tiny")


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ({"kind": "class", "classes": 10, "cleaning": "llamagen"}, "`cleaning` goes with kind `text`"),
        ({"caption_dim": 32}, "`caption_dim` goes with kind `embeddings`"),
        ({"cleaning": "other"}, "expected 'llamagen'"),
    ],
)
def test_a_condition_that_contradicts_itself_is_refused(tmp_path: Path, condition: dict[str, Any], words: str) -> None:
    with pytest.raises(BundleError, match=words):
        text_manifest(tmp_path / "tiny", **condition)
