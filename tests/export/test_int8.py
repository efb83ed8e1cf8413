"""int8 graphs: the outputs of a target's node do not depend on other nodes; image decoders stay near float32."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from checkpoint_copies import C2I, EMU3, VQ, VQGAN, Weights, config_path, copy_weights
from family_readers import read_emu3
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from small_models import CONFIG, make_target, randomise_norms
from tiny_graphs import write_graph

from lantern_rt.bundle.manifest import Manifest
from lantern_rt.cli.main import run_program
from lantern_rt.engines.ort.session import load_session
from lantern_rt.errors import ParityError
from lantern_rt.export.compare import compare_graph_with_module, run_torch_module
from lantern_rt.export.convolutions import measure_activation_ranges, quantize_convolutions
from lantern_rt.export.families.common import make_vq_graphs
from lantern_rt.export.graph.graphs import Graph, make_graph_file
from lantern_rt.export.graph.precision import quantize, round_activations
from lantern_rt.export.measures import measure_image_difference, measure_relative_error
from lantern_rt.export.models.vq_checkpoints import read_llamagen_vq, read_vqgan
from lantern_rt.export.verify import check_graph_parity

NODES = 24  # nodes of the tested sequence
HIDDEN = -1e9  # value of the attention mask where a node does not attend to a node
Floats = NDArray[np.float32]
Past = dict[str, Floats]  # keys and values of earlier nodes by graph input, [nodes, rows, heads, head_dim]


@pytest.fixture(scope="module")
def graph() -> Graph:
    target = make_target(torch.float32, replace(CONFIG, grid=4, spare_positions=16, qkv_bias=True))
    randomise_norms(target.module)
    return target


@pytest.fixture(scope="module")
def session(graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = write_graph(graph, tmp_path_factory.mktemp("int8"), "int8")
    onnx.checker.check_model(path)
    return load_session(path, 2, "cpu")


@pytest.fixture(scope="module")
def embeds() -> Floats:
    return np.random.default_rng(0).standard_normal((2, NODES, CONFIG.hidden_size), dtype=np.float32)


def run_pass(
    session: Any, embeds: Floats, positions: Any, new_mask: NDArray[np.bool_], past: Past, num_masked: int = 1
) -> dict[str, Floats]:
    """Run a forward pass and return the outputs by name."""
    rows, nodes = embeds.shape[:2]
    num_past = len(next(iter(past.values())))
    mask = np.zeros((rows, 1, nodes, num_past + nodes), np.float32)
    mask[..., :num_masked] = HIDDEN
    mask[..., num_past:] = np.where(new_mask, 0, HIDDEN)
    feeds = {"input_embeds": np.ascontiguousarray(embeds), "attention_mask": mask, **past}
    feeds["position_ids"] = np.broadcast_to(positions, (rows, nodes)).astype(np.int64)
    return dict(zip((output.name for output in session.get_outputs()), session.run(None, feeds), strict=True))


def make_masked_past(session: Any, num_masked: int = 1) -> Past:
    """Return a KV cache of zeros for masked nodes. With an empty cache, ONNX Runtime would divide by zero."""
    shapes = {value.name: value.shape[2:] for value in session.get_inputs() if value.name.startswith("past")}
    return {name: np.zeros((num_masked, 2, *shape), np.float32) for name, shape in shapes.items()}


def compute_chain_logits(session: Any, embeds: Floats, sizes: list[int], num_masked: int = 1) -> Floats:
    """Return the logits `[rows, nodes, codes]` of a sequence, run in several forward passes."""
    past = make_masked_past(session, num_masked)
    num_done = 0
    logits = list[Floats]()
    for size in cycle(sizes):
        nodes = min(size, NODES - num_done)
        # The runtime also pads, since ONNX Runtime uses another kernel for passes of one node.
        padded_nodes = max(nodes, 2)
        node_indices = np.minimum(np.arange(num_done, num_done + padded_nodes), NODES - 1)
        new_mask = np.tri(padded_nodes, dtype=bool)
        outputs = run_pass(session, embeds[:, node_indices], node_indices, new_mask, past, num_masked)
        logits.append(outputs["logits"][:, :nodes])
        past = {
            key: np.concatenate([array, outputs[key.replace("past", "new")][:nodes]]) for key, array in past.items()
        }
        num_done += nodes
        if num_done == NODES:
            break
    return np.concatenate(logits, 1)


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, NODES), min_size=1, max_size=6))
def test_logits_do_not_depend_on_the_sizes_of_passes(session: Any, embeds: Floats, sizes: list[int]) -> None:
    np.testing.assert_array_equal(
        compute_chain_logits(session, embeds, sizes), compute_chain_logits(session, embeds, [1])
    )


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_path_of_a_tree_has_exactly_the_logits_of_a_sequence(
    session: Any, embeds: Floats, data: st.DataObject
) -> None:
    parents = [-1, *(data.draw(st.integers(-1, i - 1)) for i in range(1, 12))]
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    depth = mask.sum(1) - 1
    tree_logits = run_pass(session, embeds[:, : len(parents)], depth, mask, make_masked_past(session))["logits"]
    leaf = data.draw(st.integers(0, len(parents) - 1))
    path = np.flatnonzero(mask[leaf])
    path = np.append(path, path[-1:]) if len(path) == 1 else path  # passes of one node use another kernel
    chain_logits = run_pass(
        session, embeds[:, path], depth[path], np.tri(len(path), dtype=bool), make_masked_past(session)
    )["logits"]
    np.testing.assert_array_equal(tree_logits[:, leaf], chain_logits[:, list(path).index(leaf)])


def test_every_weight_is_an_input_of_exactly_one_matmul(graph: Graph, tmp_path: Path) -> None:
    nodes = onnx.load(write_graph(graph, tmp_path, "int8")).graph.node
    weights = {node.output[0] for node in nodes if node.op_type == "DequantizeLinear" and "weight" in node.output[0]}
    multiplied_weights = [node.input[1] for node in nodes if node.op_type == "MatMul" and node.input[1] in weights]
    assert len(multiplied_weights) == len(weights) > CONFIG.num_layers
    assert set(multiplied_weights) == weights


def test_onnx_runtime_runs_at_most_90_operations_per_layer(graph: Graph, tmp_path: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.log_severity_level = 3  # no warning that the file is only for this processor
    onnxruntime.InferenceSession(write_graph(graph, tmp_path, "int8"), options)
    outside_layers = 16  # embeddings, output head, and transposes of inputs and outputs
    assert len(onnx.load(tmp_path / "optimised.onnx").graph.node) <= 90 * CONFIG.num_layers + outside_layers


def test_other_rows_of_a_batch_do_not_change_the_logits_of_a_row(session: Any, embeds: Floats) -> None:
    expected = compute_chain_logits(session, embeds, [3])
    changed_embeds = np.stack([embeds[0], 100 * embeds[1]])
    np.testing.assert_array_equal(compute_chain_logits(session, changed_embeds, [3])[0], expected[0])


@pytest.mark.parametrize("width", [160, 256, 300])
def test_logits_of_wide_heads_do_not_depend_on_masked_nodes(width: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 2 * width, "num_heads": 2, "num_kv_heads": 1, "spare_positions": 200}
    target = make_target(
        torch.float32, replace(CONFIG, rotary="sequence", max_image_tokens=NODES, qkv_bias=True, **sizes)
    )
    with torch.no_grad():
        dict(target.module.named_parameters())["layers.0.attention.qkv.weight"] *= 8
    session = load_session(write_graph(target, tmp_path, "int8"), 2, "cpu")
    embeds = np.random.default_rng(0).standard_normal((2, NODES, 2 * width), dtype=np.float32)
    expected = compute_chain_logits(session, embeds, [2])
    for num_masked in (64, 100, 190):
        np.testing.assert_array_equal(compute_chain_logits(session, embeds, [2], num_masked), expected)


def test_embeddings_of_zeros_give_all_nodes_the_same_logits(session: Any) -> None:
    zero_embeds = np.zeros((2, 3, CONFIG.hidden_size), np.float32)
    outputs = run_pass(session, zero_embeds, 0, np.tri(3, dtype=bool), make_masked_past(session))
    expected = np.broadcast_to(outputs["logits"][0, 0], outputs["logits"].shape)
    np.testing.assert_allclose(outputs["logits"], expected, rtol=0, atol=0.05)


def test_parity_accepts_an_int8_graph_and_detects_changes(graph: Graph, tmp_path: Path) -> None:
    plan = make_graph_file(graph, "int8")
    path = plan.write(tmp_path / "target.onnx")[0]
    assert plan.storage_types["head.weight"] == "columns"
    assert check_graph_parity(graph, path, plan) < 0.1
    with torch.no_grad():
        dict(graph.module.named_parameters())["layers.1.attention.qkv.weight"][-20:] += 0.5
    with pytest.raises(ParityError, match=r"new_key_values\.1\.value by"):
        check_graph_parity(graph, path, plan)


def test_activations_with_outliers_have_the_precision_of_15_bits(graph: Graph, session: Any, embeds: Floats) -> None:
    outliers = embeds * np.where(np.arange(CONFIG.hidden_size) == 3, 30, 1).astype(np.float32)
    outputs = run_pass(session, outliers, np.arange(NODES), np.tri(NODES, dtype=bool), make_masked_past(session))
    inputs = {"input_embeds": outliers, "position_ids": np.tile(np.arange(NODES), (2, 1))}
    inputs["attention_mask"] = np.where(np.tri(NODES, dtype=bool), 0, HIDDEN).astype(np.float32)[None, None]
    inputs |= {name: array[:0] for name, array in make_masked_past(session).items()}
    expected = run_torch_module(graph, inputs, make_graph_file(graph, "int8"))["new_key_values.0.key"]
    assert measure_relative_error(outputs["new_key_values.0.key"], expected) < 5e-4  # would be 4e-2 with 8 bits


def test_every_output_of_a_weight_has_its_own_scale(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight = torch.randn(96, 5) * torch.logspace(-3, 3, 5)
    integers, scales = quantize(weight, "columns")
    assert scales.shape == (1, 5)
    assert (integers.abs().amax(0) == 64).all()  # processors without VNNI add two 8-bit products in 16 bits
    assert ((integers * scales - weight).abs() <= scales * 0.5001).all()
    files = make_graph_file(make_target(torch.bfloat16), "int8").write(tmp_path / "target.onnx")
    monkeypatch.setattr("lantern_rt.export.graph.precision.CHUNK_NUMBERS", 100)
    files_in_chunks = make_graph_file(make_target(torch.bfloat16), "int8").write(tmp_path / "target-in-chunks.onnx")
    initialisers = [[t.raw_data for t in onnx.load(path).graph.initializer] for path in (files[0], files_in_chunks[0])]
    assert initialisers[0] == initialisers[1]


def test_activations_are_rounded_to_a_127th_of_the_maximum() -> None:
    x = torch.tensor([[-2.0, 1.0, 0.004], [0.0, 0.0, 0.0], [1e-30, 0.0, -1e-30]])
    rounded = round_activations(x)
    np.testing.assert_allclose(rounded, [[-2, 64 * 2 / 127, 0], [0, 0, 0], [1e-30, 0, -1e-30]], rtol=1e-6)


def scale_down_residuals(weights: Weights) -> None:
    """Scale the weights of residual blocks down, as in trained decoders, so that eight bits suffice."""
    for name, weight in weights.items():
        if "decoder" in name and (".conv2." in name or "proj_out" in name):
            weight.mul_(0.03)


def make_image_decoder(family: str) -> Graph:
    if family == "emu3":
        graphs = read_emu3(EMU3, grid=4).graphs
    else:
        graphs = make_vq_graphs(read_llamagen_vq(VQ) if family == "llamagen" else read_vqgan(VQGAN)[0], 4)
    return next(graph for graph in graphs if graph.role == "vq_decoder")


def compute_graph_values(path: Path, names: list[str], feeds: dict[str, Any]) -> Any:
    model = onnx.load(path)
    for name in names:
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(names, feeds)


@pytest.mark.parametrize("family", ["llamagen", "chameleon", "emu3"])
def test_images_of_an_int8_decoder_are_near_float32_images(tmp_path: Path, family: str) -> None:
    graph = make_image_decoder(family)
    path = tmp_path / "vq_decoder.onnx"
    scale_down_residuals(graph.module.state_dict())
    plan = make_graph_file(graph)
    quantize_convolutions(plan, measure_activation_ranges(graph, 96))
    plan.write(path)
    mean_levels, psnr = measure_image_difference(compare_graph_with_module(graph, path, [*graph.test_cases]))
    assert mean_levels < 2  # 255 levels from black to white
    assert psnr > 40  # dB
    model = onnx.load(path)
    onnx.checker.check_model(model)
    kernels = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    convolutions = [node for node in model.graph.node if node.op_type == "Conv" and node.input[1] in kernels][:-1]
    assert max(np.abs(kernel).max() for name, kernel in kernels.items() if name.endswith(".int8")) == 64
    feeds = dict(next(iter(graph.test_cases.values())))
    values = compute_graph_values(
        path, [name for node in convolutions for name in (node.input[0], node.output[0])], feeds
    )
    for node, node_input, node_output in zip(convolutions, values[::2], values[1::2], strict=True):
        kernel, bias = (torch.from_numpy(kernels[name].astype(np.float64)) for name in node.input[1:])
        pads = next(attribute.ints for attribute in node.attribute if attribute.name == "pads")
        exact_sums = F.conv2d(torch.from_numpy(node_input.astype(np.float64)), kernel, bias, padding=pads[0])
        # The sums of integers are so small that float32 never rounds, so the order of addition has no effect.
        np.testing.assert_array_equal(node_output, exact_sums.numpy())


def test_onnx_runtime_fuses_every_int8_convolution(tmp_path: Path) -> None:
    graph = make_image_decoder("llamagen")
    plan = make_graph_file(graph)
    quantize_convolutions(plan, measure_activation_ranges(graph, 96))
    options: Any = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "fused.onnx")
    onnxruntime.InferenceSession(plan.write(tmp_path / "vq_decoder.onnx")[0], options)
    ops = [node.op_type for node in onnx.load(tmp_path / "fused.onnx").graph.node]
    assert ops.count("QLinearConv") == sum(name.endswith(".int8") for name in plan.weights) > 20


@pytest.mark.parametrize(("precision", "calibration"), [("int8", "8 pictures of random codes"), ("fp16", None)])
def test_verify_compares_images_of_an_int8_decoder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], precision: str, calibration: str | None
) -> None:
    scaled_vq = copy_weights(tmp_path, VQ, scale_down_residuals)
    config = config_path(C2I)
    export = ["export", "--target", C2I, "--config", config, "--vq-precision", precision, "--vq"]
    if calibration:
        assert run_program([str(word) for word in (*export, VQ, "--output", tmp_path / "bundle")]) == 2
        # The random weights of `VQ` need more than eight bits.
        assert "vq_decoder.onnx in int8: found images" in capsys.readouterr().err
    assert run_program([str(word) for word in (*export, scaled_vq, "--output", tmp_path / "bundle")]) == 0
    manifest = Manifest.model_validate_json((tmp_path / "bundle/bundle.json").read_text())
    assert (manifest.vq_precision, manifest.provenance.calibration) == (precision, calibration)
    weights = onnx.load(tmp_path / "bundle/vq_decoder.onnx").graph.initializer
    assert any(tensor.data_type == onnx.TensorProto.FLOAT for tensor in weights) == (precision == "int8")
    capsys.readouterr()
    for checkpoints, exit_code in (([], 0), ([C2I, scaled_vq, config], 0), ([C2I, VQ, config], 2)):
        assert run_program([str(word) for word in ("verify", tmp_path / "bundle", *checkpoints, "--json")]) == exit_code
        (row,) = json.loads(capsys.readouterr().out)["pictures"]
        assert row["passed"] == (exit_code == 0) == (row["levels"] <= 1 and row["psnr"] >= 40)
