"""NAR's and PAR's exported graphs and images compared with every recorded array and run of the published programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from checkpoint_copies import VQ, copy_json
from family_readers import read_nar, read_par
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

from lantern_rt import Pipeline
from lantern_rt.bundle.order import GroupOrderSpec
from lantern_rt.export.families.nar import make_diagonal_order
from lantern_rt.export.families.par import make_parallel_order
from lantern_rt.export.writer import export_model

Trace = dict[str, Any]


@dataclass(frozen=True)
class GroupFamily:
    """A model family that generates groups of cells, and its recordings.

    Attributes:
        grids: sizes of the recorded grids by model.
        in_raster_order: whether arrays are recorded in raster order; otherwise in order of generation.
    """

    name: str
    read: Callable[..., Any]
    grids: dict[str, tuple[int, ...]]
    in_raster_order: bool

    @cached_property
    def arrays(self) -> Arrays:
        return load_golden(self.name)

    @cached_property
    def traces(self) -> list[Trace]:
        traces: list[Trace] = json.loads((DATA / self.name / "traces.json").read_text())
        return traces


NAR = GroupFamily("nar", read_nar, {"c2i": (4, 6, 8), "t2i": (4, 6)}, in_raster_order=True)
PAR = GroupFamily("par", read_par, {"4x": (4, 6, 8), "16x": (8, 12)}, in_raster_order=False)
CASES = [(family, model, grid) for family in (NAR, PAR) for model, grids in family.grids.items() for grid in grids]
RUNS = [(family, trace) for family in (NAR, PAR) for trace in family.traces]


def is_requestable(trace: Trace) -> bool:
    """Return whether a request can have the guidance of a run; some runs stop guidance and later resume it."""
    guided = trace.get("guided", [])
    return sorted(guided, reverse=True) == guided


GREEDY = [(family, trace) for family, trace in RUNS if not trace["sample"] and is_requestable(trace)]


def get_id(value: Any) -> str | None:
    return str(value["name"]) if isinstance(value, dict) else getattr(value, "name", None)


@pytest.fixture(scope="module")
def open_pipe(export_once: Any) -> Callable[[GroupFamily, str, int], Pipeline]:
    """Return a function that opens a model's pipeline; the image tokenizer is cut to the model's number of codes."""
    pipelines: dict[tuple[str, str, int], Pipeline] = {}

    def export(family: GroupFamily, model: str, grid: int, output: Path) -> Path:
        folder = DATA / family.name / model
        config = copy_json(folder / "config.json", output.parent / "config.json", block_size=grid**2)
        vq = torch.load(VQ, weights_only=True)
        codes = json.loads(config.read_text())["vocab_size"]
        vq["model"]["quantize.embedding.weight"] = vq["model"]["quantize.embedding.weight"][:codes]
        torch.save(vq, output.parent / "vq.pt")
        contents = family.read(folder / f"{family.name}_{model}.pt", output.parent / "vq.pt", config=config)
        return export_model(contents, output)

    def open_pipe(family: GroupFamily, model: str, grid: int) -> Pipeline:
        key = family.name, model, grid
        if key not in pipelines:
            bundle = export_once(f"{family.name}_{model}_{grid}/bundle", partial(export, family, model, grid))
            pipelines[key] = Pipeline.from_bundle(bundle, threads=1)
        return pipelines[key]

    return open_pipe


OpenPipe = Callable[[GroupFamily, str, int], Pipeline]


def list_prompts(family: GroupFamily, trace: Trace) -> list[dict[str, Any]]:
    """Return the prompt of each image of a recorded run, as arguments of the pipeline."""
    if "class_ids" in trace:
        return [{"class_ids": class_id} for class_id in trace["class_ids"]]
    return [make_caption_prompt(family.arrays, caption, trace["text_mask"]) for caption in trace["captions"]]


def make_caption_prompt(arrays: Arrays, row: int, masked: bool = True) -> dict[str, Any]:
    """Return a recorded caption as an argument of the pipeline; without a mask, recorded padding counts as text."""
    if masked:
        return {"embeddings": (arrays["t2i_t5_embeddings"][[row]], arrays["t2i_t5_mask"][[row]])}
    return {"embeddings": (arrays["t2i_caption_emb"][[row]], np.ones_like(arrays["t2i_emb_mask"][[row]]))}


def merge_prompts(prompts: list[dict[str, Any]]) -> dict[str, Any]:
    if "class_ids" in prompts[0]:
        return {"class_ids": [prompt["class_ids"] for prompt in prompts]}
    return {"embeddings": tuple(map(np.concatenate, zip(*(prompt["embeddings"] for prompt in prompts), strict=True)))}


def sort_as_recorded(family: GroupFamily, pipe: Pipeline, values: NDArray[Any]) -> NDArray[Any]:
    """Sort values `[..., codes, size]` in order of generation as the family's arrays are recorded."""
    return values[..., np.argsort(get_group_layout(pipe).generation_order), :] if family.in_raster_order else values


