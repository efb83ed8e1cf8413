"""Comparisons of Janus bundles with arrays of DeepSeek's program, and tests of prompts and checkpoint layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_copies import JANUS, JANUS_CONVERTED, copy_as_shards, copy_checkpoint, copy_json
from family_readers import read_janus
from goldens import (
    DATA,
    GUIDED_TOLERANCE,
    GraphRunner,
    assert_close,
    assert_same_bundles,
    embed_tokens,
    load_golden,
    mix_guided,
)
from guided_logits import make_sampler
from numpy.typing import NDArray

from lantern_rt import Pipeline
from lantern_rt.export.models import exact
from lantern_rt.export.writer import export_model
from lantern_rt.methods import Sampling

FOLDER = DATA / "janus-deepseek"
ARRAYS = load_golden("janus-deepseek")
TRACES: list[dict[str, Any]] = json.loads((FOLDER / "traces.json").read_text())
GREEDY = [trace for trace in TRACES if not trace["sample"]]
PROTOCOL: dict[str, Any] = json.loads((FOLDER / "protocol.json").read_text())


# ---------------------------------------------------------------- decoder


class RecordedPromptRun:
    """Runner of a recorded prompt and of codes after the prompt, in a conditional and an unconditional row."""

    def __init__(self, bundle: Path, prompt: int) -> None:
        self.table = np.load(bundle / "code_embeddings.npy")
        self.graph_run = GraphRunner(bundle, rows=2)
        self.prefill = self.graph_run.step(input_embeds=embed_tokens(bundle, ARRAYS[f"prompt{prompt}_ids"]))

    def step(self, codes: Any, **options: Any) -> dict[str, NDArray[Any]]:
        """Run codes `[nodes]` in both rows and return the outputs; `options` are options of `GraphRunner.step`."""
        return self.graph_run.step(input_embeds=np.tile(self.table[np.array(codes)], (2, 1, 1)), **options)

    def compute_logits(self, codes: list[int]) -> NDArray[np.float32]:
        return np.concatenate([self.prefill["logits"][:, -1:], self.step(codes[:-1])["logits"]], 1)


def test_the_prefill_has_the_recorded_outputs_keys_and_values(janus_bundle: Path) -> None:
    out = RecordedPromptRun(janus_bundle, 0).prefill
    assert_close(out["logits"], ARRAYS["prefill_logits"])
    for part in ("key", "value"):
        tensors = np.stack([out[f"new_key_values.{i}.{part}"] for i in range(3)])  # [layers, nodes, rows, heads, width]
        assert_close(tensors.transpose(0, 2, 3, 1, 4), ARRAYS[f"prefill_{part}s"])


def test_single_codes_and_a_draft_tree_have_the_recorded_outputs(janus_bundle: Path) -> None:
    run = RecordedPromptRun(janus_bundle, 0)
    assert_close(run.table, ARRAYS["code_embeds"])
    assert_close(run.table[ARRAYS["decode_tokens"]], ARRAYS["decode_embeds"])
    steps = [run.step([code]) for code in ARRAYS["decode_tokens"]]
    assert_close(np.concatenate([step["hidden_states"] for step in steps], 1), ARRAYS["decode_hidden"])
    assert_close(np.concatenate([step["logits"] for step in steps], 1), ARRAYS["decode_logits"])
    depths = ARRAYS["tree_depth"]
    parents = ARRAYS["tree_parents"]
    assert depths.tolist() == [0 if parent < 0 else depths[parent] + 1 for parent in parents]
    positions = run.graph_run.length + depths
    assert ARRAYS["tree_position_ids"].tolist() == positions.tolist()
    out = run.step(ARRAYS["tree_tokens"], visible=ARRAYS["tree_mask"] > 0, positions=positions)
    assert_close(out["hidden_states"], ARRAYS["tree_hidden"])
    assert_close(out["logits"], ARRAYS["tree_logits"])
    assert_close(mix_guided(out["logits"], 5.0), ARRAYS["tree_guided"], GUIDED_TOLERANCE)


# ---------------------------------------------------------------- whole images


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace["name"])
def test_runs_have_the_recorded_guided_logits_and_codes(janus_bundle: Path, trace: dict[str, Any]) -> None:
    name = trace["name"]
    sampling = Sampling(temperature=trace["temperature"])
    for i, codes in enumerate(trace["codes"]):
        logits = RecordedPromptRun(janus_bundle, int(name[6])).compute_logits(codes)  # `prompt1_cfg5` or `sample1`
        guided = mix_guided(logits, trace["cfg_weight"])
        recorded = ARRAYS[f"{name}_guided"]
        assert_close(guided, recorded[:, i] if trace["sample"] else recorded, GUIDED_TOLERANCE)
        probabilities = make_sampler(sampling).compute_distribution(guided)
        recorded = ARRAYS[f"{name}_first_probs"]
        assert_close(probabilities[:4], (recorded[:, i] if trace["sample"] else recorded).astype(np.float64))
        if f"{name}_cond" in ARRAYS:
            assert_close(logits, np.stack([ARRAYS[f"{name}_cond"], ARRAYS[f"{name}_uncond"]]))
        if trace["sample"]:
            cumulative = probabilities.cumsum(1)
            is_below = cumulative / cumulative[:, -1:] <= np.array(trace["uniform"])[:, i, None]
            assert is_below.sum(1).tolist() == codes


def test_greedy_images_alone_and_batched_have_the_recorded_codes(janus_bundle: Path) -> None:
    with Pipeline.from_bundle(janus_bundle, threads=1) as pipe:
        # The first four runs have the first caption, the other runs have the second.
        for trace, other_trace in zip(GREEDY[:4], GREEDY[4:], strict=True):
            assert trace["caption"] != other_trace["caption"]
            options = {"temperature": 0, "cfg_scale": trace["cfg_weight"]}
            batch = pipe([trace["caption"], other_trace["caption"]], **options)
            assert [codes.tolist() for codes in batch.codes] == [trace["codes"][0], other_trace["codes"][0]]
            image = pipe(other_trace["caption"], method="sjd:window=3", **options)
            assert [image.codes[0].tolist()] == other_trace["codes"]


# ---------------------------------------------------------------- prompts


def copy_with_start_token(folder: Path) -> Path:
    """Copy the checkpoint and change the tokenizer to add the token for the start of a sequence to every text."""
    path = copy_checkpoint(JANUS, folder) / "tokenizer.json"
    content = json.loads(path.read_text())
    start = next(token for token in content["added_tokens"] if token["id"] == 304)["content"]
    pieces = [{"SpecialToken": {"id": start, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokens = {start: {"id": start, "ids": [304], "tokens": [start]}}
    content["post_processor"] = {"type": "TemplateProcessing", "single": pieces, "pair": [], "special_tokens": tokens}
    path.write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("adds_start", [False, True])
def test_prompts_have_the_token_ids_of_the_published_processor(tmp_path: Path, adds_start: bool) -> None:
    from lantern_rt.bundle.manifest import Size
    from lantern_rt.subjects.base import RequestContext
    from lantern_rt.subjects.prompts import Text
    from lantern_rt.text.tokenizers import TemplateTokenizer, parse_tokenizer

    folder = copy_with_start_token(tmp_path / "janus") if adds_start else JANUS
    cases = [case for case in PROTOCOL["prompt_cases"] if case["caption"] and not case["system_prompt"]]
    assert {case["roles"][0] for case in cases} == {"User", "<|User|>"}
    assert len(cases) > 8
    for roles in ("User,Assistant", "<|User|>,<|Assistant|>"):
        model = read_janus(folder, roles=roles)
        condition = model.manifest_fields["condition"]
        tokenizer = TemplateTokenizer(parse_tokenizer(model.extra_files["tokenizer"][1]))
        role_cases = [case for case in cases if ",".join(case["roles"]) == roles]
        captions = [case["caption"] for case in role_cases]
        context = RequestContext(condition, tokenizer, Size(name="64x64", rows=4, columns=4), uses_guidance=True)
        for case, prompt in zip(role_cases, Text.read(captions, context), strict=True):
            ids = [prompt.prefix.cond.inputs[name][0].tolist() for name in ("token_ids", "uncond_ids")]
            assert ids == [case["prompt_ids"], case["unconditional_ids"]], case["caption"]


# ---------------------------------------------------------------- folders


def copy_as_saved_by_a_trainer(folder: Path) -> Path:
    more_fields = {"head_dim": 10, "_attn_implementation_autoset": True}
    copy_checkpoint(JANUS, folder, lambda weights: None, lambda config: config["language_config"].update(more_fields))
    (folder / "processor_config.json").unlink()
    return folder


@pytest.mark.parametrize(
    "copy",
    [
        lambda folder: copy_checkpoint(JANUS, folder, lambda weights: None),
        copy_as_saved_by_a_trainer,
        lambda folder: copy_as_shards(JANUS, folder, "bin"),
        lambda folder: copy_as_shards(JANUS, folder, "safetensors"),
        lambda folder: copy_checkpoint(JANUS_CONVERTED, folder),
    ],
    ids=["safetensors", "trainer", "PyTorch shards", "safetensors shards", "transformers"],
)
def test_every_layout_of_weights_gives_the_same_bundle(janus_bundle: Path, tmp_path: Path, copy: Any) -> None:
    output = tmp_path / janus_bundle.name
    assert_same_bundles(janus_bundle, export_model(read_janus(copy(tmp_path / "janus")), output))


def test_weights_for_image_understanding_are_not_read(tmp_path: Path) -> None:
    def replace_by_nan(weights: dict[str, torch.Tensor]) -> None:
        for name in weights:
            if name.startswith(("vision_model.", "aligner.", "language_model.lm_head")):
                weights[name] = torch.full_like(weights[name], torch.nan)  # NaN is rejected where it is read

    contents = read_janus(copy_checkpoint(JANUS, tmp_path / "janus", replace_by_nan))
    assert torch.isfinite(contents.code_embeddings).all()


@pytest.mark.parametrize(("scale", "expected"), [(None, 5), (3, 3), (0.5, 1)])
def test_guidance_scales_mean_what_transformers_takes_them_for(
    tmp_path: Path, scale: float | None, expected: float
) -> None:
    folder = copy_checkpoint(JANUS_CONVERTED, tmp_path / "janus")
    copy_json(folder / "generation_config.json", folder / "generation_config.json", guidance_scale=scale)
    assert read_janus(folder).manifest_fields["sampling"].cfg_scale == expected


def test_exact_matmuls_and_gelu_agree_with_pytorch() -> None:
    rng = np.random.default_rng(0)
    inputs, weight = (np.ldexp(rng.normal(size=size), rng.integers(-9, 9, size)) for size in ((7, 500), (9, 500)))
    bias = rng.normal(size=9)
    permutation = rng.permutation(500)
    products = exact.apply_exact_linear(inputs, exact.split_into_integer_matrices(weight), bias)
    assert np.array_equal(
        products,
        exact.apply_exact_linear(
            inputs[:, permutation], exact.split_into_integer_matrices(weight[:, permutation]), bias
        ),
    )
    scale = np.abs(inputs).max() * np.abs(weight).max()
    np.testing.assert_allclose(products, inputs @ weight.T + bias, rtol=0, atol=1e-10 * scale)
    values = np.linspace(-20, 20, 10_001)
    assert_close(exact.gelu(values), torch.nn.functional.gelu(torch.from_numpy(values)).numpy(), 3e-8)
