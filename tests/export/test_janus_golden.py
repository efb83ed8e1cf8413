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
from goldens import DATA, GUIDED_TOLERANCE, GraphRunner, assert_close, compute_graph_values, embed_tokens, load_golden
from guided_logits import make_sampler, mix_guided_logits
from numpy.typing import NDArray
from shared_goldens import list_residual_names

from lantern_rt import Pipeline
from lantern_rt.export.compare import GraphFileSession
from lantern_rt.export.graph.graphs import HIDDEN
from lantern_rt.export.models import exact
from lantern_rt.export.writer import export_model
from lantern_rt.methods import Sampling
from lantern_rt.output.images import convert_pixels_to_image

FOLDER = DATA / "janus-deepseek"
ARRAYS = load_golden("janus-deepseek")
TRACES: list[dict[str, Any]] = json.loads((FOLDER / "traces.json").read_text())
GREEDY = [trace for trace in TRACES if not trace["sample"]]
SAMPLED = [trace for trace in TRACES if trace["sample"]]
PROTOCOL: dict[str, Any] = json.loads((FOLDER / "protocol.json").read_text())


@pytest.fixture(scope="module")
def converted_bundle(export_once: Any) -> Path:
    """Export the checkpoint in the layout of transformers."""

    def export(output: Path) -> Path:
        return export_model(read_janus(JANUS_CONVERTED), output)

    path: Path = export_once("janus_converted/tiny-janus", export)
    return path


@pytest.fixture
def bundle(janus_bundle: Path) -> Path:
    return janus_bundle


def get_trace_name(trace: dict[str, Any]) -> str:
    return str(trace["name"])


def get_prompt_index(trace: dict[str, Any]) -> int:
    """Return the index of a run's prompt, the digit in run names such as `prompt1_cfg5` or `sample1`."""
    return int(trace["name"][6])


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


def test_the_prefill_has_the_recorded_outputs_keys_and_values(bundle: Path) -> None:
    out = RecordedPromptRun(bundle, 0).prefill
    assert_close(out["logits"], ARRAYS["prefill_logits"])
    for part in ("key", "value"):
        tensors = np.stack([out[f"new_key_values.{i}.{part}"] for i in range(3)])  # [layers, nodes, rows, heads, width]
        assert_close(tensors.transpose(0, 2, 3, 1, 4), ARRAYS[f"prefill_{part}s"])
    embeds = embed_tokens(bundle, ARRAYS["prompt0_ids"])
    nodes = embeds.shape[1]
    feeds = {"input_embeds": embeds, "position_ids": np.tile(np.arange(nodes), (2, 1))}
    feeds["attention_mask"] = np.tile(np.where(np.tri(nodes), 0, HIDDEN).astype(np.float32), (2, 1, 1, 1))
    empty = np.zeros((0, 2, 4, 10), np.float32)
    feeds |= {f"past_key_values.{i}.{part}": empty for i in range(3) for part in ("key", "value")}
    *states, last = compute_graph_values(
        bundle / "target.onnx", [*list_residual_names(bundle)[2:-1:2], "hidden_states"], feeds
    )
    assert_close(np.stack([embeds, *(state.swapaxes(0, 1) for state in states), last]), ARRAYS["layer_hidden"])


def test_single_codes_and_a_draft_tree_have_the_recorded_outputs(bundle: Path) -> None:
    run = RecordedPromptRun(bundle, 0)
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
    assert_close(mix_guided_logits(out["logits"], Sampling(cfg_scale=5.0)), ARRAYS["tree_guided"], GUIDED_TOLERANCE)


# ---------------------------------------------------------------- whole images


