"""Lumina-mGPT's exported graphs compared with every recorded array."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import DATA, GUIDED_TOLERANCE, PromptRunner, assert_close, load_golden
from shared_goldens import GoldenFamily, RowEndDecoderGolden, mix_guided

TRACES: list[dict[str, Any]] = json.loads((DATA / "lumina-mgpt" / "traces.json").read_text())


@pytest.fixture(scope="module")
def family(lumina_bundle: Path) -> GoldenFamily:
    return GoldenFamily(lumina_bundle, load_golden("lumina-mgpt"), codes=slice(4, 132), row_end=142)


class TestDecoder(RowEndDecoderGolden):
    pass


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: f"run{trace['prompt']}_{trace['name']}")
def test_guided_scores_of_every_token_equal_the_recorded_scores(family: GoldenFamily, trace: dict[str, Any]) -> None:
    scores = family.arrays[f"run{trace['prompt']}_{trace['name']}_scores"][:, family.codes]
    ids = trace["generated_ids"]
    uncond = trace["unconditional_prefix"]
    runs = PromptRunner(family.bundle, [*trace["prompt_ids"], *ids[:3]], uncond)
    prefix_logits = runs.outputs[0]["logits"][0, -4:-1]  # begin of image and image size, without guidance
    out = runs.step(np.array(ids[3:-1], np.int64))
    last_logits = mix_guided([{"logits": output["logits"][:, -1:]} for output in runs.outputs])
    assert_close(prefix_logits, scores[:3])
    assert_close(np.concatenate([last_logits, mix_guided(out)[:-1]]), scores[3:-1], GUIDED_TOLERANCE)
    assert_close(out[0]["logits"][0, -1], scores[-1])  # the end-of-turn token, without guidance
