"""SimpleAR's exported graphs against every array recorded from the published implementations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from goldens import DATA, GUIDED, Sides, close, golden, manifest, observed
from guided_logits import guide
from numpy.typing import NDArray
from safetensors.torch import load_file
from shared_goldens import DecoderGolden, Family, log_softmax
from tokenizers import Tokenizer

from lantern_rt.export.compare import GraphFileSession
from lantern_rt.export.families.simplear import NEGATIVE, TEMPLATE, prompt_layout
from lantern_rt.export.models.cosmos_vq import haar_bands
from lantern_rt.export.models.fsq import code_vectors, nearest_codes
from lantern_rt.methods import Sampling
from lantern_rt.output.images import to_image
from lantern_rt.prompts import prepare_prompts
from lantern_rt.runtime.sampling import apply_repetition_penalty, compute_distribution
from lantern_rt.text.tokenizers import TemplateTokenizer

FOLDER = DATA / "simplear"
CODES = slice(395, 971)
PROTOCOL = json.loads((FOLDER / "protocol.json").read_text())
TRACES = {trace["name"]: trace for trace in json.loads((FOLDER / "traces.json").read_text())[:-1]}  # last: both at once
G = golden("simplear")
GENERATION = json.loads((FOLDER / "model/generation_config.json").read_text())


@pytest.fixture(scope="module")
def family(simplear_bundle: Path) -> Family:
    return Family(simplear_bundle, G, CODES, scale=6.0, scored=log_softmax)


class TestDecoder(DecoderGolden):
    pass


def over_codes(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """Log-probabilities among codes alone."""
    return log_softmax(scores[..., CODES] if scores.shape[-1] == CODES.stop else scores)


def test_filter_probs_of_the_whole_vocabulary() -> None:
    for (temperature, top_k, top_p), expected in zip(G["filter_params"], G["filter_probs"], strict=True):
        sampling = Sampling(temperature=float(temperature), top_k=int(top_k), top_p=float(top_p))
        found = compute_distribution(G["filter_logits"], sampling)
        if top_p < 1:  # of codes that tie with the last one kept, the published program drops any, and here stay all
            dropped = (expected[-1] == 0) & (found[-1] > 0)
            assert (found[-1][dropped] == found[-1][found[-1] > 0].min()).all()
            found = found[:-1]
            expected = expected[:-1]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def scores_of(bundle: Path, trace: dict[str, Any]) -> NDArray[np.float32]:
    """Guided log-probabilities of codes for each token of a run, which is fed as it was generated."""
    uncond = G["uncond_ids"] if trace["unconditional_ids"] == len(G["uncond_ids"]) else trace["unconditional_ids"]
    ids = np.array(trace["generated_ids"])
    rows = Sides(bundle, trace["prompt_ids"], uncond, CODES.start)
    first = rows.outputs
    rest = rows.step(ids[:-1])
    logits = np.stack([np.append(a["logits"][0, -1:], b["logits"][0], 0) for a, b in zip(first, rest, strict=True)])
    sampling = Sampling(cfg_scale=trace["cfg"], repetition_penalty=trace["repetition_penalty"])
    before = [ids[:n] - CODES.start for n in range(len(ids))]
    return over_codes(guide(apply_repetition_penalty(logits, [own[own >= 0] for own in before], sampling), sampling))


@pytest.mark.parametrize("trace", TRACES.values(), ids=lambda trace: str(trace["name"]))
def test_scores_generated_ids_and_sample_probs_of_every_run(simplear_bundle: Path, trace: dict[str, Any]) -> None:
    name = trace["name"]
    ids = np.array(trace["generated_ids"])
    found = scores_of(simplear_bundle, trace)
    np.testing.assert_array_equal(np.clip(ids - CODES.start, 0, 575), np.ravel(trace["codes"]))
    if f"{name}_scores" in G:
        close(found, over_codes(G[f"{name}_scores"]), GUIDED)
    if trace["sample"] is None:
        np.testing.assert_array_equal(found.argmax(-1) + CODES.start, ids)
    elif f"{name}_probs" in G:
        probabilities = G[f"{name}_probs"][:, CODES]
        alone = probabilities.sum(1) > 1 - 1e-5  # where the filters left no text
        assert alone.sum() == 16
        shaped = compute_distribution(found, Sampling(**trace["sample"]))
        np.testing.assert_allclose(shaped[alone], probabilities[alone], atol=1e-4)
        ends = shaped.cumsum(1)
        uniform = np.array(trace["uniform"])[:, None]
        np.testing.assert_array_equal((ends <= uniform * ends[:, -1:]).sum(1)[alone] + CODES.start, ids[alone])


def test_decode_cond_penalised_and_decode_guided_penalised_of_codes() -> None:
    logits = np.stack(
        [np.append(G[f"{s}_prefill_logits"][-1:], G[f"decode_{s}_logits"], 0) for s in ("cond", "uncond")]
    )
    before = [G["decode_tokens"][:n] - CODES.start for n in range(8)]
    sampling = Sampling(cfg_scale=6, repetition_penalty=GENERATION["repetition_penalty"])
    penalised = apply_repetition_penalty(logits[..., CODES], before, sampling)
    close(penalised[0], G["decode_cond_penalised"][:, CODES])
    close(over_codes(guide(penalised, sampling)), over_codes(G["decode_guided_penalised"]), GUIDED)


def test_clamp_codes_are_those_of_clamp_ids_where_these_are_codes(simplear_bundle: Path) -> None:
    ids = G["clamp_ids"]
    codes = G["clamp_codes"]
    table = np.load(simplear_bundle / "code_embeddings.npy")
    text = ids < CODES.start
    assert codes[text].tolist() == [0] * text.sum()  # never drawn here
    np.testing.assert_array_equal(codes[~text], ids[~text] - CODES.start)
    weights = load_file(FOLDER / "model/model.safetensors")["model.embed_tokens.weight"]
    close(table[codes[~text]], weights[ids[~text]].float().numpy(), 0)


# ---------------------------------------------------------------- image tokenizer


def test_fsq_official_codes_indices_and_z_of_the_published_levels() -> None:
    levels = (8, 8, 8, 5, 5, 5)
    close(code_vectors(torch.from_numpy(G["fsq_official_indices"]), levels).numpy(), G["fsq_official_codes"])
    codes = nearest_codes(torch.from_numpy(G["fsq_official_z"]).T[None, :, :, None], levels)
    np.testing.assert_array_equal(codes[0], G["fsq_official_z_indices"])
    close(code_vectors(codes, levels)[0].T.numpy(), G["fsq_official_z_codes"])


@pytest.mark.parametrize("name", ["vq0", "vq1"])
def test_vq_codes_become_code_vectors_post_quant_mid_and_decoded(simplear_bundle: Path, name: str) -> None:
    path = simplear_bundle / "vq_decoder.onnx"
    nodes = onnx.load(path).graph.node
    reading = {node.input[1]: node for node in nodes if node.op_type == "Conv"}
    first = reading["post_quant_conv.weight"]
    after = reading["decoder.conv_blocks.0.res.0.conv2.weight"]
    skip = next(node for node in nodes if node.op_type == "Add" and after.output[0] in node.input)
    mid = next(one for one in skip.input if one != after.output[0])
    found = observed(path, [first.input[0], first.output[0], mid, "images"], {"codes": G[f"{name}_codes"]})
    for array, part in zip(found, ("code_vectors", "post_quant", "mid", "decoded"), strict=True):
        close(array, G[f"{name}_{part}"])


def test_vq1_bands_become_vq1_decoded_and_bands_of_a_picture_give_it_back() -> None:
    to_bands, to_pixels = haar_bands()
    patches = torch.einsum("pb,nb...->np...", to_pixels.float(), torch.from_numpy(G["vq1_bands"]))
    close(torch.pixel_shuffle(patches, 4).numpy(), G["vq1_decoded"])
    assert torch.equal(to_pixels @ to_bands, torch.eye(48).double())


def test_vq_image_becomes_encoder_out_pre_quant_encoded_quantized_and_reconstruction(simplear_bundle: Path) -> None:
    path = simplear_bundle / "vq_encoder.onnx"
    reading = {node.input[1]: node for node in onnx.load(path).graph.node if node.op_type == "Conv"}
    feeds = {"images": G["vq_image"]}
    out, latents = observed(path, [reading["quant_conv.weight"].input[0], "pre_quant"], feeds)
    close(out, G["vq_encoder_out"])
    close(latents, G["vq_pre_quant"])
    codes = GraphFileSession(path).run(feeds)["codes"].reshape(G["vq_encoded"].shape)
    np.testing.assert_array_equal(codes, G["vq_encoded"])
    close(code_vectors(torch.from_numpy(codes), (4, 4, 4, 3, 3)).numpy(), G["vq_quantized"])
    close(GraphFileSession(simplear_bundle / "vq_decoder.onnx").run({"codes": codes})["images"], G["vq_reconstruction"])


@pytest.mark.parametrize("name", ["run0_cfg6", "run1_cfg6", "run2_cfg6", "run1_published"])
def test_codes_of_runs_become_their_pixels_and_uint8(simplear_bundle: Path, name: str) -> None:
    feeds = {"codes": np.array([TRACES[name]["codes"]])}
    (picture,) = GraphFileSession(simplear_bundle / "vq_decoder.onnx").run(feeds)["images"]
    close(picture, G[f"{name}_pixels"])
    assert np.abs(np.asarray(to_image(picture)).astype(int) - G[f"{name}_uint8"]).max() <= 1


# ---------------------------------------------------------------- prompts


def test_prompts_negative_and_null_prompts_have_the_published_ids(simplear_bundle: Path) -> None:
    own = manifest(simplear_bundle)
    library = Tokenizer.from_file(str(simplear_bundle / "tokenizer.json"))
    assert (NEGATIVE, own.sampling.cfg_scale) == (PROTOCOL["negative_generate_py"], PROTOCOL["cfg"])
    assert own.condition.layout == prompt_layout(library)
    tokenizer = TemplateTokenizer(library, TEMPLATE)
    before = f"<|t2i|>{TEMPLATE.removesuffix('{prompt}')}"
    for case in PROTOCOL["tokenizer_cases"]:
        text = case["text"].removesuffix("<|soi|>")
        if text.startswith(before):
            (request,) = prepare_prompts(own.condition, tokenizer, own.size(), [text.removeprefix(before)])
            cond, uncond = request.tokens or ()
            assert uncond.tolist() == G["uncond_ids"].tolist()
        elif negative := text.removeprefix("<|t2i|>"):
            (request,) = prepare_prompts(own.condition, tokenizer, own.size(), ["a fox"], negative)
            cond = (request.tokens or ())[1]
        else:
            cond = np.array(prompt_layout(library, "").uncond)  # the null prompt of training
        assert cond.tolist() == case["ids"]
