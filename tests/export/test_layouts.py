"""Outputs of decoder graphs: equal in the file layout and the device layout, and close to float32 in float16.

The file layout is the layout of graphs in a bundle. The device layout is for GPUs and other devices.
"""

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
from refusals import catch_error
from small_models import CONFIG, randomise_norms
from tiny_graphs import write_graph
from torch import nn

from lantern_rt import Pipeline, open_bundle
from lantern_rt.bundle.manifest import Precision
from lantern_rt.cli.main import run_program
from lantern_rt.errors import CheckpointError, RequestError
from lantern_rt.export.compare import DeviceGraphSession
from lantern_rt.export.graph.graphs import Graph, convert_to_float16, make_graph_file, make_target_graph
from lantern_rt.export.graph.precision import StorageRule, parse_precisions
from lantern_rt.export.models.decoder import Decoder, DecoderConfig
from lantern_rt.export.models.eagle import EagleDrafter, make_drafter_graph
from lantern_rt.export.verify import check_graph_parity
from lantern_rt.export.writer import export_model

LLAMA_CONFIG = replace(CONFIG, rotary="sequence", rope_style="half", prefix_rotation="identity")
TARGET_CONFIGS: dict[str, DecoderConfig] = {
    "grid positions, interleaved pairs": CONFIG,
    "grid positions, half pairs": replace(CONFIG, rope_style="half"),
    "sequence positions, interleaved pairs": replace(LLAMA_CONFIG, rope_style="interleaved"),
    "sequence positions, half pairs": LLAMA_CONFIG,
    "prefix with rotary positions": replace(CONFIG, prefix_rotation="identity"),
    "a key head for every query head": replace(CONFIG, num_kv_heads=4),
    "one key head for all queries": replace(CONFIG, num_kv_heads=1),
    "normalized queries and keys": replace(LLAMA_CONFIG, query_key_norm=True),
    "normalized queries and keys, epsilon 0.01": replace(LLAMA_CONFIG, query_key_norm=True, norm_eps=1e-2),
    "queries and keys with RMS norms": replace(LLAMA_CONFIG, query_key_norm=True, rms_head_norm=True, norm_eps=1e-2),
    "heads of width 24": replace(LLAMA_CONFIG, head_width=24),
    "biases of queries, keys and values": replace(LLAMA_CONFIG, qkv_bias=True),
    "biases, attention scale that is not a power of two": replace(LLAMA_CONFIG, hidden_size=96, qkv_bias=True),
    "norm epsilon 0.01": replace(CONFIG, norm_eps=1e-2),
    "output head with a hidden layer": replace(LLAMA_CONFIG, head_hidden=48),
    "attention scale that is not a power of two": replace(CONFIG, hidden_size=96),  # head width 24
    "no input norm and no final norm": replace(CONFIG, input_norm=False, final_norm=False),
    # 70 + 9 + 64 positions are enough for the test case with 71 past and 70 new positions.
    "more than 64 positions": replace(CONFIG, prefix=70, spare_positions=64),
}
# By name: configuration, and whether the drafter's input projection has a bias.
DRAFTER_CONFIGS: dict[str, tuple[DecoderConfig, bool]] = {
    "drafter": (replace(CONFIG, final_norm=False), False),
    "drafter with bias": (replace(CONFIG, final_norm=False), True),
    "drafter without an input norm": (replace(CONFIG, num_layers=1, input_norm=False, final_norm=False), True),
    "drafter with sequence positions": (replace(LLAMA_CONFIG, final_norm=False, norm_eps=1e-6), True),
}


def build_target_graph(config: DecoderConfig, input_scale: float = 0.1) -> Graph:
    """Return the graph of a random target. The small default scale of inputs makes the norms' epsilon matter."""
    torch.manual_seed(0)
    decoder = Decoder(config)
    randomise_norms(decoder)
    return make_target_graph(decoder, input_scale * torch.randn(config.vocab_size, config.hidden_size))


def build_drafter_graph(config: DecoderConfig, bias: bool) -> Graph:
    torch.manual_seed(0)
    eagle_drafter = EagleDrafter(
        config, nn.Linear(config.hidden_size, config.vocab_size, bias=False), bias, num_tokens=50
    )
    randomise_norms(eagle_drafter)
    return make_drafter_graph(eagle_drafter)


GRAPHS = {name: build_target_graph(config) for name, config in TARGET_CONFIGS.items()}
GRAPHS |= {name: build_drafter_graph(*arguments) for name, arguments in DRAFTER_CONFIGS.items()}


