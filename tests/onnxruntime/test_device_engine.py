"""ONNX Runtime engines with device memory: KV caches, hidden states, memory reuse, and invalid graph files."""

from __future__ import annotations

import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_backends import SINGLE_THREAD, SMALL_CONFIG, SmallModel
from refusals import expect_error
from tiny_graphs import TINY_CONFIG, write_graph

from lantern_rt.engines.contracts import TensorSpec
from lantern_rt.engines.device_engine import DeviceCache
from lantern_rt.engines.graph_writer import GraphWriter
from lantern_rt.engines.ort.cache_pool import CachePool
from lantern_rt.engines.ort.device import GraphTensors, OrtDevice
from lantern_rt.engines.ort.engine import OrtDeviceEngine
from lantern_rt.engines.ort.providers import PROVIDERS
from lantern_rt.errors import BundleError
from lantern_rt.export.graph.graphs import make_target_graph
from lantern_rt.export.models.decoder import Decoder, DecoderConfig
from lantern_rt.methods import Sampling
from lantern_rt.runtime.device import SamplingRequest
from lantern_rt.runtime.engine import Floats, HiddenStateView, PassInput
from lantern_rt.runtime.noise import Noise
from lantern_rt.runtime.passes import PrefixBatch, build_committed_mask
from lantern_rt.runtime.state import PrefixRow

