"""RAR's exported graphs and images compared with the recorded arrays and runs of the published program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_copies import MASKGIT_VQ, RAR
from family_readers import read_rar
from goldens import (
    DATA,
    GUIDED_TOLERANCE,
    ROW_NAMES,
    Arrays,
    GraphRunner,
    assert_close,
    load_golden,
    read_manifest,
)
from guided_logits import make_sampler, mix_guided_logits
from numpy.typing import NDArray

from lantern_rt import Pipeline
from lantern_rt.engines.ort.position_vectors import PositionVectors
from lantern_rt.export.compare import GraphFileSession
from lantern_rt.export.families.rar import SAMPLING
from lantern_rt.methods import Sampling
from lantern_rt.output.images import convert_pixels_to_image
from lantern_rt.runtime.engine import PassInput

Trace = dict[str, Any]
PROTOCOL = json.loads((DATA / "rar/protocol.json").read_text())
TRACES: list[Trace] = json.loads((DATA / "rar/traces.json").read_text())
GREEDY = [trace for trace in TRACES if not trace["sample"]]
NO_CLASS = 10
COARSE = ("int4-weights", "bf16")  # these change random weights more than `verify` allows for trained weights
METHODS = ("ar", "sjd:window=3", "sjd:window=7")


def get_sampling(trace: Trace, **fields: Any) -> dict[str, Any]:
    """Return the sampling options of a recorded run; the published program turns guidance off by a scale of 0."""
    if trace["guidance_scale"] in (0.0, 1.0):
        return {"cfg_scale": 1.0, **fields}
    schedule = f"cosine-{trace['guidance_scale_pow']}"
    return {"cfg_scale": trace["guidance_scale"], "cfg_schedule": schedule, **fields}


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    return load_golden("rar")


@pytest.fixture(scope="module")
def pipe(rar_bundle: Path) -> Pipeline:
    return Pipeline.from_bundle(rar_bundle, threads=1)


class ClassRunner:
    """Runner of one class, or of no class, after the prefix and some codes."""

    def __init__(self, bundle: Path, class_id: int, codes: Any) -> None:
        condition = read_manifest(bundle).condition
        first_position = condition.find_first_position(None if class_id == NO_CLASS else class_id)
        assert first_position is not None
        self.start = first_position - condition.prefix  # position of the first prefix row
        self.table = np.load(bundle / "code_embeddings.npy")
        class_ids = np.array([class_id % NO_CLASS])
        prefix = GraphFileSession(bundle / "condition.onnx").run({"class_ids": class_ids})
        row = prefix["uncond_embeds" if class_id == NO_CLASS else "prefix_embeds"]
        self.graph = GraphRunner(bundle)
        self.embeds = np.concatenate([row, self.table[np.array(codes)][None]], 1)
        self.output = self.graph.step(input_embeds=self.embeds, positions=self.start + np.arange(len(self.embeds[0])))


def compute_logits(bundle: Path, class_id: int, codes: list[int]) -> NDArray[np.float32]:
    """Compute the logits of all codes for a class and for no class, `[2, codes, vocabulary]`."""
    rows = [ClassRunner(bundle, row, codes[:-1]).output["logits"][0, 1:] for row in (class_id, NO_CLASS)]
    return np.stack(rows)


def test_layers_have_the_recorded_inputs_conditions_and_outputs(arrays: Arrays, rar_bundle: Path) -> None:
    """Compare the module's numbers inside of the layers; its modulation includes weight and bias of the norms."""
    decoder: Any = read_rar(RAR, MASKGIT_VQ).graphs[0].module
    weights = torch.load(RAR, weights_only=True)
    count = decoder.config.max_sequence_length
    codes = TRACES[0]["ids"][0][:-1]
    runs = [ClassRunner(rar_bundle, row, codes) for row in (TRACES[0]["class_ids"][0], NO_CLASS)]
    positions = torch.tensor([[run.start] for run in runs]) + torch.arange(len(codes) + 2)
    condition = decoder.class_vectors[positions // count] + decoder.step_vectors[positions % count]
    assert_close(condition.numpy(), arrays["run0_condition"])
    x = torch.from_numpy(np.concatenate([run.embeds for run in runs])) + decoder.position_vectors[positions % count]
    assert_close(x.numpy(), arrays["run0_inputs"])
    active = decoder.look_up_positions(positions)

    def fold(recorded: NDArray[np.float32], norm: str) -> list[NDArray[np.float32]]:
        """Return shift, scale and gate with a norm's weight and bias multiplied into shift and scale."""
        shift, scale, *gate = np.split(recorded, recorded.shape[-1] // x.shape[-1], -1)
        weight, bias = (weights[f"{norm}.{kind}"].numpy() for kind in ("weight", "bias"))
        return [bias * (1 + scale) + shift, weight * (1 + scale), *gate]

    assert_close(x.numpy(), arrays["run0_layer_hidden"][0])
    for i, layer in enumerate(decoder.layers):
        halves = zip(np.split(arrays["run0_modulation"][i], 2, -1), ("norm1", "norm2"), strict=True)
        expected = [part for half, norm in halves for part in fold(half, f"blocks.{i}.{norm}")]
        assert_close(layer.modulation(active).numpy(), np.concatenate(expected, -1))
        x, *_ = layer(x, active)
        assert_close(x.numpy(), arrays["run0_layer_hidden"][i + 1])
    scale, shift = np.split(arrays["run0_head_modulation"], 2, -1)
    assert_close(decoder.norm.modulation(active).numpy(), np.concatenate([shift, 1 + scale], -1))
    assert_close(decoder.norm(x, active).numpy(), arrays["run0_head_inputs"])


def test_the_graph_has_the_recorded_states_keys_and_values(arrays: Arrays, rar_bundle: Path) -> None:
    for row, class_id in enumerate((TRACES[0]["class_ids"][0], NO_CLASS)):
        output = ClassRunner(rar_bundle, class_id, TRACES[0]["ids"][0][:-1]).output
        assert_close(output["hidden_states"][0], arrays["run0_head_inputs"][row])
        for part in ("key", "value"):
            tensors = [output[f"new_key_values.{i}.{part}"][:, 0] for i in range(3)]
            assert_close(np.stack(tensors).transpose(0, 2, 1, 3), arrays[f"run0_{part}s"][:, row])


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace["name"])
def test_recorded_runs_have_the_recorded_logits_and_codes(arrays: Arrays, rar_bundle: Path, trace: Trace) -> None:
    sampling = Sampling(**get_sampling(trace, temperature=trace["randomize_temperature"]))
    for i, (class_id, codes) in enumerate(zip(trace["class_ids"], trace["ids"], strict=True)):
        logits = compute_logits(rar_bundle, class_id, codes)
        for row, row_name in enumerate(ROW_NAMES):
            if f"{trace['name']}_{row_name}_logits" in arrays:
                assert_close(logits[row], arrays[f"{trace['name']}_{row_name}_logits"][i])
        guided = mix_guided_logits(logits, sampling) if sampling.uses_guidance else logits[0]
        if f"{trace['name']}_used_logits" in arrays:
            assert_close(guided, arrays[f"{trace['name']}_used_logits"][i], GUIDED_TOLERANCE)
        if trace["sample"]:
            cumulative = make_sampler(sampling).compute_distribution(guided).cumsum(1)
            sampled = (cumulative / cumulative[:, -1:] <= np.array(trace["uniform"][i])[:, None]).sum(1)
            assert sampled.tolist() == codes
        else:
            assert guided.argmax(1).tolist() == codes


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("trace", GREEDY, ids=lambda trace: trace["name"])
def test_greedy_images_equal_the_recorded_runs(pipe: Pipeline, trace: Trace, method: str) -> None:
    options = {"method": method, **get_sampling(trace, temperature=0.0)}
    result = pipe(class_ids=trace["class_ids"], **options)
    assert [codes.tolist() for codes in result.codes] == trace["ids"]
    assert pipe(class_ids=trace["class_ids"][1], **options).codes[0].tolist() == trace["ids"][1]


def test_codes_of_a_recorded_run_decode_to_the_recorded_image(arrays: Arrays, rar_bundle: Path) -> None:
    for i, codes in enumerate(TRACES[0]["ids"]):
        (pixels,) = GraphFileSession(rar_bundle / "vq_decoder.onnx").run({"codes": np.array([codes])})["images"]
        np.testing.assert_array_equal(np.asarray(convert_pixels_to_image(pixels)), arrays["run0_uint8"][i])
        recorded = arrays["run0_image"][i] * 2 - 1
        assert_close(np.clip(pixels + np.float32(1 / 255), -1, 1), recorded)


def test_vectors_are_computed_once_for_a_block_of_positions(
    pipe: Pipeline, rar_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare passes at positions of several classes with the whole graph, which computes the vectors in each pass."""
    last = pipe.bundle.manifest.target.max_positions - 1
    blocks: list[int] = []
    compute = PositionVectors._compute_block

    def record(vectors: PositionVectors, block: int) -> Any:
        blocks.append(block)
        return compute(vectors, block)

    monkeypatch.setattr(PositionVectors, "_compute_block", record)
    tokens = np.arange(6).reshape(2, 3)
    cache = pipe.engines.target.make_cache(2, 3)
    for positions, expected in (
        ([[14, 15, 16], [33, 32, 0]], [0, 1, 2]),
        ([[17, 18, 31], [47, 47, 47]], []),
        ([[48, 49, 50], [last - 1, last, last]], [3, last // 16]),
        ([[48, 48, 14], [last, last, last]], [0]),
    ):
        mask = np.zeros((2, 3, 67), bool)
        mask[:, :, 64:] = np.tri(3, dtype=bool)
        output = pipe.engines.target.run(PassInput(np.array(positions), mask, tokens), cache)
        embeds = np.load(rar_bundle / "code_embeddings.npy")[tokens]
        whole = GraphRunner(rar_bundle, rows=2).step(input_embeds=embeds, positions=np.array(positions))
        assert_close(output.logits[:], whole["logits"])
        assert_close(output.hidden[:], whole["hidden_states"])
        assert sorted(blocks) == expected
        blocks.clear()


@pytest.mark.parametrize("row", [0, 1])
def test_a_pass_over_all_codes_has_the_recorded_logits(arrays: Arrays, rar_bundle: Path, row: int) -> None:
    run = ClassRunner(rar_bundle, int(arrays["tf_class_ids"][row]), arrays["tf_tokens"])
    assert_close(run.output["logits"][0, 1:], arrays["tf_logits"][row])


@pytest.mark.parametrize(("row", "class_id"), [(0, 1), (1, NO_CLASS)])
def test_a_draft_tree_has_the_recorded_logits(arrays: Arrays, rar_bundle: Path, row: int, class_id: int) -> None:
    parents = arrays["tree_parents"]
    depths = arrays["tree_depth"]
    assert depths.tolist() == [0 if p < 0 else depths[p] + 1 for p in parents]
    run = ClassRunner(rar_bundle, class_id, arrays["tree_before"])
    assert arrays["tree_position_ids"].tolist() == (run.graph.length + depths).tolist()
    embeds = run.table[arrays["tree_tokens"]][None]
    positions = run.start + arrays["tree_position_ids"]
    output = run.graph.step(arrays["tree_mask"] > 0, positions=positions, input_embeds=embeds)
    assert_close(output["logits"][0], arrays["tree_logits"][row])


def test_schedules_and_temperatures_equal_the_published(arrays: Arrays) -> None:
    published = list(PROTOCOL["published"]["sizes"].values())
    settings = [SAMPLING[size["num_hidden_layers"], size["hidden_size"]] for size in published]
    assert [each.temperature for each in settings] == [size["randomize_temperature"] for size in published]
    for sampling, scales in zip([*settings, Sampling(cfg_scale=4.0)], arrays["schedule_n256"], strict=True):
        np.testing.assert_allclose(make_sampler(sampling, 256).guidance.scales(range(256)), scales, rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    ["int8", "int8-weights", "int4-weights", "bf16-safe", "fp16 --compute float16", "bf16 --compute bfloat16"],
)
def test_rounded_bundles_batch_alike_and_pass_verify(program: Any, options: str) -> None:
    files = ("--target", RAR, "--vq", MASKGIT_VQ)
    code, _, err = program("export", "--family", "rar", *files, "--precision", *options.split(), "--output", "rar")
    assert code == 0, err
    code, out, _ = program("verify", "rar", RAR, MASKGIT_VQ)
    assert out.strip().endswith("passed") == (code == 0) == (options.split(" ")[0] not in COARSE)
    pipe = Pipeline.from_bundle(Path("rar"), threads=1)
    batch_result = pipe(class_ids=[3, 5, 3], seed=[1, 2, 3], method="ar")
    assert batch_result.codes[1].tolist() == pipe(class_ids=5, seed=2).codes[0].tolist()
