"""Lumina-mGPT's exported graphs against every recorded array."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import DATA, GUIDED, Sides, close, golden
from shared_goldens import Family, RowEndDecoderGolden, mixed

from lantern_rt.methods import Sampling
from lantern_rt.runtime.sampling import compute_distribution

TRACES: list[dict[str, Any]] = json.loads((DATA / "lumina-mgpt" / "traces.json").read_text())


@pytest.fixture(scope="module")
def family(lumina_bundle: Path) -> Family:
    return Family(lumina_bundle, golden("lumina-mgpt"), codes=slice(4, 132), row_end=142)


class TestDecoder(RowEndDecoderGolden):
    pass


def test_filter_probs_of_codes_and_of_text(family: Family) -> None:
    for i, (image_k, text_k, temperature) in enumerate(family.arrays["filter_params"]):
        logits = family.arrays["filter_logits"]
        for top_k, wanted, part in (
            (image_k, family.arrays["filter_image_probs"][i], logits[:, family.codes]),
            (text_k, family.arrays["filter_text_probs"][i], logits),
        ):
            sampling = Sampling(top_k=int(top_k), temperature=float(temperature))
            expected = wanted[:, family.codes] if part is not logits else wanted
            np.testing.assert_allclose(compute_distribution(part, sampling), expected, rtol=0, atol=1e-4)
        assert family.arrays["filter_image_probs"][i].sum(1) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: f"run{trace['prompt']}_{trace['name']}")
def test_scores_of_every_generated_token_of_a_run_of_lumina(family: Family, trace: dict[str, Any]) -> None:
    scores = family.arrays[f"run{trace['prompt']}_{trace['name']}_scores"][:, family.codes]
    ids = trace["generated_ids"]
    uncond = trace["unconditional_prefix"]
    sides = Sides(family.bundle, [*trace["prompt_ids"], *ids[:3]], uncond)
    before = sides.outputs[0]["logits"][0, -4:-1]  # begin of image and size: unguided
    out = sides.step(np.array(ids[3:-1], np.int64))
    last = mixed([{"logits": own["logits"][:, -1:]} for own in sides.outputs])
    close(before, scores[:3])
    close(np.concatenate([last, mixed(out)[:-1]]), scores[3:-1], GUIDED)
    close(out[0]["logits"][0, -1], scores[-1])  # the end of the turn: unguided again
