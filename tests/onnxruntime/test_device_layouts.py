"""Decoders in the layouts of accelerators, compared with their modules and with the exported graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from tiny_graphs import TINY
from tiny_rig import drafter_spec_of, spec_of

from lantern_rt.engines.device_graph import make_device_graph
from lantern_rt.engines.ort.session import load_session
from lantern_rt.export import compare
from lantern_rt.export.graph.graphs import HALF_TOLERANCE, Graph, convert_to_float16, make_target_graph, write_graph
from lantern_rt.export.graph.precision import StorageRule
from lantern_rt.export.models.decoder import Decoder, DecoderConfig
from lantern_rt.export.models.eagle import EagleDrafter, make_drafter_graph
from lantern_rt.export.verify import check_graph_parity

Arrays = dict[str, np.ndarray[Any, Any]]
CAPACITY = 64
SPAN = 48
ATTENTION: dict[str | None, dict[str, bool]] = {  # attention op: options of `make_device_graph`
    "Attention": {},
    "MultiHeadAttention": {"use_multi_head_op": True},
    None: {"basic_ops_only": True},
}
CONFIGS = {
    "grouped keys": TINY,
    "a key for each query": replace(TINY, num_kv_heads=4),
    "head width whose root is not a power of two": replace(TINY, num_heads=2, num_kv_heads=2),
    "biased projections": replace(TINY, qkv_bias=True, rope_style="half", rotary="sequence"),
    "wide heads with RMS norm": replace(
        TINY, query_key_norm=True, rms_head_norm=True, head_width=24, rope_style="half", rotary="sequence"
    ),
    "queries with layer norm": replace(TINY, query_key_norm=True, rope_style="half", rotary="sequence"),
}


def make_graph(config: DecoderConfig, drafts: bool) -> Graph:
    torch.manual_seed(0)
    if drafts:
        head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        return make_drafter_graph(EagleDrafter(replace(config, final_norm=False), head, bias=True).eval())
    return make_target_graph(Decoder(config).eval(), torch.randn(config.vocab_size, config.hidden_size))


def device_inputs(arrays: Arrays, names: list[str]) -> Arrays:
    """Convert a case of the exported graph to inputs of the device graph, whose cache includes the new nodes.

    Args:
        arrays: inputs of the exported graph.
        names: names of the cache tensors.
    """
    rows, nodes = arrays["position_ids"].shape
    past = arrays["attention_mask"].shape[3] - nodes
    mask = np.zeros((rows, nodes, SPAN), bool)
    mask[:, :, : past + nodes] = arrays["attention_mask"][:, 0] == 0
    words = np.packbits(mask, axis=-1, bitorder="little").view("<u2").astype(np.int32)
    feeds = {"position_ids": arrays["position_ids"], "seen": words, "write": np.full(rows, past)}
    node_numbers = np.arange(rows * nodes, dtype=np.int32).reshape(rows, nodes)
    if "input_ids" in arrays:
        feeds |= {"token_ids": arrays["input_ids"].astype(np.int32), "hidden_ids": node_numbers}
        feeds["hidden"] = arrays["target_hidden"]
    else:
        feeds |= {"token_ids": node_numbers, "embeddings": arrays["input_embeds"].reshape(rows * nodes, -1)}
    for name in names:
        past_values = arrays[name].transpose(1, 2, 0, 3)  # [rows, num_kv_heads, past, head_dim]
        feeds[name] = np.zeros((*past_values.shape[:2], CAPACITY, past_values.shape[3]), past_values.dtype)
        feeds[name][:, :, :past] = past_values
    return feeds


@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
@pytest.mark.parametrize("drafts", [False, True], ids=["target", "drafter"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_graph_that_appends_to_its_cache_computes_the_outputs_of_the_exported_graph(
    tmp_path: Path, config: DecoderConfig, drafts: bool, half: bool
) -> None:
    graph = convert_to_float16(make_graph(config, drafts)) if half else make_graph(config, drafts)
    write_graph(graph, tmp_path)
    path = tmp_path / f"{graph.role}.onnx"
    spec = (drafter_spec_of if drafts else spec_of)(config)
    max_nodes = max(arrays["position_ids"].shape[1] for arrays in graph.test_cases.values())
    device = make_device_graph(path, spec, drafts, graph.compute_type, capacity=CAPACITY, max_nodes=max_nodes)
    assert device.dtype == ("float16" if half else "float32")
    exported_session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    session = load_session(device.model_bytes, 1, "cpu", weights_folder=tmp_path)
    past = [tensor.name for tensor in device.inputs if tensor.name.startswith("past_")]
    for name in ("tree", "rows of different length"):
        arrays = {
            key: array.clip(-6e4).astype(np.float16) if half and array.dtype == np.float32 else array
            for key, array in graph.test_cases[name].items()
        }
        nodes = arrays["position_ids"].shape[1]
        logits, hidden, *new = exported_session.run(None, arrays)
        feeds = device_inputs(arrays, past)
        outputs = dict(zip((o.name for o in session.get_outputs()), session.run(None, feeds), strict=True))
        expected_outputs = {"logits": logits, "hidden_states": hidden}
        start = int(feeds["write"][0])
        for key, array in zip(past, new, strict=True):
            cache = outputs[key.replace("past", "present", 1)]
            expected_outputs[key] = array.transpose(1, 2, 0, 3)
            outputs[key] = cache[:, :, start : start + nodes]
            np.testing.assert_array_equal(cache[:, :, :start], feeds[key][:, :, :start])
        for key, expected in expected_outputs.items():
            tolerance = (HALF_TOLERANCE if half else 1e-4) * np.abs(expected).max()
            np.testing.assert_allclose(outputs[key], expected, rtol=0, atol=tolerance, err_msg=f"{name}: {key}")


@pytest.mark.skipif(onnx.__version__ < "1.23", reason="its evaluator has no sums of bfloat16")
@pytest.mark.parametrize("rule", ["bf16", "int4-weights"])
@pytest.mark.parametrize("drafts", [False, True], ids=["target", "drafter"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_bfloat16_device_graph_agrees_with_the_exported_graph_up_to_rounding(
    tmp_path: Path, config: DecoderConfig, drafts: bool, rule: StorageRule
) -> None:
    """Compare with ONNX's reference evaluator, as ONNX Runtime supports bfloat16 only on GPUs."""
    graph = replace(make_graph(config, drafts), compute_type="bfloat16")
    (path,) = write_graph(graph, tmp_path, rule)
    spec = (drafter_spec_of if drafts else spec_of)(config)
    device = make_device_graph(path, spec, drafts, "bfloat16", capacity=CAPACITY)
    arrays = dict(graph.test_cases["tree"])
    past = [tensor.name for tensor in device.inputs if tensor.name.startswith("past_")]
    feeds = device_inputs(arrays, past)
    feeds |= {name: feeds[name].astype(ml_dtypes.bfloat16) for name in past}
    outputs = ReferenceEvaluator(onnx.load_from_string(device.model_bytes)).run(["logits", "hidden_states"], feeds)
    exported_session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for array, expected in zip(outputs, exported_session.run(["logits", "hidden_states"], arrays), strict=True):
        relative_error = np.abs(array - expected).max() / np.abs(expected).max()
        assert relative_error < 0.05  # bfloat16 has 8 bits of precision
    assert (outputs[1].astype(ml_dtypes.bfloat16) == outputs[1]).all()


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("drafts", [False, True], ids=["target", "drafter"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_graph_with_cache_columns_in_any_order_computes_the_outputs_of_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: DecoderConfig, drafts: bool, attention: str | None
) -> None:
    half = attention == "MultiHeadAttention"
    graph = convert_to_float16(make_graph(config, drafts)) if half else make_graph(config, drafts)
    (path,) = write_graph(graph, tmp_path)
    models = []

    def record_graph(*arguments: Any, **options: Any) -> Any:
        models.append(make_device_graph(*arguments, **options, **ATTENTION[attention]))
        return models[-1]

    monkeypatch.setattr(compare, "make_device_graph", record_graph)
    check_graph_parity(graph, path)
    written = onnx.load_from_string(models[0].model_bytes).graph
    caches = [value.type.tensor_type.shape.dim for value in written.input if value.name.startswith("past_")]
    assert all(dims[-1].dim_value <= 8 for dims in caches), (
        "a CUDA thread writes all values of one index, so there must be few"
    )
    nodes = [node for node in written.node if "Attention" in node.op_type]
    assert {node.op_type for node in nodes} == ({attention} if attention else set())
    for node in nodes:  # otherwise CUDA copies keys for every query head
        assert {attribute.i for attribute in node.attribute if attribute.name.endswith("num_heads")} == {
            config.num_kv_heads
        }
