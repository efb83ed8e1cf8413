"""A bundle written in format 1.1, with that format's names of fields and files, still opens and draws the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lantern_rt import Pipeline
from lantern_rt.bundle.files import EMBEDDED, open_bundle

MANIFEST = Path(__file__).parents[1] / "data" / "bundle-1.1.json"
PROMPT = "a red sphere on sand"


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded bundle as format 1.1 had it."""
    folder = tmp_path_factory.mktemp("format-1") / "scenes"
    shutil.copytree(EMBEDDED / "scenes", folder)
    path = folder / "bundle.json"
    path.write_text(json.dumps(with_names_of(json.loads(MANIFEST.read_text()), json.loads(path.read_text()))))
    return folder


def with_names_of(older: dict[str, Any], present: dict[str, Any]) -> dict[str, Any]:
    """What the present manifest says, by the names of an older one: of the same fields, in the same order."""
    renamed = {key: present[key] for key in older if key not in ("format_version", "decoding")}
    for part in ("target", "drafter", "condition"):
        renamed[part] = dict(zip(older[part], present[part].values(), strict=False))
    own = {one["method"]: one for one in present["decoding"]["methods"]}
    methods = {
        name: {key: own[name].get(key.removesuffix("_"), value) for key, value in given.items()}
        for name, given in older["decoding"]["methods"].items()
    }
    files = {role: entry for role, entry in present["files"].items() if role != "acceptance_statistics"}
    files["rates"] = older["files"]["rates"]
    return {**older, **renamed, "files": files, "decoding": {**older["decoding"], "methods": methods}}


def test_its_manifest_says_what_the_present_one_says(older: Path) -> None:
    found, present = (open_bundle(one).manifest.model_dump() for one in (older, "scenes"))
    del present["files"]["acceptance_statistics"]  # those of format 1 are left out
    del found["format_version"], present["format_version"]  # the newest, and the one it was written in
    assert found == present


def test_it_draws_the_same_tokens(older: Path) -> None:
    first, second = (
        Pipeline.from_bundle(one, threads=1)(PROMPT, method="lantern++", seed=3) for one in (older, "scenes")
    )
    np.testing.assert_array_equal(first.codes, second.codes)
    assert first.settings.as_dict() == second.settings.as_dict()
