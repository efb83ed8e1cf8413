"""NAR's exported graphs and images compared with every recorded array and run of the published program."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from family_readers import read_nar
from goldens import DATA, Arrays, assert_close, load_golden
from numpy.typing import NDArray
from onnx import numpy_helper
from shared_goldens import (
    check_logits,
    compute_logits,
    get_group_layout,
    list_residual_names,
    run_whole_sequence,
    sample_recorded_codes,
)

from lantern_rt import CheckpointError, Pipeline
from lantern_rt.export.families.nar import make_diagonal_order
from lantern_rt.export.registry import read_family_checkpoints
from lantern_rt.export.writer import export_model
from lantern_rt.methods import Sampling
from lantern_rt.runtime.sampling import compute_distribution

TRACES: list[dict[str, Any]] = json.loads((DATA / "nar" / "traces.json").read_text())
GREEDY = [trace for trace in TRACES if not trace["sample"]]
GRIDS = {"c2i": (4, 6, 8), "t2i": (4, 6)}
CASES = [(model, grid) for model, grids in GRIDS.items() for grid in grids]
PREFIX_LENGTHS = {"c2i": 1, "t2i": 8}
HEADS = ["hidden_states", "states_below", "logits"]  # graph outputs; `logits` are of the right and the lower cell


def get_name(trace: dict[str, Any]) -> str:
    return str(trace["name"])


def checkpoint_path(model: str) -> Path:
    return DATA / "nar" / model / f"nar_{model}.pt"


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    return load_golden("nar")


@pytest.fixture(scope="module")
def pipes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Pipeline]:
    """Return a pipeline for each model and grid size, exported with the small image tokenizer of LlamaGen."""
    folder = tmp_path_factory.mktemp("nar")
    pipelines = {}
    for model, grid in CASES:
        config = json.loads(checkpoint_path(model).with_name("config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "block_size": grid**2}))
        contents = read_nar(checkpoint_path(model), DATA / "llamagen-vq/vq_tiny.pt", config=folder / "config.json")
        pipelines[model, grid] = Pipeline.from_bundle(export_model(contents, folder / f"{model}-{grid}"), threads=1)
    return pipelines


def list_prompts(trace: dict[str, Any], arrays: Arrays) -> list[dict[str, Any]]:
    """Return the prompt of each image of a recorded run, as arguments of the pipeline."""
    if "class_ids" in trace:
        return [{"class_ids": class_id} for class_id in trace["class_ids"]]
    return [make_caption_prompt([caption], arrays, trace["text_mask"]) for caption in trace["captions"]]


def make_caption_prompt(rows: list[int], arrays: Arrays, masked: bool = True) -> dict[str, Any]:
    """Return recorded captions as an argument of the pipeline."""
    if masked:
        return {"embeddings": (arrays["t2i_t5_embeddings"][rows], arrays["t2i_t5_mask"][rows])}
    return {"embeddings": (arrays["t2i_caption_emb"][rows], np.ones_like(arrays["t2i_emb_mask"][rows]))}


def merge_prompts(prompts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the arguments of the pipeline for a batch of prompts."""
    if "class_ids" in prompts[0]:
        return {"class_ids": [prompt["class_ids"] for prompt in prompts]}
    return {"embeddings": tuple(map(np.concatenate, zip(*(prompt["embeddings"] for prompt in prompts), strict=True)))}


def sort_by_cell(pipe: Pipeline, values: NDArray[Any]) -> NDArray[Any]:
    """Sort values `[..., codes, size]` by cell in raster order, instead of by order of generation."""
    return values[..., np.argsort(get_group_layout(pipe).cells), :]


@pytest.mark.parametrize(("model", "grid"), [*CASES, ("c2i", 16), ("t2i", 32)])
def test_cells_are_generated_in_the_published_order(arrays: Arrays, model: str, grid: int) -> None:
    groups = make_diagonal_order(grid).groups
    assert len(groups) == 2 * grid - 1
    cells = [cell for group in groups for cell in group]
    assert cells == arrays[f"{model}_g{grid}_order"].tolist()
    passes = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    np.testing.assert_array_equal(passes[np.argsort(cells)], arrays[f"{model}_g{grid}_pass"])


@pytest.mark.parametrize(("model", "grid"), CASES)
def test_attention_mask_and_rotary_table_equal_the_recordings(
    pipes: dict[tuple[str, int], Pipeline], arrays: Arrays, model: str, grid: int
) -> None:
    pipe = pipes[model, grid]
    prefix = PREFIX_LENGTHS[model]
    order = get_group_layout(pipe)
    code_pass = order.lay_out_groups(range(1, len(order.groups)), np.arange(grid**2))
    raster_order = np.argsort(code_pass.positions)
    assert code_pass.positions[raster_order].tolist() == [
        *range(grid**2 - 1)
    ]  # the token of the last cell is never an input
    assert code_pass.tokens.tolist() == [*range(grid**2 - 1)]  # numbers in the order of generation
    mask_among_cells = code_pass.ancestor_mask[raster_order][:, raster_order]
    if model == "c2i":
        recorded = arrays[f"c2i_g{grid}_mask"]
        np.testing.assert_array_equal(mask_among_cells, recorded[1:, 1:-1])
        assert (recorded[:, 0] == 1).all()
    elif grid == 4:
        for i, recorded in enumerate(arrays["t2i_run0_mask"]):
            np.testing.assert_array_equal(mask_among_cells, recorded[prefix:, prefix:-1])
            is_real_token = arrays["t2i_emb_mask"][i].astype(bool)
            assert (recorded[prefix:, :prefix] == is_real_token).all()
    graph = onnx.load(pipe.bundle.path("target")).graph
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    table = np.stack([weights["rotary.cos"][:, ::2], weights["rotary.sin"][:, 1::2]], -1)
    assert_close(table[: prefix + grid**2], arrays[f"{model}_g{grid}_rope"], 1e-6)


