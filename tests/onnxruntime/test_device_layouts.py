"""Decoder graphs for accelerators (device graphs), compared with torch modules and with the exported graphs."""

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
from tiny_graphs import ADAPTIVE_CONFIG, TINY_CONFIG, make_decoder, write_graph

from lantern_rt.bundle.manifest import DecoderSizes
from lantern_rt.engines.device_graph import DeviceGraphOptions, make_device_graph
from lantern_rt.export import compare
from lantern_rt.export.graph.graphs import Graph, convert_to_float16, make_target_graph
from lantern_rt.export.graph.precision import StorageRule
from lantern_rt.export.models.decoder import DecoderConfig
from lantern_rt.export.models.eagle import EagleDrafter, make_drafter_graph
from lantern_rt.export.verify import check_graph_parity

Arrays = dict[str, np.ndarray[Any, Any]]
CAPACITY = 64  # columns of the KV cache
MASK_COLUMNS = 48  # columns of the attention mask, a multiple of 16
ATTENTION_OPTIONS: dict[str | None, dict[str, bool]] = {  # attention op: options of the graph
    "Attention": {},
    "MultiHeadAttention": {"use_multi_head_op": True},
    None: {"basic_ops_only": True},
}
CONFIGS = {
    "grouped keys": TINY_CONFIG,
    "a key for each query": replace(TINY_CONFIG, num_kv_heads=4),
    "head width whose root is not a power of two": replace(TINY_CONFIG, num_heads=2, num_kv_heads=2),
    "biased projections": replace(TINY_CONFIG, qkv_bias=True, rope_style="half", rotary="sequence"),
    "wide heads with RMS norm": replace(
        TINY_CONFIG, query_key_norm=True, rms_head_norm=True, head_width=24, rope_style="half", rotary="sequence"
    ),
    "queries with layer norm": replace(TINY_CONFIG, query_key_norm=True, rope_style="half", rotary="sequence"),
    "adaptive norms": ADAPTIVE_CONFIG,
}
# Each configuration of a target; adaptive norms need a class, which no drafter has.
DECODERS = [
    pytest.param(config, is_drafter, id=f"{name}, {'drafter' if is_drafter else 'target'}")
    for name, config in CONFIGS.items()
    for is_drafter in (False, True)
    if not (is_drafter and config.conditions)
]


def make_graph(config: DecoderConfig, is_drafter: bool) -> Graph:
    torch.manual_seed(0)
    if is_drafter:
        head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        return make_drafter_graph(EagleDrafter(replace(config, final_norm=False), head, bias=True).eval())
    return make_target_graph(make_decoder(config), torch.randn(config.vocab_size, config.hidden_size))


def make_spec(config: DecoderConfig, is_drafter: bool) -> DecoderSizes:
    return replace(config, final_norm=False).make_drafter_spec() if is_drafter else config.make_target_spec()


def convert_to_device_inputs(arrays: Arrays, cache_names: list[str]) -> Arrays:
    rows, nodes = arrays["position_ids"].shape
    past_length = arrays["attention_mask"].shape[3] - nodes
    mask = np.zeros((rows, nodes, MASK_COLUMNS), bool)
    mask[:, :, : past_length + nodes] = arrays["attention_mask"][:, 0] == 0
    mask_words = np.packbits(mask, axis=-1, bitorder="little").view("<u2").astype(np.int32)
    feeds = {"position_ids": arrays["position_ids"], "seen": mask_words, "write": np.full(rows, past_length)}
    node_numbers = np.arange(rows * nodes, dtype=np.int32).reshape(rows, nodes)
    if "input_ids" in arrays:
        feeds |= {"token_ids": arrays["input_ids"].astype(np.int32), "hidden_ids": node_numbers}
        feeds["hidden"] = arrays["target_hidden"]
    else:
        feeds |= {"token_ids": node_numbers, "embeddings": arrays["input_embeds"].reshape(rows * nodes, -1)}
    for name in cache_names:
        past_values = arrays[name].transpose(1, 2, 0, 3)  # [rows, num_kv_heads, past, head_dim]
        feeds[name] = np.zeros((*past_values.shape[:2], CAPACITY, past_values.shape[3]), past_values.dtype)
        feeds[name][:, :, :past_length] = past_values
    return feeds


@pytest.mark.skipif(onnx.__version__ < "1.23", reason="the reference evaluator of older versions cannot add bfloat16")
@pytest.mark.parametrize("weight_precision", ["bf16", "int4-weights"])
@pytest.mark.parametrize(("config", "is_drafter"), DECODERS)
def test_a_bfloat16_graph_agrees_up_to_rounding(
    tmp_path: Path, config: DecoderConfig, is_drafter: bool, weight_precision: StorageRule
) -> None:
    """Compare with ONNX's reference evaluator, as ONNX Runtime supports bfloat16 only on GPUs."""
    graph = replace(make_graph(config, is_drafter), compute_type="bfloat16")
    path = write_graph(graph, tmp_path, weight_precision)
    spec = make_spec(config, is_drafter)
    device_graph = make_device_graph(path, spec, DeviceGraphOptions("bfloat16", capacity=CAPACITY))
    arrays = dict(graph.test_cases["tree"])
    past_names = [tensor.name for tensor in device_graph.inputs if tensor.name.startswith("past_")]
    feeds = convert_to_device_inputs(arrays, past_names)
    feeds |= {name: feeds[name].astype(ml_dtypes.bfloat16) for name in past_names}
    outputs = ReferenceEvaluator(onnx.load_from_string(device_graph.model_bytes)).run(
        ["logits", "hidden_states"], feeds
    )
    exported_session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for array, expected in zip(outputs, exported_session.run(["logits", "hidden_states"], arrays), strict=True):
        relative_error = np.abs(array - expected).max() / np.abs(expected).max()
        assert relative_error < 0.05  # bfloat16 has 8 bits of precision
    assert (outputs[1].astype(ml_dtypes.bfloat16) == outputs[1]).all()


@pytest.mark.parametrize("attention", ATTENTION_OPTIONS)
@pytest.mark.parametrize(("config", "is_drafter"), DECODERS)
def test_any_order_of_cache_columns_gives_the_modules_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: DecoderConfig, is_drafter: bool, attention: str | None
) -> None:
    is_float16 = attention == "MultiHeadAttention"
    graph = convert_to_float16(make_graph(config, is_drafter)) if is_float16 else make_graph(config, is_drafter)
    path = write_graph(graph, tmp_path)
    device_graphs = []

    def record_graph(path: Path, spec: DecoderSizes, options: DeviceGraphOptions) -> Any:
        device_graphs.append(make_device_graph(path, spec, options._replace(**ATTENTION_OPTIONS[attention])))
        return device_graphs[-1]

    monkeypatch.setattr(compare, "make_device_graph", record_graph)
    check_graph_parity(graph, path)
    written = onnx.load_from_string(device_graphs[0].model_bytes).graph
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
