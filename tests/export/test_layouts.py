"""Every kind of decoder computes the same in both graph layouts, and nearly the same in float16."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import onnx
import pytest
import torch
from checkpoint_copies import C2I, VQ, config_path, copy_weights
from family_readers import read_llamagen
from goldens import DATA
from onnx import TensorProto
from refusals import error_of
from small_models import CONFIG, randomise_norms
from torch import nn

from lantern_rt import Pipeline, open_bundle
from lantern_rt.bundle.manifest import Precision
from lantern_rt.cli.main import run_program
from lantern_rt.errors import CheckpointError, RequestError
from lantern_rt.export.compare import DeviceGraphSession, GraphFileSession
from lantern_rt.export.graph.graphs import Graph, convert_to_float16, make_target_graph, plan_graph, write_graph
from lantern_rt.export.graph.precision import StorageRule, parse_precisions
from lantern_rt.export.measures import measure_max_difference
from lantern_rt.export.models.decoder import Decoder, DecoderConfig
from lantern_rt.export.models.eagle import EagleDrafter, make_drafter_graph
from lantern_rt.export.verify import check_graph_parity
from lantern_rt.export.writer import export_model

LLAMA = replace(CONFIG, rotary="sequence", rope_style="half", prefix_rotation="identity")
TARGETS: dict[str, DecoderConfig] = {
    "grid, interleaved": CONFIG,
    "grid, half": replace(CONFIG, rope_style="half"),
    "sequence, interleaved": replace(LLAMA, rope_style="interleaved"),
    "sequence, half": LLAMA,
    "prefix with rotary positions": replace(CONFIG, prefix_rotation="identity"),
    "a key head for every query head": replace(CONFIG, num_kv_heads=4),
    "one key head for all queries": replace(CONFIG, num_kv_heads=1),
    "normed heads": replace(LLAMA, query_key_norm=True),
    "normed heads, another epsilon": replace(LLAMA, query_key_norm=True, norm_eps=1e-2),
    "normed heads, RMS": replace(LLAMA, query_key_norm=True, rms_head_norm=True, norm_eps=1e-2),
    "wide heads": replace(LLAMA, head_width=24),
    "biased projections": replace(LLAMA, qkv_bias=True),
    "biased projections, scale is not a power of two": replace(LLAMA, hidden_size=96, qkv_bias=True),
    "large epsilon": replace(CONFIG, norm_eps=1e-2),
    "deep head": replace(LLAMA, head_hidden=48),
    "scale is not a power of two": replace(CONFIG, hidden_size=96),  # head_dim 24
    "no norms": replace(CONFIG, input_norm=False, final_norm=False),
    "more than 64 columns": replace(CONFIG, prefix=70, spare_positions=64),  # no pass has more nodes than positions
}
DRAFTERS: dict[str, tuple[DecoderConfig, bool]] = {
    "drafter": (replace(CONFIG, final_norm=False), False),
    "drafter with bias": (replace(CONFIG, final_norm=False), True),
    "drafter without its first norm": (replace(CONFIG, num_layers=1, input_norm=False, final_norm=False), True),
    "drafter of a sequence": (replace(LLAMA, final_norm=False, norm_eps=1e-6), True),
}


def target(config: DecoderConfig, scale: float = 0.1) -> Graph:  # with inputs so small that an epsilon matters
    torch.manual_seed(0)
    decoder = Decoder(config)
    randomise_norms(decoder)
    return make_target_graph(decoder, scale * torch.randn(config.vocab_size, config.hidden_size))


def drafter(config: DecoderConfig, bias: bool) -> Graph:
    torch.manual_seed(0)
    eagle_drafter = EagleDrafter(
        config, nn.Linear(config.hidden_size, config.vocab_size, bias=False), bias, num_tokens=50
    )
    randomise_norms(eagle_drafter)
    return make_drafter_graph(eagle_drafter)


GRAPHS = {name: target(config) for name, config in TARGETS.items()}
GRAPHS |= {name: drafter(*arguments) for name, arguments in DRAFTERS.items()}


def layout_difference(graph: Graph, folder: Path, rule: StorageRule = "fp32") -> float:
    """Return the largest difference of the two layouts of a graph's file over all its cases."""
    path, *_ = plan_graph(graph, rule).write(folder / f"{graph.role}.onnx")
    exported = GraphFileSession(path, low_memory=True)
    device = DeviceGraphSession(graph, path, low_memory=True)
    largest = 0.0
    for inputs in graph.test_cases.values():
        expected = exported.run(inputs)
        outputs = device.run(inputs)
        assert outputs.keys() == expected.keys()
        largest = max(largest, *(measure_max_difference(outputs[name], expected[name]) for name in expected))
    return largest


@pytest.mark.parametrize("name", GRAPHS)
def test_both_layouts_of_a_file_compute_the_same(name: str, tmp_path: Path) -> None:
    assert layout_difference(GRAPHS[name], tmp_path) < 1e-5


@pytest.mark.parametrize("rule", [*(rule for rule in get_args(Precision) if rule != "int8"), "lossless"])
@pytest.mark.parametrize("name", ["normed heads, another epsilon", "deep head", "drafter with bias"])
def test_both_layouts_compute_the_same_with_rounded_weights(name: str, rule: StorageRule, tmp_path: Path) -> None:
    assert layout_difference(GRAPHS[name], tmp_path, rule) < 1e-5