def find_recorded_positions(family: GroupFamily, pipe: Pipeline, prefix: int) -> NDArray[np.int64]:
    """Return the index in recorded arrays of each position of a whole sequence, `[prefix + codes - 1]`."""
    cells = get_group_layout(pipe).generation_order
    return np.array([*range(prefix), *(prefix + (cells if family.in_raster_order else np.arange(len(cells)))[:-1])])


def list_compared_positions(family: GroupFamily, model: str, nodes: int, caption: int) -> NDArray[np.bool_]:
    """Return true at positions that are not padding: no position attends to padding, so padding may differ."""
    mask = family.arrays["t2i_emb_mask"][caption].astype(bool) if model == "t2i" else np.ones(1, bool)
    return np.concatenate([mask, np.ones(nodes - len(mask), bool)])


def read_rotary_table(pipe: Pipeline) -> NDArray[np.float32]:
    graph = onnx.load(pipe.bundle.path("target")).graph
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    return np.stack([weights["rotary.cos"][:, ::2], weights["rotary.sin"][:, 1::2]], -1)


@pytest.mark.parametrize(
    ("family", "model", "grid", "num_groups"),
    [
        *((family, model, grid, None) for family, model, grid in CASES),
        (NAR, "c2i", 16, 31),
        (NAR, "t2i", 32, 63),
        (PAR, "4x", 24, 147),
        (PAR, "16x", 24, 51),
    ],
    ids=get_id,
)
def test_cells_are_generated_in_the_published_order(
    family: GroupFamily, model: str, grid: int, num_groups: int | None
) -> None:
    spec: GroupOrderSpec | None = make_diagonal_order(grid)
    if family is PAR:
        spec = make_parallel_order(grid, 4 if model == "4x" else 16)
    assert spec is not None
    assert len(spec.groups) == (num_groups or len(spec.groups))
    cells = np.array([cell for group in spec.groups for cell in group])
    passes = np.repeat(np.arange(len(spec.groups)), [len(group) for group in spec.groups])
    recorded = family.arrays[f"{model}_g{grid}_order"]
    assert cells.tolist() == (recorded if family is NAR else recorded @ [grid, 1]).tolist()
    np.testing.assert_array_equal(
        passes[np.argsort(cells)] if family.in_raster_order else passes, family.arrays[f"{model}_g{grid}_pass"]
    )


@pytest.mark.parametrize(("family", "model", "grid"), [case for case in CASES if case[0] is NAR], ids=get_id)
def test_nars_attention_mask_and_rotary_table_are_recorded(
    open_pipe: OpenPipe, family: GroupFamily, model: str, grid: int
) -> None:
    pipe = open_pipe(family, model, grid)
    arrays = family.arrays
    prefix = {"c2i": 1, "t2i": 8}[model]
    order = get_group_layout(pipe)
    code_pass = order.lay_out_groups(range(1, len(order.groups)), np.arange(grid**2))
    raster_order = np.argsort(code_pass.positions)
    # The token of the last cell is never an input.
    assert code_pass.positions[raster_order].tolist() == [*range(grid**2 - 1)]
    assert code_pass.tokens.tolist() == [*range(grid**2 - 1)]  # numbers in the order of generation
    mask_among_cells = code_pass.ancestor_mask[raster_order][:, raster_order]
    if model == "c2i":
        recorded = arrays[f"c2i_g{grid}_mask"]
        np.testing.assert_array_equal(mask_among_cells, recorded[1:, 1:-1])
        assert (recorded[:, 0] == 1).all()
    elif grid == 4:
        for i, recorded in enumerate(arrays["t2i_run0_mask"]):
            np.testing.assert_array_equal(mask_among_cells, recorded[prefix:, prefix:-1])
            assert (recorded[prefix:, :prefix] == arrays["t2i_emb_mask"][i].astype(bool)).all()
    assert_close(read_rotary_table(pipe)[: prefix + grid**2], arrays[f"{model}_g{grid}_rope"], 1e-6)


