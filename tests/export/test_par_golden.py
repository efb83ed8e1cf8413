"""PAR's exported graphs and images compared with every recorded array and run of the published program."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from family_readers import read_par
from goldens import DATA, Arrays, assert_close, load_golden
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
from lantern_rt.export.families.par import make_parallel_order
from lantern_rt.export.registry import read_family_checkpoints
from lantern_rt.export.writer import export_model
from lantern_rt.methods import Sampling
from lantern_rt.runtime.sampling import compute_distribution

TRACES: list[dict[str, Any]] = json.loads((DATA / "par" / "traces.json").read_text())
# Some recorded runs stop guidance and later resume guidance, which no request can do. Only their logits are compared.
REQUESTABLE = [trace for trace in TRACES if sorted(trace.get("guided", []), reverse=True) == trace.get("guided", [])]
GREEDY = [trace for trace in REQUESTABLE if not trace["sample"]]
GRIDS = {"4x": (4, 6, 8), "16x": (8, 12)}
CASES = [(model, grid) for model, grids in GRIDS.items() for grid in grids]
LAYERS = 2


def get_name(trace: dict[str, Any]) -> str:
    return str(trace["name"])


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    return load_golden("par")


@pytest.fixture(scope="module")
def pipes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Pipeline]:
    """Return a pipeline for each model and grid size; the image tokenizer is cut to the model's number of codes."""
    folder = tmp_path_factory.mktemp("par")
    pipelines = {}
    for model, grid in CASES:
        config = json.loads((DATA / "par" / model / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "block_size": grid**2}))
        vq = torch.load(DATA / "llamagen-vq" / "vq_tiny.pt", weights_only=True)
        vq["model"]["quantize.embedding.weight"] = vq["model"]["quantize.embedding.weight"][: config["vocab_size"]]
        torch.save(vq, folder / "vq.pt")
        target = DATA / "par" / model / f"par_{model}.pt"
        contents = read_par(target, folder / "vq.pt", config=folder / "config.json")
        pipelines[model, grid] = Pipeline.from_bundle(export_model(contents, folder / f"{model}-{grid}"), threads=1)
    return pipelines


@pytest.mark.parametrize(("model", "grid"), [*CASES, ("4x", 24), ("16x", 24)])
def test_cells_are_generated_in_the_published_order(arrays: Arrays, model: str, grid: int) -> None:
    spec = make_parallel_order(grid, 4 if model == "4x" else 16)
    assert spec is not None
    row, column = arrays[f"{model}_g{grid}_order"].T
    assert [cell for group in spec.groups for cell in group] == (row * grid + column).tolist()
    passes = np.repeat(np.arange(len(spec.groups)), [len(group) for group in spec.groups])
    np.testing.assert_array_equal(passes, arrays[f"{model}_g{grid}_pass"])
    if grid == 24:
        assert len(spec.groups) == {"4x": 147, "16x": 51}[model]


@pytest.mark.parametrize(("model", "grid"), CASES)
def test_inputs_mask_and_rotary_positions_equal_the_recordings(
    pipes: dict[tuple[str, int], Pipeline], arrays: Arrays, model: str, grid: int
) -> None:
    pipe = pipes[model, grid]
    order = get_group_layout(pipe)
    cells = grid**2
    code_pass = order.lay_out_groups(range(1, len(order.groups)), np.arange(cells))
    recorded_inputs = arrays[f"{model}_g{grid}_fed"]
    inputs = np.where(code_pass.positions == cells, order.first_learned_token - 2 - code_pass.tokens, code_pass.tokens)
    np.testing.assert_array_equal(inputs, recorded_inputs[1:])
    np.testing.assert_array_equal(code_pass.ancestor_mask, arrays[f"{model}_g{grid}_mask"][1:, 1:])
    assert (arrays[f"{model}_g{grid}_mask"][:, 0] == 1).all()
    graph = onnx.load(pipe.bundle.path("target")).graph
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    table = np.stack([weights["rotary.cos"][:, ::2], weights["rotary.sin"][:, 1::2]], -1)
    assert_close(table[[0, *(1 + code_pass.positions)]], arrays[f"{model}_g{grid}_rope"][:cells], 1e-6)


@pytest.mark.parametrize("model", GRIDS)
def test_a_pass_over_an_image_gives_the_recorded_outputs(
    pipes: dict[tuple[str, int], Pipeline], arrays: Arrays, model: str
) -> None:
    grid = {"4x": 6, "16x": 8}[model]
    tokens = arrays[f"{model}_tf_tokens"]
    logits = arrays[f"{model}_tf_logits"]
    pipe = pipes[model, grid]
    class_id = int(arrays[f"{model}_tf_class_ids"][0])
    assert_close(compute_logits(pipe, tokens, class_ids=class_id), logits[:, : grid**2])
    names = list_residual_names(pipe.bundle.folder)
    embeds, *layers, last_hidden = run_whole_sequence(
        pipe, tokens, [*names[2:-1:2], "hidden_states"], class_ids=class_id
    )
    rows = [embeds, *(layer.swapaxes(0, 1) for layer in layers), last_hidden]
    assert_close(np.concatenate([row[:1] for row in rows]), arrays[f"{model}_tf_layer_hidden"][:, : grid**2])


