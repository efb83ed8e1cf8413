"""Lumina-mGPT's, Emu3's and, for the decoder, SimpleAR's exported graphs against every recorded array."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from goldens import DATA, GUIDED, Arrays, Sides, close, embed, golden, manifest, observed
from numpy.typing import NDArray

from lantern_rt.export.graph.graphs import HIDDEN
from lantern_rt.export.parity import Sessions
from lantern_rt.methods import Sampling
from lantern_rt.output.images import to_image
from lantern_rt.runtime.sampling import choose, guide, shape_distribution, shape_logits

SIDES = ("cond", "uncond")
FOLDERS = {"lumina": "lumina-mgpt", "emu3": "emu3", "simplear": "simplear"}
CODES = {"lumina": slice(4, 132), "emu3": slice(557, 653), "simplear": slice(395, 971)}  # the image tokens
ROW_ENDS = {"lumina": 142, "emu3": 549}
TRACES: dict[str, list[dict[str, Any]]] = {
    name: json.loads((DATA / folder / "traces.json").read_text()) for name, folder in FOLDERS.items()
}
SINGLE = [trace for trace in TRACES["emu3"] if trace["name"] != "batch"]
DRAWN = [trace for trace in SINGLE if trace["name"] in ("run0_cfg3", "run1_cfg3", "run2_cfg3")]
BATCH = next(trace for trace in TRACES["emu3"] if trace["name"] == "batch")


def log_softmax(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """Over codes; what is -inf stays so."""
    wide = scores.astype(np.float64)
    total = np.log(np.exp(wide - wide.max(-1, keepdims=True)).sum(-1, keepdims=True))
    return (wide - wide.max(-1, keepdims=True) - total).astype(np.float32)


class Family:
    """A bundle with its recorded arrays; `scored`: what the published program does to guided logits."""

    def __init__(self, name: str, bundle: Path) -> None:
        self.bundle, self.arrays, self.codes = bundle, golden(FOLDERS[name]), CODES[name]
        self.row_end, self.scale = ROW_ENDS.get(name, -1), 6.0 if name == "simplear" else 3.0
        self.scored: Callable[[NDArray[np.float32]], NDArray[np.float32]] = (
            log_softmax if name != "lumina" else lambda scores: scores
        )

    def sides(self) -> Sides:
        first = None if self.row_end >= 0 else self.codes.start
        return Sides(self.bundle, self.arrays["cond_ids"], self.arrays["uncond_ids"], first)


@pytest.fixture(scope="module", params=FOLDERS)
def family(request: pytest.FixtureRequest) -> Family:
    return Family(request.param, request.getfixturevalue(f"{request.param}_bundle"))


@pytest.fixture(scope="module")
def lumina(lumina_bundle: Path) -> Family:
    return Family("lumina", lumina_bundle)


@pytest.fixture(scope="module")
def emu3(emu3_bundle: Path) -> Family:
    return Family("emu3", emu3_bundle)


def by_name(trace: dict[str, Any]) -> str:
    return str(trace["name"])


def mixed(outputs: list[Arrays], scale: float = 3.0) -> NDArray[np.float32]:
    """Guided logits of codes `[nodes, codes]`."""
    return guide(np.concatenate([out["logits"] for out in outputs]), Sampling(cfg_scale=scale))


@pytest.mark.parametrize("side", SIDES)
def test_prefill_hidden_logits_keys_and_values_of_both_rows(family: Family, side: str) -> None:
    arrays, ids = family.arrays, family.arrays[f"{side}_ids"]
    assert arrays[f"{side}_position_ids"].tolist() == list(range(len(ids)))  # as `Run` counts
    (out,) = Sides(family.bundle, ids, None).outputs
    close(out["hidden_states"][0], arrays[f"{side}_prefill_hidden"])
    close(out["logits"][0], arrays[f"{side}_prefill_logits"][:, family.codes])
    for part in ("key", "value"):
        found = np.stack([out[f"new_key_values.{i}.{part}"][:, 0] for i in range(3)])  # [layers, nodes, heads, width]
        close(found.transpose(0, 2, 1, 3), arrays[f"{side}_prefill_{part}s"])


@pytest.mark.parametrize("side", SIDES)
def test_layer_hidden_embeddings_every_layer_and_the_last_one_normed(family: Family, side: str) -> None:
    path, ids, expected = family.bundle / "target.onnx", family.arrays[f"{side}_ids"], f"{side}_layer_hidden"
    if expected not in family.arrays:
        pytest.skip("not recorded")
    sums = [node for node in onnx.load(path).graph.node if node.op_type == "Add"]
    layers = ["input_embeds"]
    while following := [node.output[0] for node in sums if node.input[0] == layers[-1]]:
        layers += following  # each layer adds attention, then feed-forward
    embeds, nodes, spec = embed(family.bundle, ids), len(ids), manifest(family.bundle).target
    feeds = {"input_embeds": embeds, "position_ids": np.arange(nodes)[None]}
    feeds["attention_mask"] = np.where(np.tri(nodes), 0, HIDDEN).astype(np.float32)[None, None]
    empty = np.zeros((0, 1, spec.num_kv_heads, spec.head_dim), np.float32)
    feeds |= {f"past_key_values.{i}.{part}": empty for i in range(3) for part in ("key", "value")}
    found = observed(path, [*layers[2:-1:2], "hidden_states"], feeds)  # the last layer's output is normed
    close(embeds[0], family.arrays[expected][0], 0)
    close(np.concatenate(found), family.arrays[expected][1:])


def test_decode_tokens_one_at_a_time_give_hidden_logits_and_guided_of_both_rows(family: Family) -> None:
    arrays, sides, scored = family.arrays, family.sides(), family.scored
    steps = [sides.step(arrays["decode_tokens"][k : k + 1]) for k in range(7)]
    for i, side in enumerate(SIDES):
        close(np.concatenate([s[i]["hidden_states"][0] for s in steps]), arrays[f"decode_{side}_hidden"])
        close(np.concatenate([s[i]["logits"][0] for s in steps]), arrays[f"decode_{side}_logits"][:, family.codes])
    guided = np.concatenate([mixed(step, family.scale) for step in steps])
    close(scored(guided), scored(arrays["decode_guided"][-7:, family.codes]), GUIDED)


def test_tree_behind_the_decode_tokens_gives_hidden_logits_guided_and_filtered_scores(family: Family) -> None:
    arrays, sides, codes, scored = family.arrays, family.sides(), family.codes, family.scored
    sides.step(arrays["decode_tokens"])
    depths, parents = arrays["tree_depth"], arrays["tree_parents"]
    assert depths.tolist() == [0 if p < 0 else depths[p] + 1 for p in parents]
    for run, side in zip(sides.runs, SIDES, strict=True):
        assert arrays[f"tree_{side}_position_ids"].tolist() == (run.length + depths).tolist()
    out = sides.step(arrays["tree_tokens"], depths, visible=arrays["tree_mask"] > 0)
    for own, side in zip(out, SIDES, strict=True):
        close(own["hidden_states"][0], arrays[f"tree_{side}_hidden"])
        close(own["logits"][0], arrays[f"tree_{side}_logits"][:, codes])
    guided = mixed(out, family.scale)
    close(scored(guided), scored(arrays["tree_guided"][:, codes]), GUIDED)
    if family.row_end < 0:
        return  # nothing was forced
    forced = arrays["tree_next_forced"]
    scores, free = arrays["tree_scores_topk20"], forced < 0
    assert not np.isfinite(np.delete(scores[free], np.r_[codes], 1)).any()  # nothing but codes
    found = shape_logits(guided, Sampling(top_k=20))[free]
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(scores[free][:, codes]))
    np.testing.assert_allclose(scored(found), scored(scores[free][:, codes]), rtol=0, atol=GUIDED)
    assert [np.flatnonzero(np.isfinite(row)).tolist() for row in scores[~free]] == [[family.row_end]] * sum(~free)


@pytest.mark.parametrize("family", ROW_ENDS, indirect=True)
def test_the_table_of_embeddings_holds_the_codes_and_the_end_of_a_row(family: Family) -> None:
    table, codes = np.load(family.bundle / "code_embeddings.npy"), family.codes
    row_end = manifest(family.bundle).row_end
    between = range(codes.stop, family.row_end + 1) if family.row_end > codes.stop else [family.row_end]
    assert row_end == codes.stop - codes.start + len(between) - 1
    close(table, embed(family.bundle, [*range(codes.start, codes.stop), *between])[0], 0)


# ---------------------------------------------------------------- Lumina-mGPT


def test_filter_probs_of_codes_and_of_text(lumina: Family) -> None:
    for i, (image_k, text_k, temperature) in enumerate(lumina.arrays["filter_params"]):
        logits = lumina.arrays["filter_logits"]
        for top_k, wanted, part in (
            (image_k, lumina.arrays["filter_image_probs"][i], logits[:, lumina.codes]),
            (text_k, lumina.arrays["filter_text_probs"][i], logits),
        ):
            sampling = Sampling(top_k=int(top_k), temperature=float(temperature))
            expected = wanted[:, lumina.codes] if part is not logits else wanted
            np.testing.assert_allclose(shape_distribution(part, sampling), expected, rtol=0, atol=1e-4)
        assert lumina.arrays["filter_image_probs"][i].sum(1) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("trace", TRACES["lumina"], ids=lambda trace: f"run{trace['prompt']}_{trace['name']}")
def test_scores_of_every_generated_token_of_a_run_of_lumina(lumina: Family, trace: dict[str, Any]) -> None:
    scores = lumina.arrays[f"run{trace['prompt']}_{trace['name']}_scores"][:, lumina.codes]
    ids, uncond = trace["generated_ids"], trace["unconditional_prefix"]
    sides = Sides(lumina.bundle, [*trace["prompt_ids"], *ids[:3]], uncond)
    before = sides.outputs[0]["logits"][0, -4:-1]  # begin of image and size: unguided
    out = sides.step(np.array(ids[3:-1], np.int64))
    last = mixed([{"logits": own["logits"][:, -1:]} for own in sides.outputs])
    close(before, scores[:3])
    close(np.concatenate([last, mixed(out)[:-1]]), scores[3:-1], GUIDED)
    close(out[0]["logits"][0, -1], scores[-1])  # the end of the turn: unguided again


# ---------------------------------------------------------------- Emu3


def test_guiding_logits_gives_the_choices_and_probabilities_of_decode_guided_and_tree_guided(emu3: Family) -> None:
    guidance = Sampling(cfg_scale=3.0)
    # Both rows' log-softmax takes a constant from a row's logits, and so from the guided ones.
    for name in ("decode", "tree"):
        published = emu3.arrays[f"{name}_guided"]
        logits = np.stack([emu3.arrays[f"{name}_{side}_logits"] for side in SIDES])
        apart = guide(logits, guidance) - published
        assert np.abs(apart - apart.mean(1, keepdims=True)).max() < GUIDED
        assert np.abs(apart).max() > 1  # the scores themselves do differ
        plain, theirs = guide(logits[..., CODES["emu3"]], guidance), published[:, CODES["emu3"]]
        for sampling in (Sampling(temperature=0), Sampling(top_k=20), Sampling(top_k=20, temperature=0.7)):
            np.testing.assert_array_equal(choose(plain, None, sampling), choose(theirs, None, sampling))
            expected = shape_distribution(theirs, sampling)
            np.testing.assert_allclose(shape_distribution(plain, sampling), expected, rtol=0, atol=1e-4)


def test_filter_probs_inside_a_row_of_codes(emu3: Family) -> None:
    for (top_k, temperature), expected in zip(emu3.arrays["filter_params"], emu3.arrays["filter_probs"], strict=True):
        found = shape_distribution(
            emu3.arrays["filter_logits"][:, CODES["emu3"]], Sampling(top_k=int(top_k), temperature=float(temperature))
        )
        np.testing.assert_allclose(found, expected[:, CODES["emu3"]], rtol=0, atol=1e-4)
        assert expected[:, CODES["emu3"]].sum(1) == pytest.approx(1, abs=1e-5)


def greedy_scores(bundle: Path, trace: dict[str, Any]) -> NDArray[np.float32]:
    """Guided logits of codes for each token of a run, which is fed as it was generated."""
    sides = Sides(bundle, trace["prompt_ids"], trace["unconditional_ids"])
    last = mixed([{"logits": own["logits"][:, -1:]} for own in sides.outputs], trace["cfg"])
    out = sides.step(np.array(trace["generated_ids"][:-1], np.int64))
    return np.concatenate([last, mixed(out, trace["cfg"])])


@pytest.mark.parametrize("trace", SINGLE, ids=by_name)
def test_generated_ids_of_a_run_are_the_likeliest_codes_wherever_none_was_forced(
    emu3: Family, trace: dict[str, Any]
) -> None:
    scores, ids, (rows, columns) = greedy_scores(emu3.bundle, trace), np.array(trace["generated_ids"]), trace["grid"]
    assert len(ids) == rows * (columns + 1) + 3
    free = np.array(trace["forced"]) == 0
    assert free.tolist() == ([True] * columns + [False]) * rows + [False] * 3
    found = scores.argmax(-1)[free]
    np.testing.assert_array_equal(found + CODES["emu3"].start, ids[free])
    assert found.reshape(rows, columns).tolist() == trace["codes"]


@pytest.mark.parametrize("trace", DRAWN, ids=by_name)
def test_scores_of_every_generated_token_of_a_run_of_emu3(emu3: Family, trace: dict[str, Any]) -> None:
    expected = emu3.arrays[f"{trace['name']}_scores"][:, CODES["emu3"]]
    close(log_softmax(greedy_scores(emu3.bundle, trace)), log_softmax(expected), GUIDED)


@pytest.mark.parametrize("row", range(2))
def test_generated_ids_of_the_batch_where_padding_was_seen_and_where_there_was_none(emu3: Family, row: int) -> None:
    real = np.array(BATCH["attention_mask"][row]) > 0
    trace = {name: BATCH[name][row] for name in ("unconditional_ids", "generated_ids")} | {"cfg": BATCH["cfg"]}
    trace["prompt_ids"] = np.array(BATCH["prompt_ids"][row])[real].tolist()
    scores, ids = greedy_scores(emu3.bundle, trace), np.array(trace["generated_ids"])
    free = ids >= CODES["emu3"].start
    rows, columns = BATCH["grids"][row]
    assert free.sum() == rows * columns
    np.testing.assert_array_equal(scores.argmax(-1)[free] + CODES["emu3"].start, ids[free])


def test_vq_codes_become_vq_code_vectors_vq_post_quant_vq_z_vq_zq_and_vq_decoded(emu3: Family) -> None:
    path = emu3.bundle / "vq_decoder.onnx"
    reading = {node.input[1]: node for node in onnx.load(path).graph.node if node.op_type == "Conv"}
    by_code = reading["decoder.post_quant_conv.weight"]
    norm = reading["decoder.mid.0.norm1.conv_y.weight"]  # the codes as they are: cells are the coarsest pixels
    names = [by_code.input[0], by_code.output[0], reading["decoder.conv_in.weight"].input[0], norm.input[0], "images"]
    found = observed(path, names, {"codes": emu3.arrays["vq_codes"]})
    for array, name in zip(found, ("code_vectors", "post_quant", "z", "zq", "decoded"), strict=True):
        close(array, emu3.arrays[f"vq_{name}"])


@pytest.mark.parametrize("trace", DRAWN, ids=lambda trace: f"{trace['name']}_pixels_and_uint8")
def test_codes_of_runs_become_their_pictures(emu3: Family, trace: dict[str, Any]) -> None:
    (picture,) = Sessions(emu3.bundle / "vq_decoder.onnx").run({"codes": np.array([trace["codes"]])})["images"]
    close(picture, emu3.arrays[f"{trace['name']}_pixels"])
    expected = emu3.arrays[f"{trace['name']}_uint8"]
    assert np.abs(np.asarray(to_image(picture)).astype(int) - expected).max() <= 1


def test_vq_image_becomes_vq_pre_quant_and_vq_encoded(emu3: Family) -> None:
    found = Sessions(emu3.bundle / "vq_encoder.onnx").run({"images": emu3.arrays["vq_image"]})
    close(found["pre_quant"], emu3.arrays["vq_pre_quant"])
    np.testing.assert_array_equal(found["codes"].reshape(emu3.arrays["vq_encoded"].shape), emu3.arrays["vq_encoded"])