RNG = np.random.default_rng(0)
PREFIXES = RNG.standard_normal((8, SMALL_CONFIG.prefix, SMALL_CONFIG.hidden_size), np.float32)
NO_PADDING = np.zeros((1, 0), bool)
CODE_EMBEDDINGS = np.zeros((TINY_CONFIG.vocab_size, TINY_CONFIG.hidden_size), np.float32)


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    return SmallModel(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def target(small_model: SmallModel) -> OrtDeviceEngine:
    engine = small_model.load_on_backend("onnxruntime, device").target
    assert isinstance(engine, OrtDeviceEngine)
    return engine


@pytest.fixture(scope="module")
def drafter(small_model: SmallModel, target: OrtDeviceEngine) -> OrtDeviceEngine:
    return OrtDeviceEngine(
        small_model.folder / "drafter.onnx", small_model.drafter_spec, None, SINGLE_THREAD, target.device
    )


def make_causal_pass(engine: OrtDeviceEngine, cache: DeviceCache, tokens: Any, hidden: Any = None) -> PassInput:
    nodes = np.array(tokens)
    mask, past_length = build_committed_mask(engine, cache, cache.lengths, nodes.shape[1], NO_PADDING)
    mask[:, :, past_length:] = np.tri(nodes.shape[1], dtype=bool)
    positions = np.minimum(cache.lengths[:, None] + np.arange(nodes.shape[1]), SMALL_CONFIG.num_rope_positions - 1)
    return PassInput(positions, mask, nodes, hidden=hidden)


def make_filled_cache(engine: OrtDeviceEngine, first_prefix: int, codes: list[list[int]], capacity: int) -> DeviceCache:
    cache = engine.make_cache(len(codes), capacity)
    prefixes = PrefixBatch(
        [
            PrefixRow(row, np.ones(SMALL_CONFIG.prefix, bool))
            for row in PREFIXES[first_prefix : first_prefix + len(codes)]
        ]
    )
    output = engine.run(prefixes.build_prefill_input(engine, cache), cache)
    cache.append(output.new_kv, [np.arange(SMALL_CONFIG.prefix)] * len(codes))
    max_length = max(map(len, codes))
    for start in range(0, max_length, 8):
        row_chunks = [row_codes[start : start + 8] for row_codes in codes]
        tokens = np.zeros((len(codes), max(2, *map(len, row_chunks))), np.int64)
        for row, row_chunk in enumerate(row_chunks):
            tokens[row, : len(row_chunk)] = row_chunk
        output = engine.run(make_causal_pass(engine, cache, tokens), cache)
        cache.append(output.new_kv, [np.arange(len(row_chunk)) for row_chunk in row_chunks])
    return cache


def compute_next_logits(engine: OrtDeviceEngine, cache: DeviceCache, codes: list[int]) -> Floats:
    """Return logits `[rows, vocabulary]` after one more code in each row; the code is not appended to the KV cache."""
    logits: Floats = engine.run(make_causal_pass(engine, cache, [[code, 0] for code in codes]), cache).logits[:, 0]
    return logits


CODES: list[list[int]] = [[0, 1, 2], [3] * 20, [1, 2], [], [2, 0, 3, 1] * 22]


def test_a_nearly_full_row_shares_passes_with_many_nodes(target: OrtDeviceEngine) -> None:
    full_row = [1] * 118
    short_row = [2, 1]
    cache = make_filled_cache(target, 0, [full_row, short_row], capacity=127)
    codes = RNG.integers(0, 4, (2, 16))
    output = target.run(make_causal_pass(target, cache, codes), cache)
    cache.append(output.new_kv, [np.arange(4), np.arange(16)])
    for row, (row_codes, count) in enumerate([(full_row, 6), (short_row, 16)]):  # 6 columns are free
        alone = make_filled_cache(target, row, [row_codes], capacity=190)
        expected = target.run(make_causal_pass(target, alone, codes[row : row + 1, :count]), alone).logits[0, :count]
        np.testing.assert_allclose(output.logits[row, :count], expected, atol=1e-5)
    expected = make_filled_cache(target, 0, [[*full_row, *codes[0, :4]], [*short_row, *codes[1]]], capacity=190)
    np.testing.assert_allclose(
        compute_next_logits(target, cache, [3, 3]), compute_next_logits(target, expected, [3, 3]), atol=1e-5
    )


def test_a_drafter_reads_hidden_states_from_device_memory(target: OrtDeviceEngine, drafter: OrtDeviceEngine) -> None:
    cache = make_filled_cache(target, 0, [[0], [1], [2]], 40)
    target_hidden = target.run(make_causal_pass(target, cache, RNG.integers(0, 4, (3, 5))), cache).hidden
    rows = np.array([[2, 0, 1], [1, 1, 0]])  # 5 nodes are stored as 8
    nodes = np.array([[4, 0, 3], [2, 2, 1]])
    states = target_hidden[rows, nodes]
    assert states.shape == (2, 3, SMALL_CONFIG.hidden_size)
    np.testing.assert_array_equal(states, target_hidden[:, :5][rows, nodes])
    other_pass: Any = SimpleNamespace(
        device=OrtDevice("cpu"),
        outputs={"": target_hidden.device_value},
        output_owners=set(),
        run_queued_pass=lambda: None,
    )
    hidden_on_other_device = type(target_hidden)(other_pass, "")
    hidden_inputs = [
        states,
        HiddenStateView(target_hidden, rows, nodes),
        HiddenStateView(target_hidden[:, :5], rows, nodes),
        HiddenStateView(hidden_on_other_device, rows, nodes),
    ]
    outputs = []
    for hidden in hidden_inputs:
        cache_of_drafter = drafter.make_cache(2, 40)
        output = drafter.run(
            make_causal_pass(drafter, cache_of_drafter, [[0, 1, 2], [3, 2, 1]], hidden), cache_of_drafter
        )
        outputs.append([output.logits[:, :3], output.hidden[:, :3]])
    for logits, hidden_states in outputs[1:]:
        np.testing.assert_array_equal(logits, outputs[0][0])
        np.testing.assert_array_equal(hidden_states, outputs[0][1])
    assert np.abs(outputs[0][0][0] - outputs[0][0][1]).max() > 0.1


def test_outputs_stay_valid_after_the_kv_cache_is_freed(target: OrtDeviceEngine) -> None:
    cache = make_filled_cache(target, 0, CODES[:2], 40)
    output = target.run(make_causal_pass(target, cache, [[1, 2], [3, 0]]), cache)
    hidden_before = output.hidden[:, :2]
    del cache
    for _ in range(2):  # passes of the same shape, which may reuse the memory
        next_cache = make_filled_cache(target, 2, CODES[:2], 40)
        for _ in range(2):
            compute_next_logits(target, next_cache, [1, 2])
    np.testing.assert_array_equal(output.hidden[:, :2], hidden_before)


def test_sampled_codes_stay_valid_when_the_shape_runs_again(target: OrtDeviceEngine) -> None:
    cache = make_filled_cache(target, 0, CODES[:2], 40)
    rows = np.array([[0, 0], [1, 1]])
    nodes = np.array([[0, 1], [0, 1]])
    request = SamplingRequest(rows, nodes, Sampling(cfg_scale=2.0), Noise(3), np.arange(2), np.full(2, 2, np.float32))
    samples = []
    for tokens in ([[1, 2], [3, 0]], [[0, 3], [1, 1]]):
        logits = target.run(make_causal_pass(target, cache, tokens), cache).logits
        ((codes, scores),) = logits.sample_top_codes([request], 4)
        ((codes_again, scores_again),) = logits.sample_top_codes([request], 4)  # sample from the same pass again
        np.testing.assert_array_equal(codes, codes_again)
        np.testing.assert_allclose(scores, scores_again, atol=1e-6)
        samples.append((codes, scores, codes.copy(), scores.copy()))
    for codes, scores, codes_before, scores_before in samples:
        np.testing.assert_array_equal(codes, codes_before)
        np.testing.assert_array_equal(scores, scores_before)


def test_an_unread_pass_still_runs_before_the_cache_is_used(target: OrtDeviceEngine) -> None:
    expected = compute_next_logits(target, make_filled_cache(target, 0, [[0, 1], [2, 3]], 40), [1, 1])
    cache = make_filled_cache(target, 0, [[0], [2]], 40)
    output = target.run(make_causal_pass(target, cache, [[1, 0], [3, 0]]), cache)
    cache.append(output.new_kv, [np.arange(1)] * 2)
    cache.extend(make_filled_cache(target, 2, [[0]], 40))
    cache.keep_rows(np.array([0, 1]))
    np.testing.assert_allclose(compute_next_logits(target, cache, [1, 1]), expected, atol=1e-5)


def test_bindings_of_more_than_64_nodes_are_not_reused(target: OrtDeviceEngine) -> None:
    cache = make_filled_cache(target, 0, [[0]], 200)
    bound_passes = cache.block_handle.block.bound_passes
    for nodes, num_kept in ((64, 1), (65, 0)):
        count_before = len(bound_passes)
        target.run(make_causal_pass(target, cache, [[1] * nodes]), cache)
        assert len(bound_passes) - count_before == num_kept


def write_identity_graph(graph: GraphWriter) -> GraphTensors:
    graph.op("Identity", "data", name="out")
    return [TensorSpec("data", ("float32",), (None,))], [TensorSpec("out", ("float32",), (None,))]


def test_bound_graphs_are_recorded_at_the_third_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROVIDERS, "cpu", PROVIDERS["cpu"]._replace(max_captured_graphs=1))
    device = OrtDevice("cpu")
    graph_ids = list[str]()
    released = list[int]()
    values = {"data": np.zeros(2, np.float32), "out": device.empty((2,), "float32")}
    graph = device.get_helper_graph("copy", write_identity_graph)
    graph.session = SimpleNamespace(
        io_binding=graph.session.io_binding,
        run_with_iobinding=lambda binding, options: graph_ids.append(options.get_run_config_entry("gpu_graph_id")),
        release_captured_graph=released.append,
    )
    bound_passes = [graph.bind_tensors(values, capture_graph=True) for _ in range(2)]
    for number in (0, 0, 0, 1, 1, 1):
        bound_passes[number]()
    assert graph_ids == ["-1", "-1", "1", "-1", "-1", "-1"]
    del bound_passes[0]
    assert released == [1]


