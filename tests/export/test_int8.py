"""Int8 matmuls: the output of a node does not depend on the pass, so that exact methods stay exact."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from small_models import CONFIG, make_target, randomise_norms

from lantern_rt.engines.ort.session import load_session
from lantern_rt.errors import ParityError
from lantern_rt.export.compare import run_torch_module
from lantern_rt.export.graph.graphs import Graph, plan_graph
from lantern_rt.export.graph.precision import quantize, round_activations
from lantern_rt.export.measures import measure_relative_error
from lantern_rt.export.verify import check_graph_parity

NODES = 24
HIDDEN = -1e9
Floats = NDArray[np.float32]
Past = dict[str, Floats]


@pytest.fixture(scope="module")
def graph() -> Graph:
    target = make_target(torch.float32, replace(CONFIG, grid=4, spare_positions=16, qkv_bias=True))
    randomise_norms(target.module)
    return target


@pytest.fixture(scope="module")
def session(graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = plan_graph(graph, "int8").write(tmp_path_factory.mktemp("int8") / "target.onnx")[0]
    onnx.checker.check_model(path)
    return load_session(path, 2, "cpu")


@pytest.fixture(scope="module")
def embeds() -> Floats:
    return np.random.default_rng(0).standard_normal((2, NODES, CONFIG.hidden_size), dtype=np.float32)


def run(
    session: Any, embeds: Floats, positions: Any, among: NDArray[np.bool_], past: Past, hidden: int = 1
) -> dict[str, Floats]:
    """Run a pass.

    Args:
        session: session of the graph.
        embeds: inputs `[rows, nodes, width]`.
        positions: positions of the nodes.
        among: true where a node attends to a node, `[nodes, nodes]`.
        past: keys and values of earlier nodes.
        hidden: number of first columns of the past that are masked.
    """
    rows, nodes = embeds.shape[:2]
    columns = len(next(iter(past.values())))
    mask = np.zeros((rows, 1, nodes, columns + nodes), np.float32)
    mask[..., :hidden] = HIDDEN  # ONNX Runtime would divide by zero without any column
    mask[..., columns:] = np.where(among, 0, HIDDEN)
    feeds = {"input_embeds": np.ascontiguousarray(embeds), "attention_mask": mask, **past}
    feeds["position_ids"] = np.broadcast_to(positions, (rows, nodes)).astype(np.int64)
    return dict(zip((output.name for output in session.get_outputs()), session.run(None, feeds), strict=True))


def masked_past(session: Any, hidden: int = 1) -> Past:
    """Return a past with only masked columns."""
    shapes = {value.name: value.shape[2:] for value in session.get_inputs() if value.name.startswith("past")}
    return {name: np.zeros((hidden, 2, *shape), np.float32) for name, shape in shapes.items()}


def decode(session: Any, embeds: Floats, sizes: list[int], hidden: int = 1) -> Floats:
    """Return the logits `[rows, nodes, codes]` of a chain, run in passes of these sizes, repeated."""
    past = masked_past(session, hidden)
    num_done = 0
    logits = list[Floats]()
    for size in cycle(sizes):
        nodes = min(size, NODES - num_done)
        padded_nodes = max(nodes, 2)  # as the runtime does, since passes of one node use another kernel
        node_indices = np.minimum(np.arange(num_done, num_done + padded_nodes), NODES - 1)
        outputs = run(session, embeds[:, node_indices], node_indices, np.tri(padded_nodes, dtype=bool), past, hidden)
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
def test_a_chain_has_the_same_bits_however_it_is_split_into_passes(
    session: Any, embeds: Floats, sizes: list[int]
) -> None:
    np.testing.assert_array_equal(decode(session, embeds, sizes), decode(session, embeds, [1]))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_path_of_a_tree_has_the_bits_of_a_chain(session: Any, embeds: Floats, data: st.DataObject) -> None:
    parents = [-1, *(data.draw(st.integers(-1, i - 1)) for i in range(1, 12))]
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    depth = mask.sum(1) - 1
    tree = run(session, embeds[:, : len(parents)], depth, mask, masked_past(session))["logits"]
    leaf = data.draw(st.integers(0, len(parents) - 1))
    path = np.flatnonzero(mask[leaf])
    path = np.append(path, path[-1:]) if len(path) == 1 else path  # never a single node
    chain = run(session, embeds[:, path], depth[path], np.tri(len(path), dtype=bool), masked_past(session))["logits"]
    np.testing.assert_array_equal(tree[:, leaf], chain[:, list(path).index(leaf)])


def test_a_pass_reads_every_weight_once(graph: Graph, tmp_path: Path) -> None:
    nodes = onnx.load(plan_graph(graph, "int8").write(tmp_path / "target.onnx")[0]).graph.node
    weights = {node.output[0] for node in nodes if node.op_type == "DequantizeLinear" and "weight" in node.output[0]}
    products = [node.input[1] for node in nodes if node.op_type == "MatMul" and node.input[1] in weights]
    assert len(products) == len(weights) > CONFIG.num_layers
    assert set(products) == weights


def test_onnx_runtime_runs_at_most_90_operations_per_layer(graph: Graph, tmp_path: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.log_severity_level = 3  # warns that the file is only for this processor
    onnxruntime.InferenceSession(plan_graph(graph, "int8").write(tmp_path / "target.onnx")[0], options)
    outside_layers = 16  # embeddings, output head, and transposes of inputs and outputs
    assert len(onnx.load(tmp_path / "optimised.onnx").graph.node) <= 90 * CONFIG.num_layers + outside_layers


def test_other_rows_of_a_batch_change_masked_past(session: Any, embeds: Floats) -> None:
    both = decode(session, embeds, [3])
    other = np.stack([embeds[0], 100 * embeds[1]])
    np.testing.assert_array_equal(decode(session, other, [3])[0], both[0])


@pytest.mark.parametrize("width", [160, 256, 300])
def test_wide_heads_have_the_same_bits_for_any_number_of_columns(width: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 2 * width, "num_heads": 2, "num_kv_heads": 1, "spare_positions": 200}
    target = make_target(
        torch.float32, replace(CONFIG, rotary="sequence", max_image_tokens=NODES, qkv_bias=True, **sizes)
    )
    with torch.no_grad():
        dict(target.module.named_parameters())["layers.0.attention.qkv.weight"] *= 8
    session = load_session(plan_graph(target, "int8").write(tmp_path / "target.onnx")[0], 2, "cpu")
    embeds = np.random.default_rng(0).standard_normal((2, NODES, 2 * width), dtype=np.float32)
    expected = decode(session, embeds, [2])
    for hidden in (64, 100, 190):
        np.testing.assert_array_equal(decode(session, embeds, [2], hidden), expected)


def test_nodes_of_zeros_have_the_outputs_of_biases_alone(session: Any) -> None:
    empty = np.zeros((2, 3, CONFIG.hidden_size), np.float32)
    outputs = run(session, empty, 0, np.tri(3, dtype=bool), masked_past(session))
    expected = np.broadcast_to(outputs["logits"][0, 0], outputs["logits"].shape)
    np.testing.assert_allclose(outputs["logits"], expected, rtol=0, atol=0.05)


def test_the_graph_agrees_with_the_module_on_rounded_activations(graph: Graph, tmp_path: Path) -> None:
    plan = plan_graph(graph, "int8")
    path = plan.write(tmp_path / "target.onnx")[0]
    assert plan.storage_types["head.weight"] == "columns"
    assert check_graph_parity(graph, path, plan) < 0.1
    with torch.no_grad():
        dict(graph.module.named_parameters())["layers.1.attention.qkv.weight"][-20:] += 0.5
    with pytest.raises(ParityError, match=r"new_key_values\.1\.value by"):
        check_graph_parity(graph, path, plan)


def test_activations_with_outliers_have_15_bits(graph: Graph, session: Any, embeds: Floats) -> None:
    outliers = embeds * np.where(np.arange(CONFIG.hidden_size) == 3, 30, 1).astype(np.float32)
    outputs = run(session, outliers, np.arange(NODES), np.tri(NODES, dtype=bool), masked_past(session))
    inputs = {"input_embeds": outliers, "position_ids": np.tile(np.arange(NODES), (2, 1))}
    inputs["attention_mask"] = np.where(np.tri(NODES, dtype=bool), 0, HIDDEN).astype(np.float32)[None, None]
    inputs |= {name: array[:0] for name, array in masked_past(session).items()}
    exact = run_torch_module(graph, inputs, plan_graph(graph, "int8"))["new_key_values.0.key"]
    assert measure_relative_error(outputs["new_key_values.0.key"], exact) < 5e-4  # would be 4e-2 with 8 bits


def test_every_output_of_a_matrix_has_a_separate_scale(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight = torch.randn(96, 5) * torch.logspace(-3, 3, 5)
    integers, scales = quantize(weight, "columns")
    assert scales.shape == (1, 5)
    assert (integers.abs().amax(0) == 64).all()  # processors without VNNI add two 8-bit products in 16 bits
    assert ((integers * scales - weight).abs() <= scales * 0.5001).all()
    whole = plan_graph(make_target(torch.bfloat16), "int8").write(tmp_path / "whole.onnx")
    monkeypatch.setattr("lantern_rt.export.graph.precision.CHUNK_NUMBERS", 100)
    parts = plan_graph(make_target(torch.bfloat16), "int8").write(tmp_path / "parts.onnx")
    initialisers = [[t.raw_data for t in onnx.load(files[0]).graph.initializer] for files in (whole, parts)]
    assert initialisers[0] == initialisers[1]


def test_activations_are_rounded_to_127_steps_in_each_direction() -> None:
    x = torch.tensor([[-2.0, 1.0, 0.004], [0.0, 0.0, 0.0], [1e-30, 0.0, -1e-30]])
    rounded = round_activations(x)
    np.testing.assert_allclose(rounded, [[-2, 64 * 2 / 127, 0], [0, 0, 0], [1e-30, 0, -1e-30]], rtol=1e-6)
