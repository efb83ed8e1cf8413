"""Emu3's whole greedy generations of the published program, grids of several shapes, from prompts to pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lantern_rt import Pipeline

DATA = Path(__file__).parent.parent / "data/emu3"
SUFFIX = " masterpiece, film grained, best quality."  # of the program; a bundle adds it to prompts
TRACES: dict[str, dict[str, Any]] = {one["name"]: one for one in json.loads((DATA / "traces.json").read_text())}
RUNS = ["run0_cfg3", "run0_cfg1", "run1_cfg3", "run2_cfg3"]
EXACT = ["ar", "sjd:window=1", "sjd:window=7", "rows:window=12"]


@pytest.fixture(scope="module")
def pipe(emu3_bundle: Path) -> Pipeline:
    return Pipeline.from_bundle(emu3_bundle, threads=1)


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("name", RUNS)
def test_greedy_generations_of_every_grid_give_the_published_codes_and_uint8_pictures(
    pipe: Pipeline, name: str, method: str
) -> None:
    trace = TRACES[name]
    rows, columns = trace["grid"]
    prompt, size = trace["text"].removesuffix(SUFFIX), f"{2 * columns}x{2 * rows}"
    result = pipe(prompt, method=method, size=size, temperature=0, cfg_scale=trace["cfg"])
    assert result.codes[0].reshape(rows, columns).tolist() == trace["codes"]
    if f"{name}_uint8" in (arrays := np.load(DATA / "golden.npz")):
        found = np.asarray(result.images[0]).astype(int)
        assert found.shape == (2 * rows, 2 * columns, 3)
        assert np.abs(found - arrays[f"{name}_uint8"]).max() <= 1
