"""SimpleAR: graphs and prompts compared with recordings, and variants of checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from checkpoint_copies import COSMOS, SIMPLEAR, copy_checkpoint
from family_readers import read_simplear
from goldens import DATA, GUIDED_TOLERANCE, PromptRunner, assert_close, compute_graph_values, load_golden, read_manifest
from guided_logits import make_sampler
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from shared_goldens import log_softmax
from tokenizers import Tokenizer

from lantern_rt.export.checkpoints.deferred import compute_deferred_tensor
from lantern_rt.export.checkpoints.files import read_weights
from lantern_rt.export.families.simplear import NEGATIVE, TEMPLATE, list_image_sizes, make_simplear_prompt_layout
from lantern_rt.export.models.cosmos_vq import compute_haar_matrices
from lantern_rt.export.models.fsq import decode_fsq_codes, quantize_fsq_latents
from lantern_rt.methods import Sampling
from lantern_rt.subjects.base import RequestContext
from lantern_rt.subjects.negative_prompt import NegativePromptInput
from lantern_rt.subjects.text import Text
from lantern_rt.text.tokenizers import TemplateTokenizer

FOLDER = DATA / "simplear"
CODES = slice(395, 971)  # token ids of the codes
PROTOCOL = json.loads((FOLDER / "protocol.json").read_text())
TRACES = {
    trace["name"]: trace for trace in json.loads((FOLDER / "traces.json").read_text())[:-1]
}  # the last trace is a batch
ARRAYS = load_golden("simplear")
GENERATION = json.loads((FOLDER / "model/generation_config.json").read_text())


def compute_code_log_probabilities(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return log-probabilities `[..., codes]`, normalized over the codes only.

    Args:
        scores: logits `[..., codes]`, or `[..., vocab]` with text tokens, which are left out.
    """
    return log_softmax(scores[..., CODES] if scores.shape[-1] == CODES.stop else scores)


def compute_run_scores(bundle: Path, trace: dict[str, Any]) -> NDArray[np.float32]:
    """Return guided log-probabilities `[tokens, codes]` for each token of a recorded run, given all earlier tokens."""
    uncond = (
        ARRAYS["uncond_ids"] if trace["unconditional_ids"] == len(ARRAYS["uncond_ids"]) else trace["unconditional_ids"]
    )
    ids = np.array(trace["generated_ids"])
    prompt_runs = PromptRunner(bundle, trace["prompt_ids"], uncond, CODES.start)
    prefill_outputs = prompt_runs.outputs
    outputs = prompt_runs.step(ids[:-1])
    logits = np.stack(
        [
            np.append(prefill["logits"][0, -1:], output["logits"][0], 0)
            for prefill, output in zip(prefill_outputs, outputs, strict=True)
        ]
    )
    sampling = Sampling(cfg_scale=trace["cfg"], repetition_penalty=trace["repetition_penalty"])
    earlier_codes = [ids[:n] - CODES.start for n in range(len(ids))]
    sampler = make_sampler(sampling, len(ids))
    return compute_code_log_probabilities(
        sampler.guide(logits, range(len(ids)), [codes[codes >= 0] for codes in earlier_codes])
    )


@pytest.mark.parametrize("trace", TRACES.values(), ids=lambda trace: str(trace["name"]))
def test_a_run_has_the_recorded_scores_probabilities_and_tokens(simplear_bundle: Path, trace: dict[str, Any]) -> None:
    name = trace["name"]
    ids = np.array(trace["generated_ids"])
    scores = compute_run_scores(simplear_bundle, trace)
    np.testing.assert_array_equal(np.clip(ids - CODES.start, 0, 575), np.ravel(trace["codes"]))
    if f"{name}_scores" in ARRAYS:
        assert_close(scores, compute_code_log_probabilities(ARRAYS[f"{name}_scores"]), GUIDED_TOLERANCE)
    if trace["sample"] is None:
        np.testing.assert_array_equal(scores.argmax(-1) + CODES.start, ids)
    elif f"{name}_probs" in ARRAYS:
        probabilities = ARRAYS[f"{name}_probs"][:, CODES]
        is_code_only = probabilities.sum(1) > 1 - 1e-5  # the filters removed all text tokens
        assert is_code_only.sum() == 16
        shaped = make_sampler(Sampling(**trace["sample"])).compute_distribution(scores)
        np.testing.assert_allclose(shaped[is_code_only], probabilities[is_code_only], atol=1e-4)
        ends = shaped.cumsum(1)
        uniform = np.array(trace["uniform"])[:, None]
        np.testing.assert_array_equal(
            (ends <= uniform * ends[:, -1:]).sum(1)[is_code_only] + CODES.start, ids[is_code_only]
        )