@pytest.mark.parametrize("trace", GREEDY, ids=get_trace_name)
def test_greedy_images_have_the_recorded_guided_logits(bundle: Path, trace: dict[str, Any]) -> None:
    name = trace["name"]
    row_logits = RecordedPromptRun(bundle, get_prompt_index(trace)).compute_logits(trace["codes"][0])
    guided = mix_guided_logits(row_logits, Sampling(cfg_scale=trace["cfg_weight"]))
    assert_close(guided, ARRAYS[f"{name}_guided"], GUIDED_TOLERANCE)
    assert_close(
        make_sampler(Sampling(temperature=trace["temperature"])).compute_distribution(guided[:4]),
        ARRAYS[f"{name}_first_probs"].astype(np.float64),
    )
    if f"{name}_cond" in ARRAYS:
        assert_close(row_logits, np.stack([ARRAYS[f"{name}_cond"], ARRAYS[f"{name}_uncond"]]))


def test_both_layouts_generate_the_recorded_greedy_images(bundle: Path, converted_bundle: Path) -> None:
    assert len({trace["caption"] for trace in GREEDY}) == 2
    for folder in (bundle, converted_bundle):
        with Pipeline.from_bundle(folder, threads=1) as pipe:
            # The first four runs have the first caption, the other runs have the second.
            for trace, other_trace in zip(GREEDY[:4], GREEDY[4:], strict=True):
                options = {"temperature": 0, "cfg_scale": trace["cfg_weight"]}
                batch = pipe([trace["caption"], other_trace["caption"]], **options)
                assert [codes.tolist() for codes in batch.codes] == [trace["codes"][0], other_trace["codes"][0]]
                image = pipe(other_trace["caption"], method="sjd:window=3", **options)
                assert [image.codes[0].tolist()] == other_trace["codes"]


@pytest.mark.parametrize("trace", SAMPLED, ids=get_trace_name)
def test_sampled_images_have_the_recorded_distributions(bundle: Path, trace: dict[str, Any]) -> None:
    name = trace["name"]
    sampling = Sampling(temperature=trace["temperature"])
    for i, codes in enumerate(trace["codes"]):
        row_logits = RecordedPromptRun(bundle, get_prompt_index(trace)).compute_logits(codes)
        guided = mix_guided_logits(row_logits, Sampling(cfg_scale=trace["cfg_weight"]))
        assert_close(guided, ARRAYS[f"{name}_guided"][:, i], GUIDED_TOLERANCE)
        distribution = make_sampler(sampling).compute_distribution(guided)
        assert_close(distribution[:4], ARRAYS[f"{name}_first_probs"][:, i].astype(np.float64))
        cumulative = distribution.cumsum(1)
        assert (cumulative / cumulative[:, -1:] <= np.array(trace["uniform"])[:, i, None]).sum(1).tolist() == codes


def test_the_last_sampled_codes_decode_to_the_recorded_image(bundle: Path) -> None:
    codes = {"codes": np.array([SAMPLED[0]["codes"][-1]])}
    (image,) = GraphFileSession(bundle / "vq_decoder.onnx").run(codes)["images"]
    levels = np.asarray(convert_pixels_to_image(image)).astype(int)
    assert np.abs(levels - ARRAYS["sample0_last_uint8"]).max() <= 1
    assert (ARRAYS["vq_encoded"] != ARRAYS["vq_encoded_without_norm"]).sum() == 11  # transformers omits the norm


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
    from lantern_rt.subjects.text import Text
    from lantern_rt.text.tokenizers import TemplateTokenizer, parse_tokenizer

    folder = copy_with_start_token(tmp_path / "janus") if adds_start else JANUS
    cases = [case for case in PROTOCOL["prompt_cases"] if case["caption"] and not case["system_prompt"]]
    assert {case["roles"][0] for case in cases} == {"User", "<|User|>"}
    assert len(cases) > 8
    for roles in ("User,Assistant", "<|User|>,<|Assistant|>"):
        model = read_janus(folder, roles=roles)
        condition = model.manifest_fields["condition"]
        tokenizer = TemplateTokenizer(parse_tokenizer(model.extra_files["tokenizer"][1]), condition.layout.template)
        role_cases = [case for case in cases if ",".join(case["roles"]) == roles]
        captions = [case["caption"] for case in role_cases]
        context = RequestContext(condition, tokenizer, Size(name="64x64", rows=4, columns=4), uses_guidance=True)
        for case, prompt in zip(role_cases, Text.read(captions, context), strict=True):
            ids = [prompt.prefix.cond.inputs[name][0].tolist() for name in ("token_ids", "uncond_ids")]
            assert ids == [case["prompt_ids"], case["unconditional_ids"]], case["caption"]