def test_masked_columns_have_no_effect(tmp_path: Path) -> None:
    graph = GRAPHS["grid, interleaved"]
    path, *_ = plan_graph(graph, "fp32").write(tmp_path / "target.onnx")
    device = DeviceGraphSession(graph, path)
    inputs = dict(graph.test_cases["rows of different length"])
    expected = device.run(inputs)
    for name in [name for name in inputs if name.startswith("past_")]:
        inputs[name] = inputs[name].copy()
        inputs[name][CONFIG.prefix :, 0] = 1e4  # past the end of the shorter row
    for name, array in device.run(inputs).items():
        np.testing.assert_array_equal(array, expected[name])


@pytest.mark.parametrize("name", GRAPHS)
def test_a_float16_graph_agrees_with_the_float32_module(name: str, tmp_path: Path) -> None:
    graph = replace(GRAPHS[name], tolerance=0.01)
    path, *_ = write_graph(convert_to_float16(graph), tmp_path)
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)  # checks that the inputs of each operation have one type
    types = {value.name: value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)}
    assert types.pop("logits") == TensorProto.FLOAT
    assert types.pop("position_ids") == TensorProto.INT64
    types.pop("input_ids", None)
    assert set(types.values()) == {TensorProto.FLOAT16}
    check_graph_parity(replace(graph, compute_type="float16"), path)


def test_squares_beyond_the_range_of_float16_cause_no_error(tmp_path: Path) -> None:
    # Squares of 4,000,000; the largest number is 65,504.
    graph = replace(target(CONFIG, scale=2000), tolerance=0.01, compute_type="float16")
    assert check_graph_parity(graph, write_graph(convert_to_float16(graph), tmp_path)[0]) < 0.01


def test_a_weight_beyond_float16_is_rejected(tmp_path: Path) -> None:
    decoder = Decoder(CONFIG).eval()
    with torch.no_grad():
        decoder.layers[1].ffn.up.weight[0, 0] = 1e6
    error = error_of(
        CheckpointError, write_graph, convert_to_float16(make_target_graph(decoder, torch.randn(40, 64))), tmp_path
    )
    assert (error.field, error.found) == ("layers.1.ffn.up.weight", "numbers up to 1e+06")
    assert error.remedy == "export with precision bf16-safe, or vq-precision fp32"


def test_the_error_of_a_weight_beyond_float16_has_its_name_in_the_file(tmp_path: Path) -> None:
    name = "layers.1.feed_forward.w3.weight"
    large = copy_weights(tmp_path, C2I, lambda weights: weights[name].__setitem__((0, 0), 1e6))
    model = read_llamagen(large, VQ, config=config_path(C2I))
    error = error_of(CheckpointError, export_model, model, tmp_path / "b", precisions=parse_precisions("fp16"))
    assert error.field == f"{large}: {name}"


@pytest.mark.parametrize("method", ["ar", "lantern", "sjd"])
def test_a_float16_bundle_has_its_dtype_in_the_manifest_and_generates(t2i_half_bundle: Path, method: str) -> None:
    bundle = open_bundle(t2i_half_bundle)
    manifest = bundle.manifest
    assert (manifest.target.dtype, manifest.target.precision) == ("float16", "fp16")
    assert manifest.drafter is not None
    assert manifest.drafter.precision == "fp16"
    rng = np.random.default_rng(0)
    width = manifest.condition.caption_dim
    assert width is not None
    states = rng.standard_normal((1, manifest.condition.prefix, width), dtype=np.float32)
    result = Pipeline.from_bundle(bundle, threads=1)(
        embeddings=(states, np.ones((1, manifest.condition.prefix), np.int64)), method=method, seed=1
    )
    assert result.images[0].size == (manifest.image_width, manifest.image_height)


def test_verify_passes_for_a_float16_bundle(t2i_half_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    t2i = DATA / "llamagen-t2i"
    checkpoints = [t2i / "t2i_tiny.pt", DATA / "llamagen-vq/vq_tiny.pt", DATA / "lantern-drafter-llamagen"]
    checkpoints += [t2i / "config.json"]
    assert run_program(["verify", str(t2i_half_bundle), *map(str, checkpoints)]) == 0
    assert run_program(["verify", str(t2i_half_bundle)]) == 0  # against ONNX's reference evaluator
    assert "target" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compute": "half"}, "compute: found 'half', expected float32, float16 or bfloat16"),
        (
            {"target": "int8", "compute": "float16"},
            "precision: found int8 with compute float16, expected fp16, int8-weights, int4-weights",
        ),
        (
            {"drafter": "fp32", "compute": "bfloat16"},
            "drafter_precision: found fp32 with compute bfloat16, expected bf16, int8-weights, int4-weights",
        ),
        ({"target": "bf16"}, "precision: found bf16 with compute float32, expected compute bfloat16"),
    ],
)
def test_invalid_combinations_of_compute_and_precision_are_rejected(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(RequestError, match=f"^{re.escape(message)}$"):
        parse_precisions(**arguments)