def test_a_repetition_penalty_gives_the_recorded_logits() -> None:
    logits = np.stack(
        [
            np.append(ARRAYS[f"{row_name}_prefill_logits"][-1:], ARRAYS[f"decode_{row_name}_logits"], 0)
            for row_name in ("cond", "uncond")
        ]
    )
    earlier_codes = [ARRAYS["decode_tokens"][:n] - CODES.start for n in range(8)]
    penalty = GENERATION["repetition_penalty"]
    unguided, guided = (
        make_sampler(Sampling(cfg_scale=scale, repetition_penalty=penalty), 8).guide(
            logits[:rows, :, CODES], range(8), earlier_codes
        )
        for rows, scale in ((1, 1), (2, 6))
    )
    assert_close(unguided, ARRAYS["decode_cond_penalised"][:, CODES])
    assert_close(
        compute_code_log_probabilities(guided),
        compute_code_log_probabilities(ARRAYS["decode_guided_penalised"]),
        GUIDED_TOLERANCE,
    )


def test_image_token_ids_have_the_recorded_codes_and_embeddings(simplear_bundle: Path) -> None:
    ids = ARRAYS["clamp_ids"]
    codes = ARRAYS["clamp_codes"]
    table = np.load(simplear_bundle / "code_embeddings.npy")
    is_text = ids < CODES.start
    assert (
        codes[is_text].tolist() == [0] * is_text.sum()
    )  # the published program maps text tokens to code 0; the runtime never samples text tokens
    np.testing.assert_array_equal(codes[~is_text], ids[~is_text] - CODES.start)
    weights = load_file(FOLDER / "model/model.safetensors")["model.embed_tokens.weight"]
    assert_close(table[codes[~is_text]], weights[ids[~is_text]].float().numpy(), 0)


# ---------------------------------------------------------------- image tokenizer


def test_fsq_gives_the_recorded_codes_and_vectors() -> None:
    levels = (8, 8, 8, 5, 5, 5)
    assert_close(
        decode_fsq_codes(torch.from_numpy(ARRAYS["fsq_official_indices"]), levels).numpy(), ARRAYS["fsq_official_codes"]
    )
    codes = quantize_fsq_latents(torch.from_numpy(ARRAYS["fsq_official_z"]).T[None, :, :, None], levels)
    np.testing.assert_array_equal(codes[0], ARRAYS["fsq_official_z_indices"])
    assert_close(decode_fsq_codes(codes, levels)[0].T.numpy(), ARRAYS["fsq_official_z_codes"])


@pytest.mark.parametrize("name", ["vq0", "vq1"])
def test_the_middle_of_the_image_decoder_has_the_recorded_values(simplear_bundle: Path, name: str) -> None:
    path = simplear_bundle / "vq_decoder.onnx"
    nodes = onnx.load(path).graph.node
    last_weight = "decoder.conv_blocks.0.res.0.conv2.weight"
    (last_output,) = [node.output[0] for node in nodes if node.op_type == "Conv" and node.input[1] == last_weight]
    skip = next(node for node in nodes if node.op_type == "Add" and last_output in node.input)
    mid = next(name for name in skip.input if name != last_output)
    assert_close(compute_graph_values(path, [mid], {"codes": ARRAYS[f"{name}_codes"]})[0], ARRAYS[f"{name}_mid"])


def test_the_image_encoder_has_the_recorded_output(simplear_bundle: Path) -> None:
    path = simplear_bundle / "vq_encoder.onnx"
    (name,) = [node.input[0] for node in onnx.load(path).graph.node if "quant_conv.weight" in node.input]
    assert_close(compute_graph_values(path, [name], {"images": ARRAYS["vq_image"]})[0], ARRAYS["vq_encoder_out"])


def test_the_haar_transform_gives_the_recorded_pixels() -> None:
    to_bands, to_pixels = compute_haar_matrices()
    patches = torch.einsum("pb,nb...->np...", to_pixels.float(), torch.from_numpy(ARRAYS["vq1_bands"]))
    assert_close(torch.pixel_shuffle(patches, 4).numpy(), ARRAYS["vq1_decoded"])
    assert torch.equal(to_pixels @ to_bands, torch.eye(48).double())