@pytest.mark.parametrize(("family", "model", "grid"), [case for case in CASES if case[0] is PAR], ids=get_id)
def test_pars_inputs_mask_and_rotary_positions_are_recorded(
    open_pipe: OpenPipe, family: GroupFamily, model: str, grid: int
) -> None:
    pipe = open_pipe(family, model, grid)
    arrays = family.arrays
    order = get_group_layout(pipe)
    cells = grid**2
    code_pass = order.lay_out_groups(range(1, len(order.groups)), np.arange(cells))
    inputs = np.where(code_pass.positions == cells, order.first_learned_token - 2 - code_pass.tokens, code_pass.tokens)
    np.testing.assert_array_equal(inputs, arrays[f"{model}_g{grid}_fed"][1:])
    np.testing.assert_array_equal(code_pass.ancestor_mask, arrays[f"{model}_g{grid}_mask"][1:, 1:])
    assert (arrays[f"{model}_g{grid}_mask"][:, 0] == 1).all()
    table = read_rotary_table(pipe)[[0, *(1 + code_pass.positions)]]
    assert_close(table, arrays[f"{model}_g{grid}_rope"][:cells], 1e-6)


@pytest.mark.parametrize(
    ("family", "model", "grid"), [(NAR, "c2i", 6), (NAR, "t2i", 4), (PAR, "4x", 6), (PAR, "16x", 8)], ids=get_id
)
def test_a_pass_over_an_image_gives_the_recorded_outputs(
    open_pipe: OpenPipe, family: GroupFamily, model: str, grid: int
) -> None:
    pipe = open_pipe(family, model, grid)
    arrays = family.arrays
    if model == "t2i":
        prompt = make_caption_prompt(arrays, 0)
    else:
        prompt = {"class_ids": int(arrays[f"{model}_tf_class_ids"][0])}
    tokens = arrays[f"{model}_tf_tokens"]
    if family.in_raster_order:
        tokens = tokens[get_group_layout(pipe).generation_order]
    logits = sort_as_recorded(family, pipe, compute_logits(pipe, tokens, **prompt))
    assert_close(logits, arrays[f"{model}_tf_logits"][:, : grid**2])
    residuals = list_residual_names(pipe.bundle.folder)
    # NAR's heads follow the last layer; PAR's recording of the last layer is normalized.
    names = residuals[2::2] if family is NAR else residuals[2:-1:2]
    outputs = ["hidden_states", *(("states_below", "logits") if family is NAR else ())]
    embeds, *values = run_whole_sequence(pipe, tokens, [*names, *outputs], **prompt)
    layers = [layer.swapaxes(0, 1)[:1] for layer in values[: len(names)]]
    right, *others = (value[:1] for value in values[len(names) :])
    nodes = embeds.shape[1]
    is_compared = list_compared_positions(family, model, nodes, 0)
    positions = find_recorded_positions(family, pipe, nodes - grid**2 + 1)[is_compared]

    def compare(computed: NDArray[np.float32], name: str) -> None:
        assert_close(computed[:, is_compared], arrays[f"{model}_tf_{name}"][:, positions])

    if family is PAR:
        compare(np.concatenate([embeds[:1], *layers, right]), "layer_hidden")
    else:
        below, head_logits = others
        compare(np.concatenate([embeds[:1], *layers]), "layer_hidden")
        compare(right, "right_hidden")
        compare(below, "below_hidden")
        compare(head_logits[..., :128], "right_logits")
        compare(head_logits[..., 128:], "below_logits")