@pytest.mark.parametrize(("model", "grid"), [("c2i", 6), ("t2i", 4)])
def test_a_pass_over_an_image_gives_the_recorded_values(
    pipes: dict[tuple[str, int], Pipeline], arrays: Arrays, model: str, grid: int
) -> None:
    pipe = pipes[model, grid]
    prefix = PREFIX_LENGTHS[model]
    cells = get_group_layout(pipe).cells
    prompt = {"class_ids": int(arrays["c2i_tf_class_ids"][0])} if model == "c2i" else make_caption_prompt([0], arrays)
    tokens = arrays[f"{model}_tf_tokens"][cells]
    assert_close(sort_by_cell(pipe, compute_logits(pipe, tokens, **prompt)), arrays[f"{model}_tf_logits"])
    names = list_residual_names(pipe.bundle.folder)[2::2]
    embeds, *layers, right, below, logits = run_whole_sequence(pipe, tokens, [*names, *HEADS], **prompt)
    recorded_indices = np.array([*range(prefix), *(prefix + cells[:-1])])  # recorded in raster order
    is_real_token = arrays["t2i_emb_mask"][0].astype(bool) if model == "t2i" else np.ones(prefix, bool)
    is_compared = np.array(
        [*is_real_token, *[True] * (grid**2 - 1)]
    )  # padding, to which no position attends, may differ

    def compare(values: NDArray[np.float32], name: str) -> None:
        recorded = arrays[f"{model}_tf_{name}"]
        assert_close(values[:, is_compared], recorded[:, recorded_indices[is_compared]])

    compare(np.stack([embeds[0], *(layer[:, 0] for layer in layers)]), "layer_hidden")
    compare(right[:1], "right_hidden")
    compare(below[:1], "below_hidden")
    compare(logits[:1, :, :128], "right_logits")
    compare(logits[:1, :, 128:], "below_logits")


@pytest.mark.parametrize("model", GRIDS)
def test_the_first_run_has_the_recorded_inputs_cache_and_logits(
    pipes: dict[tuple[str, int], Pipeline], arrays: Arrays, model: str
) -> None:
    trace = next(trace for trace in TRACES if (trace["model"], trace["grid"]) == (model, 4))
    pipe = pipes[model, 4]
    prefix = PREFIX_LENGTHS[model]
    cells = get_group_layout(pipe).cells
    layers = pipe.bundle.manifest.target.num_layers
    names = [f"new_key_values.{i}.{part}" for part in ("key", "value") for i in range(layers)]
    codes = np.array(trace["raster"][0])[cells]
    embeds, *cache, logits = run_whole_sequence(pipe, codes, [*names, "logits"], **list_prompts(trace, arrays)[0])
    recorded_indices = np.array([*range(prefix), *(prefix + cells[:-1])])
    is_real_token = (
        arrays["t2i_emb_mask"][trace["captions"][0]].astype(bool) if model == "t2i" else np.ones(prefix, bool)
    )
    is_compared = np.array([*is_real_token, *[True] * (len(recorded_indices) - prefix)])
    assert_close(embeds[:, is_compared], arrays[f"{model}_g4_inputs"][:, recorded_indices[is_compared]])
    for part, tensors in zip(("keys", "values"), (cache[:layers], cache[layers:]), strict=True):
        entries = np.stack(tensors).transpose(0, 2, 3, 1, 4)  # [layer, row, head, position, width]
        assert_close(entries[..., is_compared, :], arrays[f"{model}_g4_{part}"][..., recorded_indices[is_compared], :])
    for head, name in enumerate(("right", "below")):
        head_logits = logits[:, prefix - 1 :, 128 * head : 128 * (head + 1)]
        assert_close(head_logits, arrays[f"{model}_run0_{name}_logits"][:, [0, *(1 + cells[:-1])]])


@pytest.mark.parametrize("trace", TRACES, ids=get_name)
def test_logits_of_a_run_lead_to_the_recorded_tokens(
    pipes: dict[tuple[str, int], Pipeline], arrays: Arrays, trace: dict[str, Any]
) -> None:
    name = trace["name"]
    pipe = pipes[trace["model"], trace["grid"]]
    cells = get_group_layout(pipe).cells
    for i, (prompt, raster) in enumerate(zip(list_prompts(trace, arrays), trace["raster"], strict=True)):
        codes = np.array(raster)[cells]
        row_logits = sort_by_cell(pipe, compute_logits(pipe, codes, **prompt))
        guided_logits = check_logits(name, i, trace, row_logits, arrays)
        assert sample_recorded_codes(guided_logits[cells], i, trace) == codes.tolist()