def test_cache_memory_that_was_released_last_is_reused_first() -> None:
    pool = CachePool(OrtDevice("cpu"), 1, "float32", 4, None)
    handles = [pool.acquire_block(1, columns) for columns in (1, 2, 3)]
    released_blocks = [handle.block for handle in handles]
    while handles:
        del handles[0]
    new_handles = [pool.acquire_block(1, columns) for columns in (3, 2, 1)]
    assert [handle.block in released_blocks for handle in new_handles] == [True, True, False]


def test_cache_memory_that_contained_nan_is_not_reused(target: OrtDeviceEngine) -> None:
    expected = compute_next_logits(target, make_filled_cache(target, 0, [[0, 1], [1]], 40), [2, 3])
    cache = make_filled_cache(target, 0, [[0, 1], [1]], 40)
    cache.forbid_memory_reuse()
    discarded_block = cache.block_handle.block
    for value in discarded_block.device_tensors:
        value.update_inplace(np.full(value.shape(), np.nan, np.float32))
    del cache
    make_cache = make_filled_cache(target, 0, [[0, 1], [1]], 40)
    assert make_cache.block_handle.block is not discarded_block
    np.testing.assert_array_equal(compute_next_logits(target, make_cache, [2, 3]), expected)


def test_several_threads_can_use_the_same_device_engine(target: OrtDeviceEngine) -> None:
    def generate(first_prefix: int) -> list[Floats]:
        logits = []
        for length in range(6):
            cache = make_filled_cache(target, first_prefix, [[first_prefix % 4] * length, [1] * length], 40)
            logits.append(compute_next_logits(target, cache, [2, 3]))
            cache.keep_rows(np.array([1]))
            logits.append(compute_next_logits(target, cache, [3]))
        return logits

    expected = [generate(first_prefix) for first_prefix in range(6)]
    previous_interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # seconds, so that threads switch as often as possible
    try:
        with ThreadPoolExecutor(6) as threads:
            for _ in range(3):
                for logits, expected_logits in zip(threads.map(generate, range(6)), expected, strict=True):
                    for values, expected_values in zip(logits, expected_logits, strict=True):
                        np.testing.assert_array_equal(values, expected_values)
    finally:
        sys.setswitchinterval(previous_interval)


