"""ONNX Runtime engines compared with the torch decoder: KV caches, draft trees, and independence of the batch."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import catch_error, expect_error
from tiny_graphs import TINY_CONFIG, make_tiny_drafter, write_graph
from tiny_rig import SINGLE_THREAD, WIDE_CONFIG, DecoderHarness, assert_close

from lantern_rt.engines.decoder_tensors import find_kv_dtype
from lantern_rt.engines.kv_cache import COLUMN_STEP, KVCache
from lantern_rt.engines.ort.engine import OrtEngine
from lantern_rt.engines.ort.session import GraphSession
from lantern_rt.errors import BundleError, EngineError
from lantern_rt.export.models.eagle import make_drafter_graph
from lantern_rt.runtime.engine import PassInput


@pytest.fixture(scope="session")
def tiny_harness(tmp_path_factory: pytest.TempPathFactory) -> DecoderHarness:
    torch.set_num_threads(1)
    return DecoderHarness(tmp_path_factory.mktemp("tiny"), TINY_CONFIG)


@pytest.fixture(scope="session")
def wide_harness(tmp_path_factory: pytest.TempPathFactory) -> DecoderHarness:
    torch.set_num_threads(1)
    return DecoderHarness(tmp_path_factory.mktemp("wide"), WIDE_CONFIG)


@pytest.fixture(scope="session", params=["cpu", "device", "plan"])
def harness(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DecoderHarness:
    torch.set_num_threads(1)
    return DecoderHarness(tmp_path_factory.mktemp("rig"), TINY_CONFIG, request.param)


def compute_next_logits(harness: DecoderHarness, cache: Any, codes: list[int]) -> np.ndarray:
    """Return logits `[rows, vocabulary]` after one more code in each row; the code is not appended to the KV cache."""
    tokens = np.array([[code, 0] for code in codes])
    output = harness.run_pass(cache, tokens, np.eye(2, dtype=bool), np.repeat(cache.lengths[:, None], 2, 1))
    return output.logits[:, 0]


def test_rows_of_different_lengths_agree_with_full_passes(harness: DecoderHarness) -> None:
    rng = np.random.default_rng(1)
    codes = [rng.integers(0, 48, n).tolist() for n in (7, 0, 63, 3)]
    cache = harness.prefill(4)
    harness.append_codes(cache, codes)
    assert cache.lengths.tolist() == [11, 4, 67, 7]
    assert harness.engine.past_columns(cache, 2) == 128
    logits = compute_next_logits(harness, cache, [5, 6, 7, 8])
    for row, last_code in enumerate([5, 6, 7, 8]):
        assert_close(logits[row], harness.compute_reference_logits(row, [*codes[row], last_code])[-1])


def test_a_draft_tree_scores_every_path(harness: DecoderHarness) -> None:
    parents = [-1, 0, 0, 1, 1, 2, 4]
    depths = [0, 1, 1, 2, 2, 2, 3]
    node_mask = np.eye(7, dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            node_mask[node] |= node_mask[parent]
    tokens = np.random.default_rng(2).integers(0, 48, (2, 7))
    cache = harness.prefill(2)
    output = harness.run_pass(cache, tokens, node_mask, cache.lengths[:, None] + np.array(depths))
    for row in range(2):
        for node in range(7):
            path = tokens[row, node_mask[node]].tolist()
            assert_close(output.logits[row, node], harness.compute_reference_logits(row, path)[-1])
    paths = [[0, 1, 4, 6], [0, 2]]
    cache.append(output.new_kv, [np.array(path) for path in paths])
    assert cache.lengths.tolist() == [8, 6]
    logits = compute_next_logits(harness, cache, [1, 2])
    for row in range(2):
        assert_close(
            logits[row], harness.compute_reference_logits(row, [*tokens[row, paths[row]].tolist(), row + 1])[-1]
        )


def test_outputs_with_fewer_rows_than_the_pass_are_rejected(
    tiny_harness: DecoderHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tiny_harness.prefill(5)
    run_graph = GraphSession.run
    monkeypatch.setattr(GraphSession, "run", lambda self, feeds: [array[:1] for array in run_graph(self, feeds)])
    with expect_error(BundleError, "output `logits`", "the graph is damaged"):
        compute_next_logits(tiny_harness, cache, [0] * 5)


def test_truncated_cache_entries_have_no_effect(harness: DecoderHarness) -> None:
    cache = harness.prefill(2)
    harness.append_codes(cache, [[1, 2, 3, 4], [5, 6, 7, 8]])
    cache.truncate(np.array([5, 7]))
    assert_close(compute_next_logits(harness, cache, [9, 9])[1], harness.compute_reference_logits(1, [5, 6, 7, 9])[-1])
    harness.append_codes(cache, [[10, 11], [12]])
    logits = compute_next_logits(harness, cache, [9, 9])
    assert_close(logits[0], harness.compute_reference_logits(0, [1, 10, 11, 9])[-1])
    assert_close(logits[1], harness.compute_reference_logits(1, [5, 6, 7, 12, 9])[-1])


def test_reordered_batch_rows_continue_their_sequences(harness: DecoderHarness) -> None:
    cache = harness.prefill(3)
    codes = [[1, 2, 3], [4], [5, 6]]
    harness.append_codes(cache, codes)
    cache.keep_rows(np.array([2, 0]))
    assert cache.lengths.tolist() == [6, 7]
    logits = compute_next_logits(harness, cache, [7, 7])
    for new_row, row in enumerate([2, 0]):
        assert_close(logits[new_row], harness.compute_reference_logits(row, [*codes[row], 7])[-1])


def test_rows_of_two_joined_caches_continue(harness: DecoderHarness) -> None:
    cache = harness.prefill(2, capacity=310)
    added_cache = harness.engine.make_cache(1, 100)
    codes: list[list[int]] = [[1, 2, 3] * 25, [4], [5, 6]]
    harness.append_codes(cache, codes[:2])
    cache_of_three = harness.prefill(3)
    harness.append_codes(cache_of_three, [[], [], codes[2]])
    cache_of_three.keep_rows(np.array([2]))
    added_cache.keep_rows(np.array([], np.int64))
    added_cache.extend(cache_of_three)
    cache.extend(added_cache)
    assert cache.lengths.tolist() == [79, 5, 6]
    assert (added_cache.capacity, cache.capacity) == (300, 310)  # the capacity of joined caches is the larger capacity
    logits = compute_next_logits(harness, cache, [7, 8, 9])
    for row, last_code in enumerate([7, 8, 9]):
        assert_close(logits[row], harness.compute_reference_logits(row, [*codes[row], last_code])[-1])


def test_the_kv_cache_is_passed_to_onnx_runtime_without_a_copy(
    tiny_harness: DecoderHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tiny_harness.prefill(3)
    graph_inputs: dict[str, Any] = {}
    run_graph = GraphSession.run
    monkeypatch.setattr(GraphSession, "run", lambda graph, feeds: graph_inputs.update(feeds) or run_graph(graph, feeds))
    compute_next_logits(tiny_harness, cache, [1, 2, 3])
    for i, name in enumerate(["past_key_values.0.key", "past_key_values.0.value"]):
        assert graph_inputs[name].ctypes.data == cache.tensors[i].ctypes.data
        assert graph_inputs[name].flags.c_contiguous
        assert graph_inputs[name].shape[0] == COLUMN_STEP


def test_the_padded_cache_length_is_a_multiple_of_64(tiny_harness: DecoderHarness) -> None:
    cache = tiny_harness.engine.make_cache(2, 130)
    assert tiny_harness.engine.past_columns(cache, 2) == 64  # ONNX Runtime crashes with an empty past
    for length, past_length in ((64, 64), (65, 128), (130, 192)):
        cache.lengths = np.array([1, length])
        assert tiny_harness.engine.past_columns(cache, 5) == past_length
        assert cache.tensors[0].shape[0] >= past_length


def test_wrong_cache_lengths_are_rejected_before_the_graph_runs(tiny_harness: DecoderHarness) -> None:
    cache = tiny_harness.prefill(1, capacity=5)
    wrong_pass = PassInput(
        positions=np.zeros((1, 2), np.int64), attention_mask=np.ones((1, 2, 6), bool), tokens=np.zeros((1, 2), int)
    )
    with pytest.raises(ValueError, match="the pass reads 4 columns of the cache, expected 64"):
        tiny_harness.engine.run(wrong_pass, cache)
    new_kv = [np.zeros((2, 1, 2, 16), np.float32)] * 4
    with pytest.raises(ValueError, match="do not fit"):
        cache.append(new_kv, [np.arange(2)])
    for length in (5, -1):
        with pytest.raises(ValueError, match="cannot be truncated"):
            cache.truncate(np.array([length]))
    assert cache.lengths.tolist() == [4]


@pytest.mark.parametrize("threads", [1, 2])
def test_other_rows_of_the_batch_change_no_bit(wide_harness: DecoderHarness, threads: int) -> None:
    engine = wide_harness.load_engine(threads)
    rng = np.random.default_rng(4)
    for length in (33, 75):
        alone = wide_harness.prefill(2, engine)
        append_random_entries(alone, length, 7)
        for extra_length in (10, 60, 190):
            batch = wide_harness.prefill(2, engine)
            append_random_entries(batch, length, 7)
            batch = add_random_rows(batch, 14, 24 + extra_length)
            tokens = rng.integers(0, 256, (16, 4))
            positions = np.minimum(batch.lengths[:, None] + np.arange(4), 500)
            node_mask = np.tril(np.ones((4, 4), bool))
            batch_output = wide_harness.run_pass(batch, tokens, node_mask, positions, engine)
            output = wide_harness.run_pass(alone, tokens[:2], node_mask, positions[:2], engine)
            assert np.array_equal(batch_output.logits[:2], output.logits), (length, extra_length)
            assert np.array_equal(batch_output.hidden[:2], output.hidden), (length, extra_length)
            assert all(
                np.array_equal(batch_tensor[:, :2], tensor)
                for batch_tensor, tensor in zip(batch_output.new_kv, output.new_kv, strict=True)
            )


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_nodes_changes_no_bit(wide_harness: DecoderHarness, threads: int) -> None:
    engine = wide_harness.load_engine(threads)
    tokens = np.random.default_rng(5).integers(0, 256, (2, 60))
    for length in (5, 61, 130):
        cache = wide_harness.prefill(2, engine)
        append_random_entries(cache, length, 8)
        results = []
        for nodes in (2, 3, 8, 26, 60):
            node_mask = np.eye(nodes, dtype=bool)
            node_mask[:, 0] = True
            positions = cache.lengths[:, None] + np.minimum(np.arange(nodes), 1)
            results.append(wide_harness.run_pass(cache, tokens[:, :nodes], node_mask, positions, engine).logits[:, :2])
        assert all(np.array_equal(results[0], logits) for logits in results[1:]), length


def append_random_entries(cache: KVCache, entries: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = (entries, *cache.tensors[0].shape[1:])
    new_kv = [rng.normal(size=shape).astype(np.float32) for _ in cache.tensors]
    cache.append(new_kv, [np.arange(entries)] * shape[1])


def add_random_rows(cache: KVCache, rows: int, length: int) -> KVCache:
    num_rows = len(cache.lengths)
    start = cache.lengths
    cache.keep_rows(np.concatenate([np.arange(num_rows), np.zeros(rows, np.int64)]))
    cache.truncate(np.concatenate([start, np.zeros(rows, np.int64)]))
    rng = np.random.default_rng(length)
    shape = (length, *cache.tensors[0].shape[1:])
    new_kv = [rng.normal(size=shape).astype(np.float32) for _ in cache.tensors]
    cache.append(new_kv, [np.arange(0)] * num_rows + [np.arange(length)] * rows)
    return cache


def test_a_drafter_without_hidden_states_is_rejected(tmp_path: Path) -> None:
    path = write_graph(make_drafter_graph(make_tiny_drafter()), tmp_path)
    engine = OrtEngine(path, replace(TINY_CONFIG, final_norm=False).make_drafter_spec(), threads=SINGLE_THREAD)
    tokens = np.zeros((1, 2), np.int64)
    with pytest.raises(ValueError, match="a drafter reads `tokens` and `hidden`"):
        engine.run(PassInput(tokens, np.ones((1, 2, 66), bool), tokens), engine.make_cache(1, 20))


def test_threads_can_share_an_engine_with_separate_caches(tiny_harness: DecoderHarness) -> None:
    codes = [np.random.default_rng(i).integers(0, 48, 10 + 4 * i).tolist() for i in range(3)]
    caches = [tiny_harness.engine.make_cache(1, 60) for _ in codes]

    def fill_cache(i: int) -> None:
        caches[i] = tiny_harness.prefill(1)
        tiny_harness.append_codes(caches[i], [codes[i]])

    workers = [threading.Thread(target=fill_cache, args=(i,)) for i in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for i, cache in enumerate(caches):
        assert cache.num_passes == 1 + len(codes[i]) // 2
        assert_close(
            compute_next_logits(tiny_harness, cache, [3])[0],
            tiny_harness.compute_reference_logits(0, [*codes[i], 3])[-1],
        )


@pytest.mark.parametrize(
    ("change", "tensor"),
    [
        ({"num_layers": 1}, "input `past_key_values.1.key`"),
        ({"num_layers": 3}, "input `past_key_values.2.key`"),
        ({"hidden_size": 32}, "input `input_embeds`"),
        ({"num_kv_heads": 4}, "input `past_key_values.0.key`"),
        ({"vocab_size": 47}, "output `logits`"),
        ({"dtype": "float16"}, "input `input_embeds`"),
    ],
)
def test_a_graph_that_differs_from_the_manifest_is_rejected(
    tiny_harness: DecoderHarness, change: dict[str, Any], tensor: str
) -> None:
    error = catch_error(
        BundleError,
        OrtEngine,
        tiny_harness.path,
        TINY_CONFIG.make_target_spec().model_copy(update=change),
        tiny_harness.code_embeddings,
        SINGLE_THREAD,
    )
    assert error.field == f"{tiny_harness.path}: {tensor}"


def test_a_graph_with_a_fixed_batch_size_is_rejected(tiny_harness: DecoderHarness, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    model = onnx.load(tiny_harness.path)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
    onnx.save(model, tmp_path / "fixed.onnx")
    with expect_error(BundleError, "`input_embeds`: found float32 [2, nodes, 64]"):
        OrtEngine(tmp_path / "fixed.onnx", TINY_CONFIG.make_target_spec(), tiny_harness.code_embeddings, SINGLE_THREAD)


def test_the_error_for_a_damaged_graph_file_is_a_single_line(
    tiny_harness: DecoderHarness, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = tiny_harness.path.read_bytes()
    for name, content in (("cut", data[: len(data) // 2]), ("junk", b"junk"), ("empty", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises((BundleError, EngineError)) as caught:
            OrtEngine(tmp_path / name, TINY_CONFIG.make_target_spec(), tiny_harness.code_embeddings, SINGLE_THREAD)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 500
    assert capfd.readouterr() == ("", "")


def test_keys_and_values_of_different_dtypes_are_rejected() -> None:
    with pytest.raises(BundleError):
        find_kv_dtype("target.onnx", {"past_key_values.0.key": np.float16, "past_key_values.0.value": np.float32})


def test_outputs_of_an_undeclared_shape_are_rejected(
    tiny_harness: DecoderHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = np.zeros((1, 5), np.float32)
    monkeypatch.setattr(GraphSession, "run", lambda graph, feeds: [flat] * len(graph.outputs))
    with expect_error(BundleError, "output `logits`: found [1, 5], expected"):
        tiny_harness.prefill(1, tiny_harness.load_engine(SINGLE_THREAD))


@pytest.mark.parametrize("length", [2, 7, 24])
def test_a_longer_prefix_in_the_batch_changes_no_bit(wide_harness: DecoderHarness, length: int) -> None:
    """Compare prefills of several lengths, because prompts are padded to the longest prompt of a batch."""

    def prefill(rows: int, nodes: int) -> list[np.ndarray]:
        embeds = (
            np.random.default_rng(3).normal(size=(6, 130, WIDE_CONFIG.hidden_size)).astype(np.float32)[:rows, :nodes]
        )
        cache = wide_harness.engine.make_cache(rows, 200)
        past_length = wide_harness.engine.past_columns(cache, nodes)
        attention_mask = np.zeros((rows, nodes, past_length + nodes), bool)
        attention_mask[:, :, past_length:] = np.tri(nodes, dtype=bool)
        positions = np.broadcast_to(np.arange(nodes), (rows, nodes))
        output = wide_harness.engine.run(
            PassInput(positions=positions, attention_mask=attention_mask, embeds=embeds), cache
        )
        return [output.logits[0, :length], output.hidden[0, :length], *(new[:length, 0] for new in output.new_kv)]

    alone = prefill(2, length)
    for rows, nodes in ((2, length + 1), (6, 61), (4, 130)):
        for expected, values in zip(alone, prefill(rows, nodes), strict=True):
            np.testing.assert_array_equal(values, expected)
