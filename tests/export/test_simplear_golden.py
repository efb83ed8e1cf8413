"""SimpleAR: graphs and prompts compared with recordings, and variants of checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_copies import COSMOS, SIMPLEAR, copy_checkpoint
from family_readers import read_simplear
from goldens import DATA, GUIDED_TOLERANCE, PromptRunner, assert_close, load_golden, log_softmax, read_manifest
from guided_logits import make_sampler
from safetensors.torch import save_file
from tokenizers import Tokenizer

from lantern_rt.export.checkpoints.deferred import compute_deferred_tensor
from lantern_rt.export.checkpoints.files import read_weights
from lantern_rt.export.families.simplear import NEGATIVE, TEMPLATE, list_image_sizes, make_simplear_prompt_layout
from lantern_rt.export.models.fsq import decode_fsq_codes, quantize_fsq_latents
from lantern_rt.methods import Sampling
from lantern_rt.subjects.base import RequestContext
from lantern_rt.subjects.negative_prompt import NegativePrompt
from lantern_rt.subjects.prompts import Text
from lantern_rt.text.tokenizers import TemplateTokenizer

FOLDER = DATA / "simplear"
CODES = slice(395, 971)  # token ids of the codes
PROTOCOL = json.loads((FOLDER / "protocol.json").read_text())
TRACES: list[dict[str, Any]] = json.loads((FOLDER / "traces.json").read_text())[:-1]  # the last trace is a batch
ARRAYS = load_golden("simplear")


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace["name"])
def test_a_run_has_the_recorded_scores_probabilities_and_tokens(simplear_bundle: Path, trace: dict[str, Any]) -> None:
    name = trace["name"]
    ids = np.array(trace["generated_ids"])
    uncond = trace["unconditional_ids"]
    if uncond == len(ARRAYS["uncond_ids"]):
        uncond = ARRAYS["uncond_ids"]
    logits = PromptRunner(simplear_bundle, trace["prompt_ids"], uncond, CODES.start).compute_logits(ids)
    sampling = Sampling(cfg_scale=trace["cfg"], repetition_penalty=trace["repetition_penalty"])
    codes = ids - CODES.start  # text tokens, which the published program may sample, are below 0
    earlier_codes = [codes[:n][codes[:n] >= 0] for n in range(len(codes))]
    scores = log_softmax(make_sampler(sampling, len(ids)).guide(logits, range(len(ids)), earlier_codes))
    np.testing.assert_array_equal(np.clip(codes, 0, 575), np.ravel(trace["codes"]))
    if f"{name}_scores" in ARRAYS:
        assert_close(scores, log_softmax(ARRAYS[f"{name}_scores"][:, CODES]), GUIDED_TOLERANCE)
    if trace["sample"] is None:
        np.testing.assert_array_equal(scores.argmax(-1), codes)
    elif f"{name}_probs" in ARRAYS:
        probabilities = ARRAYS[f"{name}_probs"][:, CODES]
        is_code_only = probabilities.sum(1) > 1 - 1e-5  # the filters removed all text tokens
        assert is_code_only.sum() == 16
        shaped = make_sampler(Sampling(**trace["sample"])).compute_distribution(scores)
        np.testing.assert_allclose(shaped[is_code_only], probabilities[is_code_only], atol=1e-4)
        ends = shaped.cumsum(1)
        uniform = np.array(trace["uniform"])[:, None]
        sampled_codes = (ends <= uniform * ends[:, -1:]).sum(1)
        np.testing.assert_array_equal(sampled_codes[is_code_only], codes[is_code_only])


# ---------------------------------------------------------------- image tokenizer


def test_fsq_gives_the_recorded_codes_and_vectors() -> None:
    levels = (8, 8, 8, 5, 5, 5)
    assert_close(
        decode_fsq_codes(torch.from_numpy(ARRAYS["fsq_official_indices"]), levels).numpy(), ARRAYS["fsq_official_codes"]
    )
    codes = quantize_fsq_latents(torch.from_numpy(ARRAYS["fsq_official_z"]).T[None, :, :, None], levels)
    np.testing.assert_array_equal(codes[0], ARRAYS["fsq_official_z_indices"])
    assert_close(decode_fsq_codes(codes, levels)[0].T.numpy(), ARRAYS["fsq_official_z_codes"])


# ---------------------------------------------------------------- prompts


def test_prompts_of_all_kinds_have_the_published_token_ids(simplear_bundle: Path) -> None:
    bundle_manifest = read_manifest(simplear_bundle)
    library = Tokenizer.from_file(str(simplear_bundle / "tokenizer.json"))
    assert (NEGATIVE, bundle_manifest.sampling.cfg_scale) == (PROTOCOL["negative_generate_py"], PROTOCOL["cfg"])
    assert bundle_manifest.condition.layout == make_simplear_prompt_layout(library)
    tokenizer = TemplateTokenizer(library)
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
            cond = NegativePrompt(negative).finish(context).row.tokens
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
