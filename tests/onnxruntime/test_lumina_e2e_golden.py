"""Lumina-mGPT's whole greedy generations of the published solver, grids of several shapes, through the exported graphs.

The published solver lets the model write the size itself; here it is part of the prompt, which gives the same state.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lantern_rt import Pipeline

DATA = Path(__file__).parent.parent / "data/lumina-mgpt"
TRACES: list[dict[str, Any]] = json.loads((DATA / "traces.json").read_text())
EXACT = ["ar", "sjd:window=1", "sjd:window=7", "rows:window=6"]


def named(trace: dict[str, Any]) -> str:
    return f"{trace['latent'][0]}x{trace['latent'][1]}-cfg{trace['cfg']:g}"


def asked(trace: dict[str, Any]) -> dict[str, Any]:
    return {"size": f"{trace['width']}x{trace['height']}", "temperature": 0, "cfg_scale": trace["cfg"]}


@pytest.fixture(scope="module")
def pipe(lumina_bundle: Path) -> Pipeline:
    return Pipeline.from_bundle(lumina_bundle, threads=1)


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("trace", TRACES, ids=named)
def test_greedy_generations_of_every_grid_give_the_published_ids(
    pipe: Pipeline, trace: dict[str, Any], method: str
) -> None:
    result = pipe(trace["caption"], method=method, **asked(trace))
    assert result.codes[0].reshape(trace["latent"]).tolist() == trace["codes"]
