"""Decoders in the layouts of accelerators: against their modules, and against the graphs that hold their weights."""

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

from lantern_rt.engines.device_graph import device_graph
from lantern_rt.engines.ort.session import load_session
from lantern_rt.export import compare
from lantern_rt.export.graph.graphs import HALF_TOLERANCE, Graph, convert_to_float16, target_graph, write_graph
from lantern_rt.export.graph.precision import Rule
from lantern_rt.export.models.decoder import Decoder, DecoderConfig
from lantern_rt.export.models.eagle import EagleDrafter, drafter_graph
from lantern_rt.export.verify import check_parity

Arrays = dict[str, np.ndarray[Any, Any]]
CAPACITY = 64
SPAN = 48
ATTENTION: dict[str | None, dict[str, bool]] = {  # op: options of `device_graph`
    "Attention": {},
    "MultiHeadAttention": {"multi_head": True},
    None: {"basic_ops": True},
}
CONFIGS = {
    "grouped keys": TINY,
    "a key for each query": replace(TINY, num_kv_heads=4),
    "heads whose root is no power of two": replace(TINY, num_heads=2, num_kv_heads=2),
    "biased projections": replace(TINY, qkv_bias=True, rope_style="half", rotary="sequence"),
    "wide heads, normed by RMS": replace(
        TINY, query_key_norm=True, rms_head_norm=True, head_width=24, rope_style="half", rotary="sequence"
    ),
    "normed queries": replace(TINY, query_key_norm=True, rope_style="half", rotary="sequence"),
}


def made(config: DecoderConfig, drafts: bool) -> Graph:
    torch.manual_seed(0)
    if drafts:
        head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        return drafter_graph(EagleDrafter(replace(config, final_norm=False), head, bias=True).eval())
    return target_graph(Decoder(config).eval(), torch.randn(config.vocab_size, config.hidden_size))


def side_by_side(arrays: Arrays, names: list[str]) -> Arrays:
    """A case of the past-first graph in the tensors of the other one; its past ends where new nodes are written."""
    rows, nodes = arrays["position_ids"].shape
    past = arrays["attention_mask"].shape[3] - nodes
    seen = np.zeros((rows, nodes, SPAN), bool)
    seen[:, :, : past + nodes] = arrays["attention_mask"][:, 0] == 0
    words = np.packbits(seen, axis=-1, bitorder="little").view("<u2").astype(np.int32)
    feeds = {"position_ids": arrays["position_ids"], "seen": words, "write": np.full(rows, past)}
    every = np.arange(rows * nodes, dtype=np.int32).reshape(rows, nodes)
    if "input_ids" in arrays:
        feeds |= {"token_ids": arrays["input_ids"].astype(np.int32), "hidden_ids": every}
        feeds["hidden"] = arrays["target_hidden"]
    else:
        feeds |= {"token_ids": every, "embeddings": arrays["input_embeds"].reshape(rows * nodes, -1)}
    for name in names:
        before = arrays[name].transpose(1, 2, 0, 3)  # [rows, num_kv_heads, past, head_dim]
        feeds[name] = np.zeros((*before.shape[:2], CAPACITY, before.shape[3]), before.dtype)
        feeds[name][:, :, :past] = before
    return feeds


