"""Comparisons of Emu3's exported graphs with arrays of the published program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from goldens import DATA, GUIDED_TOLERANCE, PromptRunner, assert_close, compute_graph_values, load_golden
from guided_logits import mix_guided_logits
from numpy.typing import NDArray
from shared_goldens import ROW_NAMES, GoldenFamily, RowEndDecoderGolden, log_softmax, mix_guided

from lantern_rt.export.compare import GraphFileSession
from lantern_rt.methods import Sampling
from lantern_rt.output.images import convert_pixels_to_image
from lantern_rt.runtime.sampling import choose_codes, compute_distribution

CODES = slice(557, 653)  # token ids of the codes
TRACES: list[dict[str, Any]] = json.loads((DATA / "emu3" / "traces.json").read_text())
SINGLE_IMAGE_RUNS = [trace for trace in TRACES if trace["name"] != "batch"]
GUIDED_RUNS = [trace for trace in SINGLE_IMAGE_RUNS if trace["name"] in ("run0_cfg3", "run1_cfg3", "run2_cfg3")]
BATCH = next(trace for trace in TRACES if trace["name"] == "batch")


@pytest.fixture(scope="module")
def family(emu3_bundle: Path) -> GoldenFamily:
    return GoldenFamily(emu3_bundle, load_golden("emu3"), CODES, row_end=549, compute_scores=log_softmax)


class TestDecoder(RowEndDecoderGolden):
    pass


def get_trace_name(trace: dict[str, Any]) -> str:
    return str(trace["name"])


def test_guided_logits_give_the_recorded_codes_and_probabilities(family: GoldenFamily) -> None:
    guidance = Sampling(cfg_scale=3.0)
    # The published code applies guidance to log-probabilities. Guided logits differ by one constant for each node.
    for name in ("decode", "tree"):
        published = family.arrays[f"{name}_guided"]
        logits = np.stack([family.arrays[f"{name}_{row_name}_logits"] for row_name in ROW_NAMES])
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
def test_recorded_tokens_have_the_largest_guided_logits(family: GoldenFamily, trace: dict[str, Any]) -> None:
    scores = compute_guided_logits(family.bundle, trace)
    ids = np.array(trace["generated_ids"])
    (rows, columns) = trace["grid"]
    assert len(ids) == rows * (columns + 1) + 3  # a row end per grid row, and three tokens after the image
    is_free = np.array(trace["forced"]) == 0
    assert is_free.tolist() == ([True] * columns + [False]) * rows + [False] * 3
    best_codes = scores.argmax(-1)[is_free]
    np.testing.assert_array_equal(best_codes + CODES.start, ids[is_free])
    assert best_codes.reshape(rows, columns).tolist() == trace["codes"]


@pytest.mark.parametrize("trace", GUIDED_RUNS, ids=get_trace_name)
def test_every_token_of_a_run_has_the_recorded_scores(family: GoldenFamily, trace: dict[str, Any]) -> None:
    expected = family.arrays[f"{trace['name']}_scores"][:, CODES]
    assert_close(log_softmax(compute_guided_logits(family.bundle, trace)), log_softmax(expected), GUIDED_TOLERANCE)


@pytest.mark.parametrize("row", range(2))
def test_recorded_tokens_of_a_batch_have_the_largest_logits(family: GoldenFamily, row: int) -> None:
    is_real_token = np.array(BATCH["attention_mask"][row]) > 0
    trace = {name: BATCH[name][row] for name in ("unconditional_ids", "generated_ids")} | {"cfg": BATCH["cfg"]}
    trace["prompt_ids"] = np.array(BATCH["prompt_ids"][row])[is_real_token].tolist()
    scores = compute_guided_logits(family.bundle, trace)
    ids = np.array(trace["generated_ids"])
    is_code = ids >= CODES.start
    rows, columns = BATCH["grids"][row]
    assert is_code.sum() == rows * columns
    np.testing.assert_array_equal(scores.argmax(-1)[is_code] + CODES.start, ids[is_code])


def test_codes_decode_to_the_recorded_vectors_and_images(family: GoldenFamily) -> None:
    path = family.bundle / "vq_decoder.onnx"
    convolutions = {node.input[1]: node for node in onnx.load(path).graph.node if node.op_type == "Conv"}
    post_quant = convolutions["decoder.post_quant_conv.weight"]
    norm = convolutions[
        "decoder.mid.0.norm1.conv_y.weight"
    ]  # the norm in the layers where a pixel is a cell of the grid
    names = [
        post_quant.input[0],
        post_quant.output[0],
        convolutions["decoder.conv_in.weight"].input[0],
        norm.input[0],
        "images",
    ]
    values = compute_graph_values(path, names, {"codes": family.arrays["vq_codes"]})
    for array, name in zip(values, ("code_vectors", "post_quant", "z", "zq", "decoded"), strict=True):
        assert_close(array, family.arrays[f"vq_{name}"])


@pytest.mark.parametrize("trace", GUIDED_RUNS, ids=lambda trace: f"{trace['name']}_pixels_and_uint8")
def test_codes_of_recorded_runs_decode_to_the_recorded_images(family: GoldenFamily, trace: dict[str, Any]) -> None:
    (image,) = GraphFileSession(family.bundle / "vq_decoder.onnx").run({"codes": np.array([trace["codes"]])})["images"]
    assert_close(image, family.arrays[f"{trace['name']}_pixels"])
    expected = family.arrays[f"{trace['name']}_uint8"]
    assert np.abs(np.asarray(convert_pixels_to_image(image)).astype(int) - expected).max() <= 1


def test_an_image_is_encoded_as_the_recorded_latents_and_codes(family: GoldenFamily) -> None:
    outputs = GraphFileSession(family.bundle / "vq_encoder.onnx").run({"images": family.arrays["vq_image"]})
    assert_close(outputs["pre_quant"], family.arrays["vq_pre_quant"])
    np.testing.assert_array_equal(
        outputs["codes"].reshape(family.arrays["vq_encoded"].shape), family.arrays["vq_encoded"]
    )