@pytest.mark.parametrize(
    ("family", "model", "grid"), [(NAR, "c2i", 4), (NAR, "t2i", 4), (PAR, "4x", 4), (PAR, "16x", 8)], ids=get_id
)
def test_the_first_run_has_the_recorded_inputs_and_cache(
    open_pipe: OpenPipe, family: GroupFamily, model: str, grid: int
) -> None:
    trace = next(trace for trace in family.traces if (trace["model"], trace["grid"]) == (model, grid))
    pipe = open_pipe(family, model, grid)
    arrays = family.arrays
    cells = get_group_layout(pipe).generation_order
    layers = pipe.bundle.manifest.target.num_layers
    names = [f"new_key_values.{i}.{part}" for part in ("key", "value") for i in range(layers)]
    prompt = list_prompts(family, trace)[0]
    codes = np.array(trace["raster"][0])[cells]
    embeds, *cache, logits = run_whole_sequence(pipe, codes, [*names, "logits"], **prompt)
    nodes = embeds.shape[1]
    prefix = nodes - grid**2 + 1
    is_compared = list_compared_positions(family, model, nodes, trace.get("captions", [0])[0])
    positions = find_recorded_positions(family, pipe, prefix)[is_compared]
    assert_close(embeds[:, is_compared], arrays[f"{model}_g{grid}_inputs"][:, positions])
    for part, tensors in (("keys", cache[:layers]), ("values", cache[layers:])):
        entries = np.stack(tensors).transpose(0, 2, 3, 1, 4)  # [layer, row, head, position, width]
        assert_close(entries[..., is_compared, :], arrays[f"{model}_g{grid}_{part}"][..., positions, :])
    if family is NAR:
        for head, name in enumerate(("right", "below")):
            head_logits = logits[:, prefix - 1 :, 128 * head : 128 * (head + 1)]
            assert_close(head_logits, arrays[f"{model}_run0_{name}_logits"][:, [0, *(1 + cells[:-1])]])


@pytest.mark.parametrize(("family", "trace"), RUNS, ids=get_id)
def test_logits_of_a_run_lead_to_the_recorded_tokens(open_pipe: OpenPipe, family: GroupFamily, trace: Trace) -> None:
    pipe = open_pipe(family, trace["model"], trace["grid"])
    cells = get_group_layout(pipe).generation_order
    for i, (prompt, raster) in enumerate(zip(list_prompts(family, trace), trace["raster"], strict=True)):
        codes = np.array(raster)[cells]
        assert codes.tolist() == trace.get("ids", {i: codes.tolist()})[i]
        row_logits = sort_as_recorded(family, pipe, compute_logits(pipe, codes, **prompt))
        guided_logits = check_logits(trace["name"], i, trace, row_logits, family.arrays)
        in_generation_order = guided_logits[cells] if family.in_raster_order else guided_logits
        assert sample_recorded_codes(in_generation_order, i, trace) == codes.tolist()


@pytest.mark.parametrize(("family", "trace"), GREEDY, ids=get_id)
def test_greedy_images_alone_and_batched_equal_the_recordings(
    open_pipe: OpenPipe, family: GroupFamily, trace: Trace
) -> None:
    pipe = open_pipe(family, trace["model"], trace["grid"])
    count = sum(trace.get("guided", []))
    generate = partial(pipe, cfg_scale=trace["cfg"], temperature=0, cfg_tokens=count or None, top_k=0)
    prompts = list_prompts(family, trace)
    result = generate(**merge_prompts(prompts))
    assert [codes.tolist() for codes in result.codes] == trace["raster"]
    larger_batch = generate(**merge_prompts([prompts[-1], *prompts, prompts[0]]), method="groups")
    assert [codes.tolist() for codes in larger_batch.codes[1:-1]] == trace["raster"]
    for prompt, raster in zip(prompts, trace["raster"], strict=True):
        single_result = generate(**prompt, method="ar")
        assert single_result.codes[0].tolist() == raster
        assert single_result.stats.target_passes == len(get_group_layout(pipe).groups)


@pytest.mark.parametrize("options", ["int8", "int4-weights", "fp16 --compute float16", "bf16 --compute bfloat16"])
def test_rounded_nar_bundles_pass_verify_and_batch_alike(program: Any, options: str) -> None:
    target = DATA / "nar/c2i/nar_c2i.pt"
    files = {"--target": target, "--vq": VQ, "--config": target.with_name("config.json")}
    arguments = [part for pair in files.items() for part in pair]
    code, _, err = program("export", "--family", "nar", *arguments, "--precision", *options.split(), "--output", "nar")
    assert code == 0, err
    code, out, _ = program("verify", "nar", *files.values())
    assert (code, out.strip().endswith("passed")) == (0, True)
    pipe = Pipeline.from_bundle(Path("nar"), threads=1)
    batch_result = pipe(class_ids=[3, 5, 3], seed=[1, 2, 3])
    assert batch_result.codes[1].tolist() == pipe(class_ids=5, seed=2).codes[0].tolist()