# ---------------------------------------------------------------- folders


def read_contents(bundle: Path) -> dict[str, Any]:
    """Return the contents of a bundle's files by name, and the manifest without provenance."""
    manifest = json.loads((bundle / "bundle.json").read_text())
    del manifest["provenance"]
    files = {path.name: path.read_bytes() for path in bundle.iterdir() if path.name != "bundle.json"}
    return files | {"manifest": manifest}


def test_bundles_of_both_layouts_differ_only_in_provenance(bundle: Path, converted_bundle: Path) -> None:
    assert read_contents(bundle) == read_contents(converted_bundle)


def copy_as_safetensors(folder: Path) -> Path:
    return copy_checkpoint(JANUS, folder, lambda weights: None)


def copy_as_saved_by_a_trainer(folder: Path) -> Path:
    """Copy the checkpoint as transformers 4 saves DeepSeek's class: no processor, more configuration fields."""
    more_fields = {"head_dim": 10, "_attn_implementation_autoset": True}
    copy_checkpoint(JANUS, folder, lambda weights: None, lambda config: config["language_config"].update(more_fields))
    (folder / "processor_config.json").unlink()
    return folder


def copy_transformers_layout(folder: Path) -> Path:
    return copy_checkpoint(JANUS_CONVERTED, folder)


def make_shard_copier(ending: str) -> Any:
    """Return a function that copies the checkpoint to a folder as shards with a file name extension."""
    return lambda folder: copy_as_shards(JANUS, folder, ending)


@pytest.mark.parametrize(
    "make_checkpoint",
    [
        copy_as_safetensors,
        copy_as_saved_by_a_trainer,
        make_shard_copier("bin"),
        make_shard_copier("safetensors"),
        copy_transformers_layout,
    ],
    ids=["safetensors", "trainer", "PyTorch shards", "safetensors shards", "transformers"],
)
def test_every_layout_of_weights_gives_the_same_bundle(
    bundle: Path, tmp_path: Path, make_checkpoint: Any, program: Any
) -> None:
    folder = make_checkpoint(tmp_path / "janus")
    exit_code, _, err = program("export", "--target", folder, "--output", tmp_path / "bundle")
    assert exit_code == 0, err
    contents = read_contents(tmp_path / "bundle")
    expected = read_contents(bundle)
    assert contents["manifest"].pop("name") != expected["manifest"].pop("name")
    assert contents == expected


@pytest.mark.parametrize("precision", ["fp16", "bf16-safe", "int8", "int8-weights", "int4-weights"])
def test_bundles_of_every_precision_pass_verification(tmp_path: Path, precision: str, program: Any) -> None:
    options = ("--precision", precision, "--output", tmp_path / "bundle")
    exit_code, _, err = program("export", "--target", JANUS, *options)
    assert exit_code == 0, err
    exit_code, out, err = program("verify", tmp_path / "bundle", JANUS)
    assert exit_code == 0, out + err


def test_weights_for_image_understanding_are_not_read(tmp_path: Path) -> None:
    def replace_by_nan(weights: dict[str, torch.Tensor]) -> None:
        for name in weights:
            if name.startswith(("vision_model.", "aligner.", "language_model.lm_head")):
                weights[name] = torch.full_like(weights[name], torch.nan)  # NaN is rejected where it is read

    read_janus(copy_checkpoint(JANUS, tmp_path / "janus", replace_by_nan))


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
