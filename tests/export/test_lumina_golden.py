"""Lumina-mGPT's exported graphs against every array recorded from the published implementation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from llamagen_golden import DATA, Arrays, Run, close, golden, manifest
from numpy.typing import NDArray

from lantern_rt.export.graph.graphs import HIDDEN
from lantern_rt.export.parity import Sessions
from lantern_rt.methods import Sampling
from lantern_rt.output.images import to_image
from lantern_rt.runtime.sampling import guide, shape_distribution, shape_logits

CODES = slice(4, 132)  # the image tokens
ROW_END, GUIDED = 142, 3e-4
TRACES: list[dict[str, Any]] = json.loads((DATA / "lumina-mgpt/traces.json").read_text())
SIDES = ("cond", "uncond")


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    return golden("lumina-mgpt")


def embed(bundle: Path, ids: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float32]:
    tokens = np.array([ids], np.int64)
    return Sessions(bundle / "condition.onnx").run({"token_ids": tokens, "uncond_ids": tokens[:, :1]})["prefix_embeds"]


def start(bundle: Path) -> Run:
    spec = manifest(bundle).target
    return Run(bundle / "target.onnx", spec.num_kv_heads, spec.head_dim, spec.num_layers, 1)


class Sides:
    """Both rows, each on a cache of its own; uncond None: without guidance."""

    def __init__(self, bundle: Path, cond: Sequence[int], uncond: Sequence[int] | None) -> None:
        self.bundle, self.runs, self.last = bundle, [start(bundle) for _ in range(1 + (uncond is not None))], []
        prompts = [cond] if uncond is None else [cond, uncond]
        self.outputs = [run.step(input_embeds=embed(bundle, ids)) for run, ids in zip(self.runs, prompts, strict=True)]

    def step(self, tokens: NDArray[np.int64], **where: Any) -> list[Arrays]:
        """Feed tokens to both rows."""
        offsets = [{k: v + run.length if k == "positions" else v for k, v in where.items()} for run in self.runs]
        embeds = embed(self.bundle, tokens)
        return [run.step(input_embeds=embeds, **own) for run, own in zip(self.runs, offsets, strict=True)]


def prefilled(bundle: Path, arrays: Arrays) -> Sides:
    return Sides(bundle, arrays["cond_ids"], arrays["uncond_ids"])


def mixed(outputs: list[Arrays], scale: float = 3.0) -> NDArray[np.float32]:
    """Guided logits of codes `[nodes, codes]`."""
    return guide(np.concatenate([out["logits"] for out in outputs]), Sampling(cfg_scale=scale))


@pytest.mark.parametrize("side", SIDES)
def test_prefill_hidden_logits_keys_and_values_of_both_rows(lumina_bundle: Path, arrays: Arrays, side: str) -> None:
    ids = arrays[f"{side}_ids"]
    assert arrays[f"{side}_position_ids"].tolist() == list(range(len(ids)))  # as `Run` counts
    out = start(lumina_bundle).step(input_embeds=embed(lumina_bundle, ids))
    close(out["hidden_states"][0], arrays[f"{side}_prefill_hidden"])
    close(out["logits"][0], arrays[f"{side}_prefill_logits"][:, CODES])
    for part in ("key", "value"):
        found = np.stack([out[f"new_key_values.{i}.{part}"][:, 0] for i in range(3)])  # [layers, nodes, heads, width]
        close(found.transpose(0, 2, 1, 3), arrays[f"{side}_prefill_{part}s"])


def test_cond_layer_hidden_embeddings_every_layer_and_the_last_one_normed(lumina_bundle: Path, arrays: Arrays) -> None:
    model = onnx.load(lumina_bundle / "target.onnx")
    sums, layers = [node for node in model.graph.node if node.op_type == "Add"], ["input_embeds"]
    while following := [node.output[0] for node in sums if node.input[0] == layers[-1]]:
        layers += following  # each layer adds attention, then feed-forward
    layers = layers[2:-1:2]  # the last one's output is normed
    for name in layers:
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    path = lumina_bundle / "target.onnx"
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # it dies of an empty past
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    ids = arrays["cond_ids"]
    embeds, nodes = embed(lumina_bundle, ids), len(ids)
    close(embeds[0], arrays["cond_layer_hidden"][0], 0)
    feeds = {"input_embeds": embeds, "position_ids": np.arange(nodes)[None]}
    feeds["attention_mask"] = np.where(np.tri(nodes), 0, HIDDEN).astype(np.float32)[None, None]
    empty = np.zeros((0, 1, 4, 16), np.float32)
    feeds |= {f"past_key_values.{i}.{part}": empty for i in range(3) for part in ("key", "value")}
    out = session.run([*layers, "hidden_states"], feeds)
    close(np.concatenate(out), arrays["cond_layer_hidden"][1:])


def test_decode_tokens_one_at_a_time_give_hidden_logits_and_guided_of_both_rows(
    lumina_bundle: Path, arrays: Arrays
) -> None:
    sides = prefilled(lumina_bundle, arrays)
    steps = [sides.step(arrays["decode_tokens"][k : k + 1]) for k in range(7)]
    for i, side in enumerate(SIDES):
        close(np.concatenate([s[i]["hidden_states"][0] for s in steps]), arrays[f"decode_{side}_hidden"])
        close(np.concatenate([s[i]["logits"][0] for s in steps]), arrays[f"decode_{side}_logits"][:, CODES])
    guided = np.concatenate([mixed(step) for step in steps])
    close(guided, arrays["decode_guided"][:, CODES], GUIDED)


def test_tree_behind_the_decode_tokens_gives_hidden_logits_guided_and_filtered_scores(
    lumina_bundle: Path, arrays: Arrays
) -> None:
    sides = prefilled(lumina_bundle, arrays)
    sides.step(arrays["decode_tokens"])
    depths, forced = arrays["tree_depth"], arrays["tree_next_forced"]
    parents = arrays["tree_parents"]
    assert [-1 if d == 0 else int(depths[p]) for d, p in zip(depths, parents, strict=True)] == (depths - 1).tolist()
    for i, side in enumerate(SIDES):
        assert arrays[f"tree_{side}_position_ids"].tolist() == (sides.runs[i].length + depths).tolist()
    out = sides.step(arrays["tree_tokens"], visible=arrays["tree_mask"] > 0, positions=depths)
    for i, side in enumerate(SIDES):
        close(out[i]["hidden_states"][0], arrays[f"tree_{side}_hidden"])
        close(out[i]["logits"][0], arrays[f"tree_{side}_logits"][:, CODES])
    guided = mixed(out)
    close(guided, arrays["tree_guided"][:, CODES], GUIDED)
    scores, free = arrays["tree_scores_topk20"], forced < 0
    found = shape_logits(guided, Sampling(cfg_scale=3.0, top_k=20))[free]
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(scores[free][:, CODES]))
    assert not np.isfinite(np.delete(scores[free], np.r_[CODES], 1)).any()  # nothing but codes
    np.testing.assert_allclose(found, scores[free][:, CODES], rtol=0, atol=GUIDED)
    assert [np.flatnonzero(np.isfinite(row)).tolist() for row in scores[~free]] == [[ROW_END]] * int((~free).sum())


def test_filter_probs_of_codes_and_of_text(arrays: Arrays) -> None:
    for i, (image_k, text_k, temperature) in enumerate(arrays["filter_params"]):
        logits = arrays["filter_logits"]
        for top_k, wanted, part in (
            (image_k, arrays["filter_image_probs"][i], logits[:, CODES]),
            (text_k, arrays["filter_text_probs"][i], logits),
        ):
            sampling = Sampling(top_k=int(top_k), temperature=float(temperature))
            expected = wanted[:, CODES] if part is not logits else wanted
            np.testing.assert_allclose(shape_distribution(part, sampling), expected, rtol=0, atol=1e-4)
        assert arrays["filter_image_probs"][i].sum(1) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("i", range(len(TRACES)), ids=lambda i: f"run{TRACES[i]['prompt']}_{TRACES[i]['name']}_scores")
def test_scores_of_every_generated_token_of_a_run(lumina_bundle: Path, arrays: Arrays, i: int) -> None:
    trace = TRACES[i]
    scores = arrays[f"run{trace['prompt']}_{trace['name']}_scores"][:, CODES]
    ids, uncond = trace["generated_ids"], trace["unconditional_prefix"]
    sides = Sides(lumina_bundle, [*trace["prompt_ids"], *ids[:3]], uncond)
    before = sides.outputs[0]["logits"][0, -4:-1]  # begin of image and size: unguided
    out = sides.step(np.array(ids[3:-1], np.int64))
    last = mixed([{"logits": own["logits"][:, -1:]} for own in sides.outputs])
    close(before, scores[:3])
    close(np.concatenate([last, mixed(out)[:-1]]), scores[3:-1], GUIDED)
    close(out[0]["logits"][0, -1], scores[-1])  # the end of the turn: unguided again


@pytest.mark.parametrize("i", range(3), ids=lambda i: f"run{i}_greedy_cfg3_image")
def test_pictures_of_runs_are_the_recorded_ones_up_to_rounding(lumina_bundle: Path, arrays: Arrays, i: int) -> None:
    trace = next(one for one in TRACES if one["prompt"] == i and one["name"] == "greedy_cfg3")
    codes = np.array(trace["codes"])
    assert list(codes.shape) == trace["latent"]
    image = Sessions(lumina_bundle / "vq_decoder.onnx").run({"codes": codes[None]})["images"][0]
    expected = arrays[f"run{i}_greedy_cfg3_image"]
    assert image.shape[1:] == expected.shape[:2]
    assert np.abs(np.asarray(to_image(image)).astype(int) - expected).max() <= 1


def test_the_table_of_embeddings_holds_the_codes_and_the_end_of_a_row(lumina_bundle: Path) -> None:
    table, row_end = np.load(lumina_bundle / "code_embeddings.npy"), manifest(lumina_bundle).row_end
    assert row_end == ROW_END - CODES.start
    close(table, embed(lumina_bundle, np.arange(CODES.start, ROW_END + 1))[0], 0)