@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
@pytest.mark.parametrize("drafts", [False, True], ids=["target", "drafter"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_cache_written_side_by_side_gives_what_the_past_first_graph_gives(
    tmp_path: Path, config: DecoderConfig, drafts: bool, half: bool
) -> None:
    graph = convert_to_float16(made(config, drafts)) if half else made(config, drafts)
    write_graph(graph, tmp_path)
    path = tmp_path / f"{graph.role}.onnx"
    spec = (drafter_spec_of if drafts else spec_of)(config)
    most = max(arrays["position_ids"].shape[1] for arrays in graph.cases.values())
    device = device_graph(path, spec, drafts, graph.compute, capacity=CAPACITY, max_nodes=most)
    assert device.dtype == ("float16" if half else "float32")
    plain = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    session = load_session(device.model, 1, "cpu", folder=tmp_path)
    past = [tensor.name for tensor in device.inputs if tensor.name.startswith("past_")]
    for name in ("tree", "rows of different length"):
        arrays = {
            key: array.clip(-6e4).astype(np.float16) if half and array.dtype == np.float32 else array
            for key, array in graph.cases[name].items()
        }
        nodes = arrays["position_ids"].shape[1]
        logits, hidden, *new = plain.run(None, arrays)
        feeds = side_by_side(arrays, past)
        found = dict(zip((o.name for o in session.get_outputs()), session.run(None, feeds), strict=True))
        pairs = {"logits": logits, "hidden_states": hidden}
        first = int(feeds["write"][0])
        for key, array in zip(past, new, strict=True):
            cache = found[key.replace("past", "present", 1)]
            pairs[key] = array.transpose(1, 2, 0, 3)
            found[key] = cache[:, :, first : first + nodes]
            np.testing.assert_array_equal(cache[:, :, :first], feeds[key][:, :, :first])
        for key, expected in pairs.items():
            most = (HALF_TOLERANCE if half else 1e-4) * np.abs(expected).max()
            np.testing.assert_allclose(found[key], expected, rtol=0, atol=most, err_msg=f"{name}: {key}")


@pytest.mark.skipif(onnx.__version__ < "1.23", reason="its evaluator has no sums of bfloat16")
@pytest.mark.parametrize("rule", ["bf16", "int4-weights"])
@pytest.mark.parametrize("drafts", [False, True], ids=["target", "drafter"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_computed_in_bfloat16_it_is_what_the_past_first_graph_gives_up_to_rounding(
    tmp_path: Path, config: DecoderConfig, drafts: bool, rule: Rule
) -> None:
    """By ONNX's reference evaluator: ONNX Runtime has it on GPUs alone."""
    graph = replace(made(config, drafts), compute="bfloat16")
    (path,) = write_graph(graph, tmp_path, rule)
    spec = (drafter_spec_of if drafts else spec_of)(config)
    device = device_graph(path, spec, drafts, "bfloat16", capacity=CAPACITY)
    arrays = dict(graph.cases["tree"])
    past = [tensor.name for tensor in device.inputs if tensor.name.startswith("past_")]
    feeds = side_by_side(arrays, past)
    feeds |= {name: feeds[name].astype(ml_dtypes.bfloat16) for name in past}
    found = ReferenceEvaluator(onnx.load_from_string(device.model)).run(["logits", "hidden_states"], feeds)
    plain = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for array, expected in zip(found, plain.run(["logits", "hidden_states"], arrays), strict=True):
        apart = np.abs(array - expected).max() / np.abs(expected).max()
        assert apart < 0.05  # of 8 bits
    assert (found[1].astype(ml_dtypes.bfloat16) == found[1]).all()


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("drafts", [False, True], ids=["target", "drafter"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_cache_written_in_any_order_gives_what_the_module_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: DecoderConfig, drafts: bool, attention: str | None
) -> None:
    half = attention == "MultiHeadAttention"
    graph = convert_to_float16(made(config, drafts)) if half else made(config, drafts)
    (path,) = write_graph(graph, tmp_path)
    models = []

    def note(*arguments: Any, **options: Any) -> Any:
        models.append(device_graph(*arguments, **options, **ATTENTION[attention]))
        return models[-1]

    monkeypatch.setattr(compare, "device_graph", note)
    check_parity(graph, path)
    written = onnx.load_from_string(models[0].model).graph
    caches = [one.type.tensor_type.shape.dim for one in written.input if one.name.startswith("past_")]
    assert all(dims[-1].dim_value <= 8 for dims in caches), "a thread of CUDA writes what an index stands for"
    nodes = [node for node in written.node if "Attention" in node.op_type]
    assert {node.op_type for node in nodes} == ({attention} if attention else set())
    for node in nodes:  # or CUDA copies keys for every query
        assert {one.i for one in node.attribute if one.name.endswith("num_heads")} == {config.num_kv_heads}
