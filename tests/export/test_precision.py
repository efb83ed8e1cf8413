"""Rounding of weights to the types of a precision, and graphs that compute with the rounded weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from refusals import expect_error
from small_models import make_target
from tiny_graphs import write_graph

from lantern_rt.bundle.manifest import Precision
from lantern_rt.bundle.weights import StoredWeights
from lantern_rt.errors import BundleError, CheckpointError, RequestError
from lantern_rt.export.compare import GraphFileSession
from lantern_rt.export.graph.graphs import convert_to_float16, make_graph_file
from lantern_rt.export.graph.precision import (
    StorageRule,
    StorageType,
    choose_storage_type,
    fake_quantize,
    find_block_size,
    iter_float32_chunks,
    parse_precisions,
    quantize,
    resolve_storage_type,
)
from lantern_rt.export.verify import check_graph_parity

FLOAT32_PRECISIONS = [name for name in get_args(Precision) if name != "bf16"]  # only bfloat16 graphs accept bf16


@pytest.mark.parametrize(("storage_type", "max_integer"), [("int8", 127), ("int4", 7)])
def test_a_weights_rounding_error_is_at_most_half_the_scale(storage_type: str, max_integer: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(128, 6) * torch.logspace(-3, 3, 128)[:, None]
    integers, scales = quantize(weight, storage_type)  # type: ignore[arg-type]
    block_size = find_block_size(storage_type, 128)  # type: ignore[arg-type]
    assert block_size is not None
    assert integers.abs().max() == max_integer
    assert scales.shape == (128 // block_size, 6)
    error = (integers * scales.repeat_interleave(block_size, 0) - weight).abs()
    assert (error <= scales.repeat_interleave(block_size, 0) * 0.5001).all()  # 0.0001 allows for rounding in float32


def test_a_block_of_zeros_stays_zero() -> None:
    integers, scales = quantize(torch.zeros(32, 2), "int4")
    assert not integers.any()
    assert not scales.any()
    assert not fake_quantize(torch.zeros(2, 32), "int4", is_matrix=True).any()


def test_concatenated_chunks_of_a_weight_equal_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lantern_rt.export.graph.precision.CHUNK_NUMBERS", 40)
    weight = torch.randn(96, 8, dtype=torch.float64).bfloat16()
    assert [len(chunk) for chunk in iter_float32_chunks(weight)] == [5] * 19 + [1]  # 5 rows of 8 are 40 numbers
    assert [len(chunk) for chunk in iter_float32_chunks(weight, 32)] == [32] * 3  # a multiple of 32 rows
    assert torch.equal(torch.cat(list(iter_float32_chunks(weight))), weight.float())
    assert torch.equal(next(iter_float32_chunks(torch.tensor(3.0))), torch.tensor(3.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("storage_type", ["float16", "int8", "int4"])
def test_rounding_in_chunks_gives_the_same_result(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, storage_type: StorageType
) -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).to(dtype).t()  # not contiguous in memory
    original_weight = weight.clone()
    rounded_weight = fake_quantize(weight, storage_type, is_matrix=True)
    monkeypatch.setattr("lantern_rt.export.graph.precision.CHUNK_NUMBERS", 1000)
    assert torch.equal(fake_quantize(weight, storage_type, is_matrix=True), rounded_weight)
    assert torch.equal(weight, original_weight)
    if storage_type == "float16":
        assert torch.equal(rounded_weight, weight.half().float())


def test_only_matrices_of_whole_blocks_are_stored_as_integers() -> None:
    matrix = torch.zeros(64, 8)
    assert choose_storage_type(matrix, True, "int8-weights") == "int8"
    assert choose_storage_type(matrix[:40], True, "int8-weights") == "float16"  # 40 is not a multiple of the block size
    assert choose_storage_type(matrix, False, "int4-weights") == "float16"
    assert choose_storage_type(matrix[0], False, "int4-weights") == "float32"
    assert choose_storage_type(matrix, True, "fp32") == "float32"


def test_int4_quantizes_the_matrices_of_layers_only() -> None:
    plan = make_graph_file(make_target(torch.float32), "int4-weights")
    names_by_type = {
        storage_type: {name for name, other_type in plan.storage_types.items() if other_type == storage_type}
        for storage_type in plan.storage_types.values()
    }
    assert names_by_type["float16"] == {"head.weight"}
    assert len(names_by_type["int4"]) == 5 * 3  # five matrices in each of three layers
    assert {"rotary.cos", "rotary.sin", "rotary.swap", "norm.weight"} <= names_by_type["float32"]


@pytest.mark.parametrize("weight", [torch.full((2, 2), 1e5), torch.full((2, 2), 1e-8)])
def test_weights_beyond_float16_stay_float32_or_are_rejected(weight: torch.Tensor) -> None:
    assert resolve_storage_type("w", weight, "float16", "bf16-safe") == "float32"
    assert resolve_storage_type("w", weight, "float16", "int8-weights") == "float32"
    assert resolve_storage_type("w", torch.randn(9, 9), "float16", "fp16") == "float16"
    assert resolve_storage_type("w", torch.zeros(2, 2), "float16", "fp16") == "float16"
    with pytest.raises(
        CheckpointError,
        match=r"^w: found numbers up to .*, expected numbers that float16 holds; export with precision bf16-safe",
    ):
        resolve_storage_type("w", weight, "float16", "fp16")


def test_an_unknown_precision_is_rejected_with_the_valid_ones() -> None:
    with pytest.raises(
        RequestError, match=r"^precision: found 'int4', expected one of fp32, fp16, bf16-safe, bf16, int8-"
    ):
        parse_precisions("int4")


def test_each_graphs_precision_follows_from_the_options() -> None:
    precisions = parse_precisions("int4-weights")
    assert [precisions.get_precision(role) for role in ("target", "drafter", "condition", "vq_decoder")] == [
        "int4-weights",
        "int4-weights",
        "bf16-safe",
        "fp32",
    ]
    assert parse_precisions("fp16").get_precision("drafter") == "fp16"


@pytest.mark.parametrize(
    ("processor", "expected"),
    [("x86_64 avx avx2 avx512f avx512_vnni", "int8"), ("x86_64 avx avx2", "fp32"), ("aarch64 asimddp", "int8")],
)
def test_precision_auto_is_int8_on_processors_with_int8(
    monkeypatch: pytest.MonkeyPatch, processor: str, expected: str
) -> None:
    monkeypatch.setattr("lantern_rt.export.graph.precision.describe_processor", lambda: processor)
    assert parse_precisions("auto").target == expected
    assert parse_precisions("auto").get_precision("drafter") == expected
    assert parse_precisions("auto", compute="float16").target == "fp16"


@pytest.mark.parametrize("rule", ["bf16", "int8-weights", "int4-weights"])
def test_bfloat16_graphs_compute_in_float32(tmp_path: Path, rule: Precision) -> None:
    graph = replace(make_target(torch.bfloat16), compute_type="bfloat16")
    plan = make_graph_file(graph, rule)
    path = plan.write(tmp_path / "target.onnx")[0]
    assert check_graph_parity(graph, path, plan) < 2e-5
    types = {tensor.name: tensor.data_type for tensor in onnx.load(path).graph.initializer}
    name = "layers.0.ffn.up.weight." + ("bfloat16" if rule == "bf16" else "scales")
    assert types[name] == types["head.weight.bfloat16"] == TensorProto.BFLOAT16
    if rule == "bf16":  # a bfloat16 checkpoint is stored without rounding
        assert check_graph_parity(graph, path) < 2e-5


@pytest.mark.parametrize("rule", FLOAT32_PRECISIONS)
def test_a_graph_gives_the_outputs_of_the_rounded_module(tmp_path: Path, rule: Precision) -> None:
    graph = make_target(torch.bfloat16)
    plan = make_graph_file(graph, rule)
    expected_bytes = plan.weight_bytes
    path = plan.write(tmp_path / "target.onnx")[0]
    assert check_graph_parity(graph, path, plan) < (0.1 if rule == "int8" else 2e-5)
    model = onnx.load(path)
    types = {tensor.data_type for tensor in model.graph.initializer}
    assert (TensorProto.INT8 in types, TensorProto.INT4 in types) == ("int8" in rule, rule == "int4-weights")
    assert model.opset_import[0].version == (21 if "int" in rule else 20)
    onnx.checker.check_model(model)
    written_bytes = sum(part.num_bytes for name in plan.weights for part in plan.list_initializers(name))
    assert written_bytes == expected_bytes


@pytest.mark.parametrize("rule", ["int8-weights", "int4-weights"])
def test_integer_weights_become_float16_in_float16_graphs(tmp_path: Path, rule: Precision) -> None:
    graph = convert_to_float16(make_target(torch.bfloat16))
    plan = make_graph_file(graph, rule)
    path = plan.write(tmp_path / "target.onnx")[0]
    assert check_graph_parity(graph, path, plan) < 0.01  # checks the file layout and the device layout
    types = {tensor.name: tensor.data_type for tensor in onnx.load(path).graph.initializer}
    assert types["layers.0.ffn.up.weight.scales"] == types["head.weight"] == TensorProto.FLOAT16
    invalid_plan = make_graph_file(graph, rule)
    invalid_plan.weights["layers.0.ffn.up.weight"] = torch.full((64, 96), 1e6)
    with pytest.raises(CheckpointError, match="expected numbers that float16 holds"):
        invalid_plan.write(tmp_path / "invalid.onnx")


@pytest.mark.parametrize("rule", ["int8-weights", "int4-weights"])
def test_outputs_of_integer_graphs_do_not_depend_on_the_nodes(tmp_path: Path, rule: Precision) -> None:
    graph = make_target(torch.float32)
    path = write_graph(graph, tmp_path, rule)
    session = GraphFileSession(path)  # uses all fusions of ONNX Runtime, like generation
    inputs = dict(list(graph.test_cases.values())[-1])
    nodes = inputs["position_ids"].shape[1]
    logits = session.run(inputs)["logits"]  # [rows, nodes, vocab]
    for num_nodes in (2, 3):
        first_nodes = dict(inputs)
        first_nodes["input_embeds"] = np.ascontiguousarray(inputs["input_embeds"][:, :num_nodes])
        first_nodes["position_ids"] = np.ascontiguousarray(inputs["position_ids"][:, :num_nodes])
        past = inputs["attention_mask"].shape[-1] - nodes
        first_nodes["attention_mask"] = np.ascontiguousarray(
            inputs["attention_mask"][:, :, :num_nodes, : past + num_nodes]
        )
        np.testing.assert_allclose(session.run(first_nodes)["logits"], logits[:, :num_nodes], rtol=0, atol=2e-6)


def test_onnx_runtime_fuses_dequantization_and_product(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    path = write_graph(make_target(torch.float32), tmp_path, "int8-weights")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "fused.onnx")
    options.log_severity_level = 4
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    ops = [node.op_type for node in onnx.load(tmp_path / "fused.onnx").graph.node]
    assert ops.count("MatMulNBits") == 5 * 3  # five matrices in each of three layers
    assert "DequantizeLinear" not in ops


@pytest.mark.parametrize("rule", ["fp32", "fp16", "int8", "int8-weights", "int4-weights"])
def test_stored_weights_are_read_with_the_rounded_values(rule: StorageRule, tmp_path: Path) -> None:
    graph = make_target(torch.float32)
    plan = make_graph_file(graph, rule)
    stored_weights = StoredWeights(plan.write(tmp_path / "target.onnx")[0])
    module_weights = graph.module.state_dict()
    for name in ("layers.1.attention.out.weight", "layers.2.ffn.down.weight", "head.weight"):
        expected = fake_quantize(module_weights[name], plan.storage_types[name], name in plan.matrix_names)
        np.testing.assert_array_equal(stored_weights.float32(name), expected.T)
        assert stored_weights[name].shape == tuple(expected.T.shape)
    assert "layers.9" not in stored_weights
    with expect_error(BundleError, "target.onnx: has no weight layers.9; export the bundle again"):
        stored_weights.float32("layers.9")