# ---------------------------------------------------------------- prompts


def test_prompts_of_all_kinds_have_the_published_token_ids(simplear_bundle: Path) -> None:
    bundle_manifest = read_manifest(simplear_bundle)
    library = Tokenizer.from_file(str(simplear_bundle / "tokenizer.json"))
    assert (NEGATIVE, bundle_manifest.sampling.cfg_scale) == (PROTOCOL["negative_generate_py"], PROTOCOL["cfg"])
    assert bundle_manifest.condition.layout == make_simplear_prompt_layout(library)
    tokenizer = TemplateTokenizer(library, TEMPLATE)
    context = RequestContext(bundle_manifest.condition, tokenizer, bundle_manifest.size(), uses_guidance=True)
    prefix = f"<|t2i|>{TEMPLATE.removesuffix('{prompt}')}"
    for case in PROTOCOL["tokenizer_cases"]:
        text = case["text"].removesuffix("<|soi|>")
        if text.startswith(prefix):
            (prompt,) = Text.read(text.removeprefix(prefix), context)
            cond, uncond = (row.tokens for row in prompt.prefix)
            assert uncond is not None
            assert uncond.tolist() == ARRAYS["uncond_ids"].tolist()
        elif negative := text.removeprefix("<|t2i|>"):
            cond = NegativePromptInput(negative).finish(context).row.tokens
        else:
            cond = np.array(make_simplear_prompt_layout(library, "").uncond)  # the empty prompt of training
        assert cond is not None
        assert cond.tolist() == case["ids"]


EMBED = "model.embed_tokens.weight"


def test_tokenizer_options_do_not_change_the_prompt_layout(tmp_path: Path) -> None:
    target = copy_checkpoint(SIMPLEAR, tmp_path / "target")
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    tokenizer.enable_padding(length=64)
    tokenizer.enable_truncation(2)
    tokenizer.model.dropout = 0.5
    tokenizer.save(str(target / "tokenizer.json"))
    actual, expected = (
        read_simplear(folder, COSMOS, grid=4).manifest_fields["condition"] for folder in (target, SIMPLEAR)
    )
    assert actual.layout == expected.layout


def test_an_untied_head_and_a_tokenizer_in_safetensors_are_read(tmp_path: Path) -> None:
    for part in ("encoder", "decoder"):
        weights = read_weights(COSMOS / f"{part}.jit")
        save_file({name: weight.clone() for name, weight in weights.items()}, tmp_path / f"{part}.safetensors")
    untied = copy_checkpoint(
        SIMPLEAR, tmp_path / "target", lambda w: w.update({"lm_head.weight": w[EMBED] + 1}), tie_word_embeddings=False
    )
    tied = read_simplear(SIMPLEAR, COSMOS, grid=4)
    untied_model = read_simplear(untied, tmp_path, grid=4)
    tied_head, untied_head = (model.graphs[0].module.state_dict()["head.weight"] for model in (tied, untied_model))
    assert torch.equal(compute_deferred_tensor(tied_head) + 1, compute_deferred_tensor(untied_head))
    for graph, untied_graph in zip(tied.graphs[1:], untied_model.graphs[1:], strict=True):
        weights = untied_graph.module.state_dict()
        stored_weights = graph.module.state_dict().items()
        assert all(
            torch.equal(compute_deferred_tensor(weights[name]), compute_deferred_tensor(weight))
            for name, weight in stored_weights
        )
    assert tied.manifest_fields["sampling"].repetition_penalty == 1.1  # the value in generation_config.json


def test_an_invalid_config_of_the_image_tokenizer_is_ignored(tmp_path: Path) -> None:
    shutil.copytree(COSMOS, tmp_path / "cosmos")
    (tmp_path / "cosmos/config.json").write_text(
        '{"architectures": ["CosmosTokenizer"],}'
    )  # NVIDIA publishes this file with an invalid comma
    model = read_simplear(SIMPLEAR, tmp_path / "cosmos", grid=4)
    assert np.array_equal(model.codebook, read_simplear(SIMPLEAR, COSMOS, grid=4).codebook)


def test_image_sizes_have_about_the_same_area_or_are_squares() -> None:
    names = [size.name for size in list_image_sizes(64, 16)]
    assert names[0] == "1024x1024"
    assert "1360x768" in names
    assert names[-3:] == ["768x768", "512x512", "256x256"]