@pytest.mark.parametrize("name", GRAPHS)
def test_both_layouts_give_the_outputs_of_the_module(name: str, tmp_path: Path) -> None:
    assert check_graph_parity(GRAPHS[name], write_graph(GRAPHS[name], tmp_path)) < 2e-5


@pytest.mark.parametrize("rule", [*(rule for rule in get_args(Precision) if rule != "int8"), "lossless"])
@pytest.mark.parametrize(
    "name", ["normalized queries and keys, epsilon 0.01", "output head with a hidden layer", "drafter with bias"]
)
def test_both_layouts_give_the_outputs_of_rounded_weights(name: str, rule: StorageRule, tmp_path: Path) -> None:
    graph = GRAPHS[name]
    graph_file = make_graph_file(graph, rule)
    path = graph_file.write(tmp_path / f"{graph.role}.onnx")[0]
    assert check_graph_parity(graph, path, graph_file) < 2e-5


def test_masked_keys_and_values_do_not_change_the_outputs(tmp_path: Path) -> None:
    graph = GRAPHS["grid positions, interleaved pairs"]
    path = write_graph(graph, tmp_path)
    session = DeviceGraphSession(graph, path)
    inputs = dict(graph.test_cases["rows of different length"])
    expected = session.run(inputs)
    for name in [name for name in inputs if name.startswith("past_")]:
        inputs[name] = inputs[name].copy()
        inputs[name][CONFIG.prefix :, 0] = 1e4  # positions that the mask of row 0 excludes
    for name, array in session.run(inputs).items():
        np.testing.assert_array_equal(array, expected[name])


@pytest.mark.parametrize("name", GRAPHS)
def test_a_float16_graph_agrees_with_the_float32_module(name: str, tmp_path: Path) -> None:
    graph = replace(GRAPHS[name], tolerance=0.01)
    path = write_graph(convert_to_float16(graph), tmp_path)
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)  # checks that the inputs of each operation have one type
    types = {value.name: value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)}
    assert types.pop("logits") == TensorProto.FLOAT
    assert types.pop("position_ids") == TensorProto.INT64
    types.pop("input_ids", None)
    assert set(types.values()) == {TensorProto.FLOAT16}
    check_graph_parity(replace(graph, compute_type="float16"), path)


def test_squares_beyond_float16_do_not_spoil_a_float16_graph(tmp_path: Path) -> None:
    # The norms square inputs of about 2,000; the largest number in float16 is 65,504.
    graph = replace(build_target_graph(CONFIG, input_scale=2000), tolerance=0.01, compute_type="float16")
    assert check_graph_parity(graph, write_graph(convert_to_float16(graph), tmp_path)) < 0.01


def test_a_weight_above_the_largest_float16_number_is_rejected(tmp_path: Path) -> None:
    decoder = Decoder(CONFIG).eval()
    with torch.no_grad():
        decoder.layers[1].ffn.up.weight[0, 0] = 1e6
    error = catch_error(
        CheckpointError, write_graph, convert_to_float16(make_target_graph(decoder, torch.randn(40, 64))), tmp_path
    )
    assert (error.field, error.found) == ("layers.1.ffn.up.weight", "numbers up to 1e+06")
    assert error.remedy == "export with precision bf16-safe, or vq-precision fp32"


def test_a_weight_beyond_float16_has_its_name_in_the_checkpoint(tmp_path: Path) -> None:
    name = "layers.1.feed_forward.w3.weight"
    changed_target = copy_weights(tmp_path, C2I, lambda weights: weights[name].__setitem__((0, 0), 1e6))
    model = read_llamagen(changed_target, VQ, config=config_path(C2I))
    error = catch_error(CheckpointError, export_model, model, tmp_path / "b", precisions=parse_precisions("fp16"))
    assert error.field == f"{changed_target}: {name}"


@pytest.mark.parametrize("method", ["ar", "lantern", "sjd"])
def test_a_float16_bundle_generates_an_image(t2i_half_bundle: Path, method: str) -> None:
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
    assert run_program(["verify", str(t2i_half_bundle)]) == 0  # compared with ONNX's reference evaluator
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
            {"target": "fp32", "compute": "bfloat16"},
            "precision: found fp32 with compute bfloat16, expected bf16, int8-weights, int4-weights",
        ),
        ({"target": "bf16"}, "precision: found bf16 with compute float32, expected compute bfloat16"),
    ],
)
def test_invalid_compute_types_and_precisions_are_rejected(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(RequestError, match=f"^{re.escape(message)}$"):
        parse_precisions(**arguments)
