"""GEAR-T2I's prompts, graphs and images compared with recordings of the published program."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_copies import GEAR, GEAR_FILES, copy_gear
from device_pipeline import load_device_pipeline
from family_readers import read_gear
from goldens import DATA, GUIDED_TOLERANCE, Arrays, GraphRunner, assert_close, load_golden, mix_guided
from guided_logits import make_sampler
from numpy.typing import NDArray

from lantern_rt import Pipeline
from lantern_rt.bundle.files import open_bundle
from lantern_rt.bundle.weights import StoredWeights
from lantern_rt.export.compare import GraphFileSession, convert_weights
from lantern_rt.export.graph.precision import parse_precisions
from lantern_rt.export.models.vq_checkpoints import read_llamagen_vq
from lantern_rt.export.verify import verify_bundle
from lantern_rt.export.writer import export_model
from lantern_rt.methods import Sampling
from lantern_rt.output.images import convert_pixels_to_image
from lantern_rt.prepared import load_model
from lantern_rt.runtime.likelihood import compute_sequence_logits
from lantern_rt.runtime.statistics import EngineTimer

TRACES: dict[str, Any] = json.loads((DATA / "gear-t2i/traces.json").read_text())
CAPTIONS: list[str] = TRACES["captions"]
RUNS: list[dict[str, Any]] = TRACES["runs"]
BIDIRECTIONAL = next(run for run in RUNS if run["text_attn"] == "prefix")
LENGTH = 17  # of the prefix
TARGET_DATA = "target.onnx.data"


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    return load_golden("gear-t2i")


@pytest.fixture(scope="module")
def modules() -> dict[str, Any]:
    """Return the PyTorch module of each graph."""
    return {graph.role: graph.module for graph in read_gear(GEAR, **GEAR_FILES).graphs}


@pytest.fixture(scope="module")
def bundles(gear_bundle: Path, export_once: Callable[..., Path], tmp_path_factory: Any) -> dict[int, Path]:
    """Return a bundle by number of grid rows. The same weights were recorded on two grids."""

    def export(output: Path) -> Path:
        target = copy_gear(tmp_path_factory.mktemp("gear"), image_size=12)
        return export_model(read_gear(target, **GEAR_FILES), output)

    return {4: gear_bundle, 6: export_once("gear_6_bundle/tiny-gear", export)}


def record_layers(module: Any, call: Callable[[], Any]) -> tuple[Any, list[NDArray[np.float32]]]:
    """Return the result of a call, and the output of every layer of a module during the call."""
    states: list[NDArray[np.float32]] = []
    hooks = [layer.register_forward_hook(lambda *call: states.append(call[-1][0].numpy())) for layer in module.layers]
    with torch.no_grad(), convert_weights(module):
        result = call()
    for hook in hooks:
        hook.remove()
    return result, states


def compute_logits(bundle: Path, caption: str, codes: Sequence[int]) -> NDArray[np.float32]:
    """Return the logits `[rows, codes, vocabulary]` from which codes are predicted, by the engine for CPUs."""
    with Pipeline.from_bundle(bundle, threads=1) as pipe:
        (prompt,) = pipe.prepare(pipe.check(prompts=[caption], method="ar")).prompts()
        model = load_model(pipe.bundle, pipe.engines, [])
        layout = pipe.bundle.manifest.layout()
        known = np.array(codes[:-1], np.int64)
        return np.concatenate([*compute_sequence_logits(model, layout, prompt.rows(2), known, EngineTimer())], 1)


def make_text_mask(is_text: NDArray[np.bool_], nodes: int, bidirectional: bool = False) -> NDArray[np.bool_]:
    """Return the published mask `[nodes, nodes]` of text places and the codes after them."""
    is_seen = np.append(is_text, np.ones(nodes - LENGTH, bool))
    causal = np.tri(nodes, dtype=bool)
    causal[:LENGTH, :LENGTH] |= bidirectional
    return causal & is_seen | np.eye(nodes, dtype=bool)


# ---------------------------------------------------------------- prompts


def test_prompts_have_the_recorded_tokens(gear_bundle: Path, arrays: Arrays) -> None:
    padding = arrays["prompt_ids"][-1, 0]
    with Pipeline.from_bundle(gear_bundle, threads=1) as pipe:
        for image, ids, mask in zip(
            pipe.check(prompts=CAPTIONS, method="ar").images, arrays["prompt_ids"], arrays["prompt_mask"], strict=False
        ):
            text = ids[mask > 0].tolist()
            row = image.prefix.cond
            assert row.inputs["token_ids"].tolist() == [[*text, padding][:LENGTH]]
            assert row.is_real_token.tolist() == [True] * len(text) + [False] * (len(text) < LENGTH)
            assert (row.first_position, image.prefix.uncond.first_position) == (LENGTH, LENGTH)


def test_the_encoder_has_the_recorded_states(modules: dict[str, Any], arrays: Arrays) -> None:
    encoder = modules["condition"].encoder
    ids, mask = arrays["prompt_ids"], arrays["prompt_mask"]
    with torch.no_grad(), convert_weights(encoder):
        states = encoder(torch.from_numpy(ids[:3]), torch.from_numpy(mask[:3])).numpy()
    used = mask[:3] > 0
    used[:, -1] = True  # only the last padding is used
    assert_close(states[:, :-1][used], arrays["text_hidden"][used])
    assert_close(states[:, -1], np.tile(arrays["uncond_hidden"][0], (3, 1)))
    assert_close(arrays["uncond_hidden"], np.tile(arrays["uncond_hidden"][0], (LENGTH, 1)))
    assert np.abs(states[0, -1] - arrays["uncond_hidden_eager"][0]).max() > 1  # attention to all padding
    assert np.abs(states[0, :-1][used[0]] - arrays["text_hidden_bf16"][used[0]]).max() < 0.1


def test_layers_of_the_encoder_have_the_recorded_states(modules: dict[str, Any], arrays: Arrays) -> None:
    encoder = modules["condition"].encoder
    ids, mask = (torch.from_numpy(arrays[name][:1]) for name in ("prompt_ids", "prompt_mask"))
    result, states = record_layers(encoder, lambda: encoder(ids, mask))
    used = [*range(int(mask.sum())), LENGTH - 1]
    embeds = encoder.embed(ids).float().numpy()
    for values, expected in zip((embeds, states[0], result.numpy()), arrays["text_layer_hidden"], strict=True):
        assert_close(values[0, used], expected[used])


def test_the_condition_graph_computes_the_recorded_prefix(gear_bundle: Path, arrays: Arrays) -> None:
    ids, mask = arrays["prompt_ids"][:1], arrays["prompt_mask"][:1]
    count = int(mask.sum()) + 1
    inputs = {"token_ids": ids[:, :count], "token_mask": mask[:, :count]}
    outputs = GraphFileSession(gear_bundle / "condition.onnx").run(inputs)
    cond, uncond = arrays["prefill_inputs"]
    assert_close(outputs["prefix_embeds"][0], np.concatenate([cond[: count - 1], cond[-1:]]))
    assert_close(outputs["uncond_embeds"][0], uncond[-1:])


# ---------------------------------------------------------------- the decoder


def test_all_places_of_the_prefix_have_the_recorded_outputs(
    gear_bundle: Path, modules: dict[str, Any], arrays: Arrays
) -> None:
    prefix = modules["prefix"]
    visible = arrays["prefix_mask"][:, :LENGTH, :LENGTH] > 0
    for i, is_text in enumerate(arrays["prompt_mask"][[0, -1]] > 0):
        np.testing.assert_array_equal(make_text_mask(is_text, 32), arrays["prefix_mask"][i] > 0)
    embeds = torch.from_numpy(arrays["prefill_inputs"])
    mask = torch.where(torch.from_numpy(visible), 0.0, -1e9)[:, None]
    positions = torch.arange(LENGTH).expand(2, -1)
    result, states = record_layers(prefix, lambda: prefix(embeds, positions, mask))
    layers = np.stack([embeds.numpy(), *states, result[1].numpy()], 1)
    assert_close(layers, arrays["prefill_layer_hidden"])
    run = GraphRunner(gear_bundle, "prefix", rows=2)
    assert_close(run.step(visible, input_embeds=embeds.numpy())["logits"], arrays["prefill_logits"])
    values = np.stack([run.past[f"{i}.value"] for i in range(5)]).transpose(0, 2, 3, 1, 4)
    assert_close(values, arrays["cache_values"][:, :, :, :LENGTH])
    assert not any(run.past[f"{i}.key"].any() for i in range(5))


def test_codes_have_the_recorded_keys_and_values(gear_bundle: Path, arrays: Arrays) -> None:
    run = GraphRunner(gear_bundle, "prefix", rows=2)
    visible = arrays["prefix_mask"][:, :LENGTH, :LENGTH] > 0
    is_text = arrays["prompt_mask"][[0, -1]] > 0
    run.step(visible, is_text, input_embeds=arrays["prefill_inputs"])
    run.session = GraphFileSession(gear_bundle / "target.onnx")
    codes = np.load(gear_bundle / "code_embeddings.npy")[RUNS[0]["ids"][0][:-1]]
    run.step(input_embeds=np.tile(codes, (2, 1, 1)))
    keys, values = (
        np.stack([run.past[f"{i}.{part}"] for i in range(5)]).transpose(0, 2, 3, 1, 4) for part in ("key", "value")
    )
    assert_close(keys[:, :, :, LENGTH:], arrays["cache_keys"])
    assert_close(values, arrays["cache_values"])


def test_layers_have_the_recorded_states_of_known_codes(modules: dict[str, Any], arrays: Arrays) -> None:
    prefix, target = modules["prefix"], modules["target"]
    is_text = arrays["prompt_mask"][TRACES["teacher_forcing"]["captions"][0]] > 0
    mask = torch.where(torch.from_numpy(make_text_mask(is_text, 32)), 0.0, -1e9)[None, None]
    expected = torch.from_numpy(arrays["tf_layer_hidden"])
    positions = torch.arange(32)[None]
    (_, _, *past), text = record_layers(
        prefix, lambda: prefix(expected[:1, :LENGTH], positions[:, :LENGTH], mask[:, :, :LENGTH, :LENGTH])
    )
    (_, hidden, *_), codes = record_layers(
        target, lambda: target(expected[:1, LENGTH:], positions[:, LENGTH:], mask[:, :, LENGTH:], *past)
    )
    for layer, (text_states, code_states) in enumerate(zip(text, codes, strict=True)):
        assert_close(np.concatenate([text_states, code_states], 1)[0], arrays["tf_layer_hidden"][layer + 1])
    assert_close(hidden[0].numpy(), arrays["tf_layer_hidden"][-1, LENGTH:])


def test_the_rotary_tables_are_the_recorded_tables(bundles: dict[int, Path], modules: dict[str, Any]) -> None:
    arrays = load_golden("gear-t2i")
    assert_close(modules["target"].rope[:33].numpy(), arrays["rope_g4"])
    large = read_gear(copy_gear(bundles[6].parent, image_size=12), **GEAR_FILES).graphs[0].module
    rope: Any = large.rope
    assert_close(rope[:53].numpy(), arrays["rope_g6"])


def test_known_codes_have_the_recorded_logits(gear_bundle: Path, arrays: Arrays) -> None:
    captions = TRACES["teacher_forcing"]["captions"]
    for i, caption in enumerate(captions):
        logits = compute_logits(gear_bundle, CAPTIONS[caption], arrays["tf_tokens"][i].tolist())
        assert_close(logits, arrays["tf_logits"][[i, i + len(captions)]])
        assert_close(mix_guided(logits, 4.0), arrays["tf_guided4_logits"][i], GUIDED_TOLERANCE)


def test_a_draft_tree_has_the_recorded_logits(gear_bundle: Path, arrays: Arrays) -> None:
    table = np.load(gear_bundle / "code_embeddings.npy")
    with Pipeline.from_bundle(gear_bundle, threads=1) as pipe:
        caption = CAPTIONS[TRACES["teacher_forcing"]["captions"][0]]
        (prompt,) = pipe.prepare(pipe.check(prompts=[caption], method="ar")).prompts()
    for i, row in enumerate(prompt.rows(2)):
        run = GraphRunner(gear_bundle, "prefix")
        causal = np.tri(len(row.embeds), dtype=bool) & row.is_real_token | np.eye(len(row.embeds), dtype=bool)
        run.step(causal, row.is_real_token, input_embeds=row.embeds[None])
        run.session = GraphFileSession(gear_bundle / "target.onnx")
        run.step(positions=LENGTH + np.arange(5), input_embeds=table[arrays["tree_before"]][None])
        tree = arrays["tree_mask"] > 0
        out = run.step(tree, positions=arrays["tree_position_ids"], input_embeds=table[arrays["tree_tokens"]][None])
        assert_close(out["logits"][0], arrays["tree_logits"][i])


# ---------------------------------------------------------------- whole runs


def choose_codes(logits: NDArray[np.float32], run: dict[str, Any], image: int) -> list[int]:
    if not run["sample"]:
        return logits.argmax(1).tolist()
    sampling = Sampling(**{field: run[field] for field in ("temperature", "top_k", "top_p")})
    cumulative = make_sampler(sampling).compute_distribution(logits).cumsum(1)
    return (cumulative / cumulative[:, -1:] <= np.array(run["uniform"][image])[:, None]).sum(1).tolist()


@pytest.mark.parametrize("run", [run for run in RUNS if run is not BIDIRECTIONAL], ids=lambda run: run["name"])
def test_a_run_has_the_recorded_logits_and_codes(bundles: dict[int, Path], arrays: Arrays, run: dict[str, Any]) -> None:
    for image, (caption, ids) in enumerate(zip(run["captions"], run["ids"], strict=True)):
        logits = compute_logits(bundles[run["grid"]], CAPTIONS[caption], ids)
        for row, kind in zip(logits, ("cond", "uncond"), strict=True):
            if f"{run['name']}_{kind}_logits" in arrays:
                assert_close(row, arrays[f"{run['name']}_{kind}_logits"][image])
        is_guided = np.arange(len(ids)) < (run["cfg_interval"] + 2 if run["cfg_interval"] >= 0 else len(ids))
        is_guided &= run["cfg"] > 1
        if "guided" in run:
            assert is_guided.tolist() == [bool(value) for value in run["guided"]]
        used = np.where(is_guided[:, None], mix_guided(logits, run["cfg"]), logits[0])
        if f"{run['name']}_used_logits" in arrays:
            assert_close(used, arrays[f"{run['name']}_used_logits"][image], GUIDED_TOLERANCE)
        assert choose_codes(used, run, image) == ids


def test_bidirectional_text_has_the_recorded_logits(gear_bundle: Path, arrays: Arrays) -> None:
    """The graphs take any mask, though no published model has this one."""
    table = np.load(gear_bundle / "code_embeddings.npy")
    condition = GraphFileSession(gear_bundle / "condition.onnx")
    for image, (caption, ids) in enumerate(zip(BIDIRECTIONAL["captions"], BIDIRECTIONAL["ids"], strict=True)):
        tokens, mask = (arrays[name][caption : caption + 1] for name in ("prompt_ids", "prompt_mask"))
        out = condition.run({"token_ids": tokens, "token_mask": mask})
        uncond = np.repeat(out["uncond_embeds"], LENGTH, 1)
        is_text = np.stack([mask[0] > 0, np.zeros(LENGTH, bool)])
        visible = np.stack([make_text_mask(row, LENGTH, bidirectional=True) for row in is_text])
        if image == 0:
            np.testing.assert_array_equal(visible[0], arrays["bidirectional_mask"][0] > 0)
        run = GraphRunner(gear_bundle, "prefix", rows=2)
        first = run.step(visible, is_text, input_embeds=np.concatenate([out["prefix_embeds"], uncond]))["logits"]
        run.session = GraphFileSession(gear_bundle / "target.onnx")
        others = run.step(input_embeds=np.tile(table[ids[:-1]], (2, 1, 1)))["logits"]
        guided = mix_guided(np.concatenate([first[:, -1:], others], 1), BIDIRECTIONAL["cfg"])
        assert_close(guided, arrays[f"{BIDIRECTIONAL['name']}_used_logits"][image], GUIDED_TOLERANCE)
        assert guided.argmax(1).tolist() == ids


@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "device"])
@pytest.mark.parametrize("method", ["ar", "sjd:window=3", "sjd:window=7"])
def test_exact_methods_generate_the_recorded_codes(bundles: dict[int, Path], method: str, on_device: bool) -> None:
    for grid, bundle in bundles.items():
        with load_device_pipeline(bundle) if on_device else Pipeline.from_bundle(bundle, threads=1) as pipe:
            for run in RUNS:
                if run["grid"] != grid or run["sample"] or run is BIDIRECTIONAL:
                    continue
                tokens = run["cfg_interval"] + 2 if run["cfg_interval"] >= 0 else None
                settings = {"cfg_scale": run["cfg"], "cfg_tokens": tokens, "temperature": 0, "method": method}
                result = pipe([CAPTIONS[caption] for caption in run["captions"]], **settings)
                assert [codes.ravel().tolist() for codes in result.codes] == run["ids"]


def test_prompts_may_be_token_ids_and_a_negative_prompt_replaces_the_empty_one(
    gear_bundle: Path, arrays: Arrays
) -> None:
    ids = arrays["prompt_ids"][0][arrays["prompt_mask"][0] > 0].tolist()
    with Pipeline.from_bundle(gear_bundle, threads=1) as pipe:
        plain = pipe(CAPTIONS[0], seed=1).codes
        np.testing.assert_array_equal(pipe(token_ids=ids, seed=1).codes, plain)
        negative = pipe(CAPTIONS[0], seed=1, negative_prompt=CAPTIONS[1]).codes
        assert not np.array_equal(negative, plain)
        np.testing.assert_array_equal(
            pipe(CAPTIONS[0], seed=1, negative_prompt=CAPTIONS[1], method="ar").codes, negative
        )


@pytest.mark.parametrize("precision", ["fp16", "int8-weights", "int4-weights", "int8"])
def test_bundles_of_every_precision_are_verified(tmp_path: Path, precision: str) -> None:
    model = read_gear(GEAR, **GEAR_FILES)
    bundle = open_bundle(export_model(model, tmp_path / "bundle", precisions=parse_precisions(precision)))
    report = verify_bundle(bundle, model)
    assert report.passed
    assert [row["graph"] for row in report.distributions] == ["target", "prefix"]
    with Pipeline.from_bundle(bundle.folder, threads=1) as pipe:
        codes = [pipe(CAPTIONS, seed=[1, 2, 3], method=method).codes for method in ("ar", "sjd:window=3")]
    if precision in ("fp16", "int8"):  # in others, rounded activations depend on the forward pass
        np.testing.assert_array_equal(*codes)


def test_the_prefix_graph_reads_weights_from_the_targets_file(
    gear_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lantern_rt.export.graph.graph_file._MIN_EXTERNAL", 0)
    bundle = export_model(read_gear(GEAR, **GEAR_FILES), tmp_path / "bundle")
    target, prefix = (StoredWeights(bundle / f"{role}.onnx") for role in ("target", "prefix"))
    own = {name for name, weight in prefix.items() if weight.external_data and weight.external_data[0] != TARGET_DATA}
    assert own == {f"layers.{i}.attention.{part}.weight" for i in (0, 1) for part in ("qkv", "out")} | {
        f"rotary.{part}" for part in ("cos", "sin")
    }
    assert target["layers.0.ffn.up.weight"].external_data == prefix["layers.0.ffn.up.weight"].external_data
    codes = [Pipeline.from_bundle(folder, threads=1)(CAPTIONS, seed=4).codes for folder in (bundle, gear_bundle)]
    np.testing.assert_array_equal(*codes)
    assert open_bundle(bundle).manifest.files["prefix.data"].bytes < bundle.joinpath(TARGET_DATA).stat().st_size


# ---------------------------------------------------------------- images


def test_codes_of_a_run_decode_to_the_recorded_images(gear_bundle: Path, arrays: Arrays) -> None:
    images = GraphFileSession(gear_bundle / "vq_decoder.onnx").run({"codes": np.array(RUNS[0]["ids"])})["images"]
    assert_close(images, arrays["run0_image"])
    for image, expected in zip(images, arrays["run0_uint8"], strict=True):
        assert np.abs(np.asarray(convert_pixels_to_image(image)).astype(int) - expected).max() <= 1


def test_both_sets_of_weights_of_the_image_tokenizer_are_read(arrays: Arrays) -> None:
    codes = torch.from_numpy(arrays["vq_codes"])
    for averaged, expected in ((True, "vq_decoded"), (False, "vq_decoded_live")):
        vq = read_llamagen_vq(DATA / "gear-t2i/gear-vq.pt", averaged=averaged)
        vectors = torch.nn.functional.normalize(vq.codebook, dim=-1)[codes].view(1, 4, 4, -1).permute(0, 3, 1, 2)
        with torch.no_grad():
            latents = vq.post_quant_conv(vectors)
            assert_close(vq.decoder(latents).numpy(), arrays[expected])
        if averaged:
            assert_close(vectors.numpy(), arrays["vq_code_vectors"])
            assert_close(latents.numpy(), arrays["vq_post_quant"])


def test_filters_give_the_recorded_distributions(arrays: Arrays) -> None:
    for (temperature, top_k, top_p), expected in zip(arrays["filter_params"], arrays["filter_probs"], strict=True):
        sampling = Sampling(temperature=float(temperature), top_k=int(top_k), top_p=float(top_p))
        actual = [make_sampler(sampling).compute_distribution(row) for row in arrays["filter_logits"]]
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)
