"""Emu3's exported graphs against every recorded array."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from goldens import DATA, GUIDED, Sides, close, golden, observed
from guided_logits import guide
from numpy.typing import NDArray
from shared_goldens import SIDES, Family, RowEndDecoderGolden, log_softmax, mixed

from lantern_rt.export.compare import GraphFileSession
from lantern_rt.methods import Sampling
from lantern_rt.output.images import to_image
from lantern_rt.runtime.sampling import choose_codes, compute_distribution

CODES = slice(557, 653)  # the image tokens
TRACES: list[dict[str, Any]] = json.loads((DATA / "emu3" / "traces.json").read_text())
SINGLE = [trace for trace in TRACES if trace["name"] != "batch"]
DRAWN = [trace for trace in SINGLE if trace["name"] in ("run0_cfg3", "run1_cfg3", "run2_cfg3")]
BATCH = next(trace for trace in TRACES if trace["name"] == "batch")


@pytest.fixture(scope="module")
def family(emu3_bundle: Path) -> Family:
    return Family(emu3_bundle, golden("emu3"), CODES, row_end=549, scored=log_softmax)


class TestDecoder(RowEndDecoderGolden):
    pass


def by_name(trace: dict[str, Any]) -> str:
    return str(trace["name"])


def test_guiding_logits_gives_the_choices_and_probabilities_of_decode_guided_and_tree_guided(family: Family) -> None:
    guidance = Sampling(cfg_scale=3.0)
    # Both rows' log-softmax takes a constant from a row's logits, and so from the guided ones.
    for name in ("decode", "tree"):
        published = family.arrays[f"{name}_guided"]
        logits = np.stack([family.arrays[f"{name}_{side}_logits"] for side in SIDES])
        apart = guide(logits, guidance) - published
        assert np.abs(apart - apart.mean(1, keepdims=True)).max() < GUIDED
        assert np.abs(apart).max() > 1  # the scores themselves do differ
        plain = guide(logits[..., CODES], guidance)
        theirs = published[:, CODES]
        for sampling in (Sampling(temperature=0), Sampling(top_k=20), Sampling(top_k=20, temperature=0.7)):
            np.testing.assert_array_equal(choose_codes(plain, None, sampling), choose_codes(theirs, None, sampling))
            expected = compute_distribution(theirs, sampling)
            np.testing.assert_allclose(compute_distribution(plain, sampling), expected, rtol=0, atol=1e-4)


def test_filter_probs_inside_a_row_of_codes(family: Family) -> None:
    for (top_k, temperature), expected in zip(
        family.arrays["filter_params"], family.arrays["filter_probs"], strict=True
    ):
        found = compute_distribution(
            family.arrays["filter_logits"][:, CODES], Sampling(top_k=int(top_k), temperature=float(temperature))
        )
        np.testing.assert_allclose(found, expected[:, CODES], rtol=0, atol=1e-4)
        assert expected[:, CODES].sum(1) == pytest.approx(1, abs=1e-5)


def greedy_scores(bundle: Path, trace: dict[str, Any]) -> NDArray[np.float32]:
    """Guided logits of codes for each token of a run, which is fed as it was generated."""
    sides = Sides(bundle, trace["prompt_ids"], trace["unconditional_ids"])
    last = mixed([{"logits": own["logits"][:, -1:]} for own in sides.outputs], trace["cfg"])
    out = sides.step(np.array(trace["generated_ids"][:-1], np.int64))
    return np.concatenate([last, mixed(out, trace["cfg"])])


@pytest.mark.parametrize("trace", SINGLE, ids=by_name)
def test_generated_ids_of_a_run_are_the_likeliest_codes_wherever_none_was_forced(
    family: Family, trace: dict[str, Any]
) -> None:
    scores = greedy_scores(family.bundle, trace)
    ids = np.array(trace["generated_ids"])
    (rows, columns) = trace["grid"]
    assert len(ids) == rows * (columns + 1) + 3
    free = np.array(trace["forced"]) == 0
    assert free.tolist() == ([True] * columns + [False]) * rows + [False] * 3
    found = scores.argmax(-1)[free]
    np.testing.assert_array_equal(found + CODES.start, ids[free])
    assert found.reshape(rows, columns).tolist() == trace["codes"]


@pytest.mark.parametrize("trace", DRAWN, ids=by_name)
def test_scores_of_every_generated_token_of_a_run_of_emu3(family: Family, trace: dict[str, Any]) -> None:
    expected = family.arrays[f"{trace['name']}_scores"][:, CODES]
    close(log_softmax(greedy_scores(family.bundle, trace)), log_softmax(expected), GUIDED)


@pytest.mark.parametrize("row", range(2))
def test_generated_ids_of_the_batch_where_padding_was_seen_and_where_there_was_none(family: Family, row: int) -> None:
    real = np.array(BATCH["attention_mask"][row]) > 0
    trace = {name: BATCH[name][row] for name in ("unconditional_ids", "generated_ids")} | {"cfg": BATCH["cfg"]}
    trace["prompt_ids"] = np.array(BATCH["prompt_ids"][row])[real].tolist()
    scores = greedy_scores(family.bundle, trace)
    ids = np.array(trace["generated_ids"])
    free = ids >= CODES.start
    rows, columns = BATCH["grids"][row]
    assert free.sum() == rows * columns
    np.testing.assert_array_equal(scores.argmax(-1)[free] + CODES.start, ids[free])


def test_vq_codes_become_vq_code_vectors_vq_post_quant_vq_z_vq_zq_and_vq_decoded(family: Family) -> None:
    path = family.bundle / "vq_decoder.onnx"
    reading = {node.input[1]: node for node in onnx.load(path).graph.node if node.op_type == "Conv"}
    by_code = reading["decoder.post_quant_conv.weight"]
    norm = reading["decoder.mid.0.norm1.conv_y.weight"]  # the codes as they are: cells are the coarsest pixels
    names = [by_code.input[0], by_code.output[0], reading["decoder.conv_in.weight"].input[0], norm.input[0], "images"]
    found = observed(path, names, {"codes": family.arrays["vq_codes"]})
    for array, name in zip(found, ("code_vectors", "post_quant", "z", "zq", "decoded"), strict=True):
        close(array, family.arrays[f"vq_{name}"])


@pytest.mark.parametrize("trace", DRAWN, ids=lambda trace: f"{trace['name']}_pixels_and_uint8")
def test_codes_of_runs_become_their_pictures(family: Family, trace: dict[str, Any]) -> None:
    (picture,) = GraphFileSession(family.bundle / "vq_decoder.onnx").run({"codes": np.array([trace["codes"]])})[
        "images"
    ]
    close(picture, family.arrays[f"{trace['name']}_pixels"])
    expected = family.arrays[f"{trace['name']}_uint8"]
    assert np.abs(np.asarray(to_image(picture)).astype(int) - expected).max() <= 1


def test_vq_image_becomes_vq_pre_quant_and_vq_encoded(family: Family) -> None:
    found = GraphFileSession(family.bundle / "vq_encoder.onnx").run({"images": family.arrays["vq_image"]})
    close(found["pre_quant"], family.arrays["vq_pre_quant"])
    np.testing.assert_array_equal(
        found["codes"].reshape(family.arrays["vq_encoded"].shape), family.arrays["vq_encoded"]
    )
