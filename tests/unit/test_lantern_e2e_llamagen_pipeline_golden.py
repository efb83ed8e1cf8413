"""Text embeddings and parameters of published runs, given to the public interface as a user would give them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lantern_rt import Pipeline

DATA = Path(__file__).parent.parent / "data" / "lantern-e2e-llamagen"
GOLDEN = np.load(DATA / "golden.npz")
TRACES: list[dict[str, Any]] = json.loads((DATA / "steps.json").read_text())
GREEDY = {"temperature": 0, "cfg_scale": 4, "top_k": 0, "residual": None}
RELAXED = {"residual": "neighborhood", "neighbors": 40}
RUNS = {
    "ar": {"method": "ar"},
    "eagle2_dynamic_exact": {"method": "eagle", "tree": "dynamic-59-5-10"},
    "lantern_k40_d0.6": RELAXED | {"method": "lantern", "tree": "dynamic-59-5-10", "delta": 0.6},
    "lanternpp_mc25_k40_l5": RELAXED | {"method": "lantern++", "tree": "mc-25", "lambda_": 5},
}


@pytest.fixture(scope="module")
def pipe(t2i_drafter_bundle: Path) -> Pipeline:
    return Pipeline.from_bundle(t2i_drafter_bundle, threads=1)


@pytest.mark.parametrize("name", RUNS)
def test_a_batch_of_embeddings_gives_the_published_codes(pipe: Pipeline, name: str) -> None:
    result = pipe(embeddings=(GOLDEN["t5_embeddings"], GOLDEN["t5_mask"]), **(GREEDY | RUNS[name]))
    published = sorted((trace for trace in TRACES if trace["name"] == name), key=lambda trace: trace["prompt"])
    assert [codes.tolist() for codes in result.codes] == [trace["ids"] for trace in published]


def test_embeddings_are_left_padded_as_published(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    condition = pipe.engines.condition
    monkeypatch.setattr(pipe.engines, "condition", lambda inputs: seen.append(inputs) or condition(inputs))
    next(pipe.stream(embeddings=(GOLDEN["t5_embeddings"], GOLDEN["t5_mask"])))
    assert len(seen) == len(GOLDEN["emb_mask"])
    for inputs, mask, embeds in zip(seen, GOLDEN["emb_mask"], GOLDEN["caption_emb"], strict=True):
        np.testing.assert_array_equal(inputs["caption_mask"][0], mask)
        np.testing.assert_array_equal(inputs["caption_embeds"][0], embeds * mask[:, None])