def test_missing_inputs_and_wrong_cache_lengths_are_rejected(target: OrtDeviceEngine, drafter: OrtDeviceEngine) -> None:
    for engine, message in ((target, "either `tokens` or `embeds`"), (drafter, "`tokens` and `hidden`")):
        cache = engine.make_cache(1, 40)
        mask = np.zeros((1, 2, 64 + 2), bool)
        tokens = None if engine is target else np.zeros((1, 2), np.int64)
        with pytest.raises(ValueError, match=message):
            engine.run(PassInput(np.zeros((1, 2), np.int64), mask, tokens), cache)
        with pytest.raises(ValueError, match="the pass reads 4 columns of the cache, expected 64"):
            engine.run(PassInput(np.zeros((1, 2), np.int64), mask[:, :, :6], tokens), cache)


def load_device_engine(path: Path, spec: Any, table: Floats | None) -> OrtDeviceEngine:
    return OrtDeviceEngine(path, spec, table, SINGLE_THREAD, OrtDevice("cpu"))


@pytest.mark.parametrize("content", [b"", b"no graph", b"\x3a\x05abc"], ids=["empty", "text", "truncated"])
def test_a_file_without_an_onnx_graph_is_rejected(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "target.onnx"
    path.write_bytes(content)
    with expect_error(BundleError, "target.onnx: ", "export the bundle again"):
        load_device_engine(path, TINY_CONFIG.make_target_spec(), CODE_EMBEDDINGS)
    path.unlink()
    with expect_error(BundleError, "target.onnx: ", "export the bundle again"):
        load_device_engine(path, TINY_CONFIG.make_target_spec(), CODE_EMBEDDINGS)


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_a_graph_with_a_missing_or_short_weight_file_is_rejected(tmp_path: Path, damage: str) -> None:
    torch.manual_seed(0)
    config = DecoderConfig(128, 2, 4, 4, 512, 300, 3, 2, spare_positions=8)
    path = write_graph(make_target_graph(Decoder(config).eval(), torch.randn(300, 128)), tmp_path)
    table = np.zeros((300, 128), np.float32)
    load_device_engine(path, config.make_target_spec(), table)
    data = tmp_path / "target.onnx.data"
    if damage == "missing":
        data.unlink()
    else:
        data.write_bytes(data.read_bytes()[:5000])
    with expect_error(BundleError, "target.onnx", "export the bundle again"):
        load_device_engine(path, config.make_target_spec(), table)


@pytest.mark.parametrize("spec_changes", [{"num_layers": 1}, {"num_layers": 3}, {"vocab_size": 5}], ids=str)
def test_a_graph_whose_sizes_differ_is_rejected(small_model: SmallModel, spec_changes: dict[str, int]) -> None:
    spec = small_model.target_spec.model_copy(update=spec_changes)
    with expect_error(BundleError, "target.onnx: ", "; "):
        load_device_engine(small_model.folder / "target.onnx", spec, small_model.code_embeddings)


def test_a_target_in_place_of_a_drafter_is_rejected(small_model: SmallModel, tmp_path: Path) -> None:
    shutil.copy(small_model.folder / "target.onnx", tmp_path / "drafter.onnx")
    shutil.copy(small_model.folder / "drafter.onnx", tmp_path / "target.onnx")
    with expect_error(BundleError, "drafter.onnx: has no weight embed.weight; export the bundle again"):
        load_device_engine(tmp_path / "drafter.onnx", small_model.drafter_spec, None)
    with expect_error(BundleError, "target.onnx: has no weight norm.weight; export the bundle again"):
        load_device_engine(tmp_path / "target.onnx", small_model.target_spec, small_model.code_embeddings)