@pytest.mark.parametrize("name", ["4x_g4", "16x_g8"])
def test_the_first_run_has_the_recorded_inputs_and_cache(
    pipes: dict[tuple[str, int], Pipeline], arrays: Arrays, name: str
) -> None:
    model, _, grid = name.partition("_g")
    trace = next(trace for trace in TRACES if (trace["model"], trace["grid"]) == (model, int(grid)))
    names = [f"new_key_values.{i}.{part}" for part in ("key", "value") for i in range(LAYERS)]
    embeds, *cache = run_whole_sequence(
        pipes[model, int(grid)], trace["ids"][0], names, class_ids=trace["class_ids"][0]
    )
    assert_close(embeds, arrays[f"{name}_inputs"])
    for part, tensors in zip(("keys", "values"), (cache[:LAYERS], cache[LAYERS:]), strict=True):
        assert_close(
            np.stack(tensors).transpose(0, 2, 3, 1, 4), arrays[f"{name}_{part}"]
        )  # [layer, row, head, position, width]


@pytest.mark.parametrize("trace", TRACES, ids=get_name)
def test_logits_of_a_run_lead_to_the_recorded_tokens(
    pipes: dict[tuple[str, int], Pipeline], arrays: Arrays, trace: dict[str, Any]
) -> None:
    name = trace["name"]
    pipe = pipes[trace["model"], trace["grid"]]
    cells = get_group_layout(pipe).cells
    for i, (class_id, ids) in enumerate(zip(trace["class_ids"], trace["ids"], strict=True)):
        guided_logits = check_logits(name, i, trace, compute_logits(pipe, ids, class_ids=class_id), arrays)
        assert sample_recorded_codes(guided_logits, i, trace) == ids
        raster = np.zeros(len(ids), np.int64)
        raster[cells] = ids
        assert raster.tolist() == trace["raster"][i]


@pytest.mark.parametrize("trace", GREEDY, ids=get_name)
def test_greedy_images_alone_and_batched_equal_the_recordings(
    pipes: dict[tuple[str, int], Pipeline], trace: dict[str, Any]
) -> None:
    count = sum(trace.get("guided", []))
    options: dict[str, Any] = {"cfg_scale": trace["cfg"], "temperature": 0, "cfg_tokens": count or None}
    generate = partial(pipes[trace["model"], trace["grid"]], **options)
    result = generate(class_ids=trace["class_ids"])
    assert [codes.tolist() for codes in result.codes] == trace["raster"]
    larger_batch = generate(class_ids=[*trace["class_ids"], 0, 6, 2], method="groups")
    assert [codes.tolist() for codes in larger_batch.codes[: len(trace["raster"])]] == trace["raster"]
    for class_id, raster in zip(trace["class_ids"], trace["raster"], strict=True):
        single_result = generate(class_ids=class_id, method="ar")
        assert single_result.codes[0].tolist() == raster
        groups = get_group_layout(pipes[trace["model"], trace["grid"]]).groups
        assert single_result.stats.target_passes == len(groups)


def test_filtered_probabilities_equal_the_recorded_probabilities(arrays: Arrays) -> None:
    for (temperature, top_k, top_p), expected in zip(arrays["filter_params"], arrays["filter_probs"], strict=True):
        sampling = Sampling(temperature=float(temperature), top_k=int(top_k), top_p=float(top_p))
        distribution = compute_distribution(arrays["filter_logits"], sampling)
        np.testing.assert_allclose(distribution, expected, rtol=0, atol=1e-5)


# ---------------------------------------------------------------- rejected checkpoints


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"grid": 5}, "grid: found 5 x 5 codes, expected a larger grid that divides into 4 regions"),
        ({"grid": 2}, "grid: found 2 x 2 codes, expected a larger grid"),
        ({}, "grid: the weights do not show the grid of codes"),
        ({"target": DATA / "llamagen-c2i/c2i_tiny.pt", "grid": 4}, "spe_tok_embeddings.special_embeddings.weight"),
        ({"config": {"n_head": 4, "ar_token_num": 16}, "grid": 4}, "ar_token_num: found 16, expected 4"),
        ({"config": {"n_head": 4, "spe_token_num": 15}, "grid": 4}, "spe_token_num: found 15, expected 3"),
        ({"config": {"n_head": 4, "par": 1}, "grid": 4}, "par: unknown field"),
    ],
)
def test_the_error_of_an_invalid_par_checkpoint_is_one_line(
    tmp_path: Path, fields: dict[str, Any], expected: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields.get("config", {"n_head": 4})))
    options = {"target": DATA / "par/4x/par_4x.pt", "vq": DATA / "llamagen-vq/vq_tiny.pt", **fields}
    with pytest.raises(CheckpointError) as caught:
        read_family_checkpoints("par", {**options, "config": tmp_path / "config.json"})
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_par_checkpoint_is_rejected_as_llamagen(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"n_head": 4}')
    options = {"target": DATA / "par/4x/par_4x.pt", "vq": DATA / "llamagen-vq/vq_tiny.pt", "grid": 4}
    with pytest.raises(CheckpointError, match="unexpected: spe_tok_embeddings"):
        read_family_checkpoints("llamagen", {**options, "config": tmp_path / "config.json"})


def test_a_training_checkpoint_with_pickled_code_is_rejected(tmp_path: Path) -> None:
    content = torch.load(DATA / "par/4x/par_4x.pt", weights_only=True)
    torch.save({**content, "scheduler": print}, tmp_path / "par.pt")
    (tmp_path / "config.json").write_text('{"n_head": 4}')
    with pytest.raises(CheckpointError, match="holds more than tensors") as caught:
        read_par(tmp_path / "par.pt", DATA / "llamagen-vq/vq_tiny.pt", grid=4)
    assert "\n" not in str(caught.value)
