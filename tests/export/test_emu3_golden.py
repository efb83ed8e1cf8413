"""Comparisons of Emu3's exported graphs with arrays of the published program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import DATA, GUIDED_TOLERANCE, PromptRunner, assert_close, load_golden
from guided_logits import mix_guided_logits
from numpy.typing import NDArray
from shared_goldens import ROW_NAMES, log_softmax, mix_guided

from lantern_rt.methods import Sampling
from lantern_rt.runtime.sampling import choose_codes, compute_distribution

CODES = slice(557, 653)  # token ids of the codes
ARRAYS = load_golden("emu3")
TRACES: list[dict[str, Any]] = json.loads((DATA / "emu3" / "traces.json").read_text())
SINGLE_IMAGE_RUNS = [trace for trace in TRACES if trace["name"] != "batch"]
GUIDED_RUNS = [trace for trace in SINGLE_IMAGE_RUNS if trace["name"] in ("run0_cfg3", "run1_cfg3", "run2_cfg3")]
BATCH = next(trace for trace in TRACES if trace["name"] == "batch")


def get_trace_name(trace: dict[str, Any]) -> str:
    return str(trace["name"])


def test_guided_logits_give_the_recorded_codes_and_probabilities() -> None:
    guidance = Sampling(cfg_scale=3.0)
    # The published code applies guidance to log-probabilities. Guided logits differ by one constant for each node.
    for name in ("decode", "tree"):
        published = ARRAYS[f"{name}_guided"]
        logits = np.stack([ARRAYS[f"{name}_{row_name}_logits"] for row_name in ROW_NAMES])
        differences = mix_guided_logits(logits, guidance) - published
        assert np.abs(differences - differences.mean(1, keepdims=True)).max() < GUIDED_TOLERANCE
        assert np.abs(differences).max() > 1  # published scores and guided logits do differ
        guided_logits = mix_guided_logits(logits[..., CODES], guidance)
        published_logits = published[:, CODES]
        for sampling in (Sampling(temperature=0), Sampling(top_k=20), Sampling(top_k=20, temperature=0.7)):
            expected_codes = choose_codes(published_logits, None, sampling)
            np.testing.assert_array_equal(choose_codes(guided_logits, None, sampling), expected_codes)
            expected = compute_distribution(published_logits, sampling)
            np.testing.assert_allclose(compute_distribution(guided_logits, sampling), expected, rtol=0, atol=1e-4)


def compute_guided_logits(bundle: Path, trace: dict[str, Any]) -> NDArray[np.float32]:
    """Return the guided logits `[tokens, codebook size]` for every token that a recorded run generated."""
    runs = PromptRunner(bundle, trace["prompt_ids"], trace["unconditional_ids"])
    prompt_logits = mix_guided([{"logits": output["logits"][:, -1:]} for output in runs.outputs], trace["cfg"])
    out = runs.step(np.array(trace["generated_ids"][:-1], np.int64))
    return np.concatenate([prompt_logits, mix_guided(out, trace["cfg"])])


@pytest.mark.parametrize("trace", SINGLE_IMAGE_RUNS, ids=get_trace_name)
def test_recorded_tokens_have_the_largest_guided_logits(emu3_bundle: Path, trace: dict[str, Any]) -> None:
    scores = compute_guided_logits(emu3_bundle, trace)
    ids = np.array(trace["generated_ids"])
    (rows, columns) = trace["grid"]
    assert len(ids) == rows * (columns + 1) + 3  # a row end per grid row, and three tokens after the image
    is_free = np.array(trace["forced"]) == 0
    assert is_free.tolist() == ([True] * columns + [False]) * rows + [False] * 3
    best_codes = scores.argmax(-1)[is_free]
    np.testing.assert_array_equal(best_codes + CODES.start, ids[is_free])
    assert best_codes.reshape(rows, columns).tolist() == trace["codes"]


@pytest.mark.parametrize("trace", GUIDED_RUNS, ids=get_trace_name)
def test_every_token_of_a_run_has_the_recorded_scores(emu3_bundle: Path, trace: dict[str, Any]) -> None:
    expected = ARRAYS[f"{trace['name']}_scores"][:, CODES]
    assert_close(log_softmax(compute_guided_logits(emu3_bundle, trace)), log_softmax(expected), GUIDED_TOLERANCE)


@pytest.mark.parametrize("row", range(2))
def test_recorded_tokens_of_a_batch_have_the_largest_logits(emu3_bundle: Path, row: int) -> None:
    is_real_token = np.array(BATCH["attention_mask"][row]) > 0
    trace = {name: BATCH[name][row] for name in ("unconditional_ids", "generated_ids")} | {"cfg": BATCH["cfg"]}
    trace["prompt_ids"] = np.array(BATCH["prompt_ids"][row])[is_real_token].tolist()
    scores = compute_guided_logits(emu3_bundle, trace)
    ids = np.array(trace["generated_ids"])
    is_code = ids >= CODES.start
    rows, columns = BATCH["grids"][row]
    assert is_code.sum() == rows * columns
    np.testing.assert_array_equal(scores.argmax(-1)[is_code] + CODES.start, ids[is_code])