@pytest.mark.parametrize("trace", GREEDY, ids=get_name)
def test_greedy_images_alone_and_batched_equal_the_recordings(
    pipes: dict[tuple[str, int], Pipeline], arrays: Arrays, trace: dict[str, Any]
) -> None:
    count = sum(trace.get("guided", []))
    options: dict[str, Any] = {"cfg_scale": trace["cfg"], "temperature": 0, "cfg_tokens": count or None, "top_k": 0}
    generate = partial(pipes[trace["model"], trace["grid"]], **options)
    prompts = list_prompts(trace, arrays)
    result = generate(**merge_prompts(prompts))
    assert [codes.tolist() for codes in result.codes] == trace["raster"]
    larger_batch = generate(**merge_prompts([prompts[-1], *prompts, prompts[0]]), method="groups")
    assert [codes.tolist() for codes in larger_batch.codes[1:-1]] == trace["raster"]
    for prompt, raster in zip(prompts, trace["raster"], strict=True):
        single_result = generate(**prompt, method="ar")
        assert single_result.codes[0].tolist() == raster
        assert single_result.stats.target_passes == 2 * trace["grid"] - 1


def test_filtered_probabilities_equal_the_recorded_probabilities(arrays: Arrays) -> None:
    for (temperature, top_k, top_p), expected in zip(arrays["filter_params"], arrays["filter_probs"], strict=True):
        sampling = Sampling(temperature=float(temperature), top_k=int(top_k), top_p=float(top_p))
        distribution = compute_distribution(arrays["filter_logits"], sampling)
        np.testing.assert_allclose(distribution, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", ["int8", "int4-weights", "fp16 --compute float16", "bf16 --compute bfloat16"])
def test_rounded_nar_bundles_pass_verify_and_batch_alike(program: Any, options: str) -> None:
    files = [checkpoint_path("c2i"), DATA / "llamagen-vq/vq_tiny.pt", checkpoint_path("c2i").with_name("config.json")]
    options_and_files = zip(("--target", "--vq", "--config"), files, strict=True)
    arguments = [part for pair in options_and_files for part in pair]
    code, _, err = program("export", "--family", "nar", *arguments, "--precision", *options.split(), "--output", "nar")
    assert code == 0, err
    code, out, _ = program("verify", "nar", *files)
    assert (code, out.strip().endswith("passed")) == (0, True)
    pipe = Pipeline.from_bundle(Path("nar"), threads=1)
    batch_result = pipe(class_ids=[3, 5, 3], seed=[1, 2, 3])
    assert batch_result.codes[1].tolist() == pipe(class_ids=5, seed=2).codes[0].tolist()


# ---------------------------------------------------------------- rejected checkpoints


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "grid: the weights do not show the grid of codes"),
        ({"grid": 65}, "grid: found 65 x 65 codes, expected at most 64 rows"),
        ({"target": DATA / "llamagen-c2i/c2i_tiny.pt", "grid": 4}, "output.weight: missing weight"),
        ({"config": {"n_head": 2, "n_layer": 3}, "grid": 4}, "n_layer: found 3, expected 2"),
        ({"config": {"n_head": 2, "medusa_attention_num": 2}, "grid": 4}, "medusa_attention_num: found 2, expected 1"),
        ({"config": {"n_head": 2, "medusa_heads": 1}, "grid": 4}, "medusa_heads: unknown field"),
    ],
)
def test_the_error_of_an_invalid_nar_checkpoint_is_one_line(
    tmp_path: Path, fields: dict[str, Any], expected: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields.get("config", {"n_head": 2})))
    options = {"target": checkpoint_path("c2i"), "vq": DATA / "llamagen-vq/vq_tiny.pt", **fields}
    with pytest.raises(CheckpointError) as caught:
        read_family_checkpoints("nar", {**options, "config": tmp_path / "config.json"})
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_nar_checkpoint_is_rejected_as_llamagen(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"n_head": 2}')
    options = {"target": checkpoint_path("c2i"), "vq": DATA / "llamagen-vq/vq_tiny.pt", "grid": 4}
    with pytest.raises(CheckpointError, match="unexpected: medusa_norm"):
        read_family_checkpoints("llamagen", {**options, "config": tmp_path / "config.json"})


def test_a_training_checkpoint_with_pickled_code_is_rejected(tmp_path: Path) -> None:
    content = torch.load(checkpoint_path("c2i"), weights_only=True)
    torch.save({**content, "scheduler": print}, tmp_path / "nar.pt")
    with pytest.raises(CheckpointError, match="holds more than tensors") as caught:
        read_nar(tmp_path / "nar.pt", DATA / "llamagen-vq/vq_tiny.pt", grid=4)
    assert "\n" not in str(caught.value)
