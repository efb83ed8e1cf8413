"""TensorRT engines on a stand-in for TensorRT: KV caches, outputs, shapes, and rejected files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from host_tensorrt import _ExecutionContext
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import catch_error
from tiny_graphs import TINY_CONFIG
from tiny_rig import PROFILES, DecoderHarness

from lantern_rt.engines.device_engine import DeviceCache
from lantern_rt.engines.kv_cache import KVCache
from lantern_rt.engines.ort.cache_pool import CachePool
from lantern_rt.engines.ort.device import OrtDevice
from lantern_rt.errors import EngineError
from lantern_rt.runtime.engine import PassInput


@pytest.fixture(scope="module")
def tiny_harness(tmp_path_factory: pytest.TempPathFactory) -> DecoderHarness:
    torch.set_num_threads(1)
    return DecoderHarness(tmp_path_factory.mktemp("tiny"), TINY_CONFIG, "plan")


# ---------------------------------------------------------------- the cache and outputs


TENSORS = 4
KV_HEADS = 2
COLUMNS = 64
HEAD_DIM = 2


class CachePair:
    def __init__(self, rows: int, capacity: int = 40, pool: CachePool | None = None) -> None:
        self.rng = np.random.default_rng(0)
        self.numpy_cache = KVCache.empty(rows, capacity, TENSORS // 2, KV_HEADS, HEAD_DIM, np.float32)
        pool = pool or CachePool(OrtDevice("cpu"), TENSORS, "float32", HEAD_DIM, KV_HEADS)
        self.cache = DeviceCache(pool, rows, capacity, COLUMNS)

    def device_array(self) -> np.ndarray[Any, Any]:
        """Return a view of the device memory, `[tensors, rows, heads, columns, head_dim]`."""
        (device_value,) = self.cache.block_handle.block.device_tensors
        array: np.ndarray[Any, Any] = device_value.numpy()
        return array.reshape(TENSORS, len(self.cache.lengths), KV_HEADS, COLUMNS, HEAD_DIM)

    def run_pass(self, accepted_indices: list[np.ndarray[Any, Any]], nodes: int = 4) -> None:
        """Write random entries for `nodes` nodes, and append the accepted nodes of each row to the caches."""
        rows = len(accepted_indices)
        new_kv = self.rng.standard_normal((TENSORS, nodes, rows, KV_HEADS, HEAD_DIM), np.float32)
        batch = PassInput(np.zeros((rows, nodes), np.int64), np.zeros((rows, nodes, 64 + nodes), bool))
        write = self.cache.encode_pass_inputs(batch, nodes)["write"]
        device_entries = self.device_array().copy()
        for row, start in enumerate(write.tolist()):
            device_entries[:, row, :, start : start + nodes] = new_kv[:, :, row].transpose(0, 2, 1, 3)
        (device_value,) = self.cache.block_handle.block.device_tensors
        device_value.update_inplace(device_entries.reshape(device_value.shape()))
        self.numpy_cache.append(list(new_kv), accepted_indices)
        self.cache.append(self.cache.written_columns, accepted_indices)

    def check(self) -> None:
        device_entries = self.device_array()
        assert np.isfinite(device_entries).all()
        assert self.cache.lengths.tolist() == self.numpy_cache.lengths.tolist()
        for row, length in enumerate(self.numpy_cache.lengths.tolist()):
            for tensor, device_tensor in zip(self.numpy_cache.tensors, device_entries, strict=True):
                np.testing.assert_array_equal(device_tensor[row, :, :length], tensor[:length, row].swapaxes(0, 1))


POOL = CachePair(1).cache.pool


@settings(deadline=None, max_examples=60)
@given(data=st.data(), rows=st.integers(1, 3), num_passes=st.integers(1, 4), same_for_all_rows=st.booleans())
def test_a_cache_on_the_device_has_the_entries_of_numpys(
    data: st.DataObject, rows: int, num_passes: int, same_for_all_rows: bool
) -> None:
    caches = CachePair(rows, pool=POOL)
    node_lists = st.sets(st.integers(0, 7)).map(sorted)
    for _ in range(num_passes):
        accepted = [data.draw(node_lists)] * rows if same_for_all_rows else [data.draw(node_lists) for _ in range(rows)]
        caches.run_pass([np.array(nodes, np.int64) for nodes in accepted], nodes=8)
    caches.check()
    if data.draw(st.booleans()):
        rows_to_keep = np.array(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=4)))
        caches.numpy_cache.keep_rows(rows_to_keep)
        caches.cache.keep_rows(rows_to_keep)
        caches.check()
    added_caches = CachePair(data.draw(st.integers(1, 2)), 50, POOL)
    added_caches.run_pass([np.arange(30)] * len(added_caches.cache.lengths), nodes=30)
    caches.numpy_cache.extend(added_caches.numpy_cache)
    caches.cache.extend(added_caches.cache)
    caches.check()
    assert caches.cache.capacity == 50
    caches.run_pass([np.array([1, 2, 3])] * len(caches.cache.lengths))
    caches.check()


def test_accepted_entries_are_moved_only_if_they_are_no_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    moved_counts: list[int] = []
    move_vectors = OrtDevice.move_vectors
    monkeypatch.setattr(
        OrtDevice,
        "move_vectors",
        lambda self, value, at, to, steps: moved_counts.append(len(at)) or move_vectors(self, value, at, to, steps),
    )
    for accepted_indices, expected_counts in (
        ([[0, 1, 2]] * 3, []),
        ([[0, 1, 2], [0], []], []),
        ([[0, 3]] * 3, [3]),
        ([[0, 2, 3, 4]] * 3, [9]),  # the target columns of some nodes are the source columns of other nodes
        ([[0, 3], [0, 1], [0, 4]], [2]),
    ):
        moved_counts.clear()
        caches = CachePair(3, pool=POOL)
        caches.run_pass([np.array(nodes, np.int64) for nodes in accepted_indices], nodes=8)
        assert moved_counts == expected_counts, accepted_indices
        caches.check()


def test_memory_of_outputs_is_reused_only_after_their_release(tiny_harness: DecoderHarness) -> None:
    cache = tiny_harness.prefill(2)
    node_mask = np.eye(2, dtype=bool)
    positions = cache.lengths[:, None] + np.arange(2)

    def run_pass(first_code: int) -> Any:
        return tiny_harness.run_pass(
            cache, np.array([[first_code, 4], [5, 6]]), node_mask, positions, tiny_harness.engine
        )

    outputs = [run_pass(code) for code in (3, 7, 9)]
    first_logits = [output.logits[:, :2] for output in outputs]
    device_tensors = {id(output.logits.device_value) for output in outputs}
    assert np.abs(first_logits[0] - first_logits[1]).max() > 0.1
    with pytest.raises(ValueError, match="not from the last pass"):
        cache.append(outputs[0].new_kv, [np.arange(2)] * 2)
    del outputs[1]
    repeated = run_pass(7)
    assert id(repeated.logits.device_value) in device_tensors
    for output, logits in zip([outputs[0], repeated, outputs[1]], first_logits, strict=True):
        np.testing.assert_array_equal(output.logits[:, :2], logits)


# ---------------------------------------------------------------- shapes


def test_a_pass_runs_in_the_smallest_sufficient_profile(tiny_harness: DecoderHarness) -> None:
    cache = tiny_harness.prefill(1, capacity=320)
    engine_runs = tiny_harness.library.engines[0].runs
    for length, nodes, expected in (
        (4, 2, (0, 2)), (4, 3, (1, 4)), (4, 5, (1, 8)), (4, 13, (1, 16)), (4, 17, (1, 24)),
        (314, 2, (0, 2)), (314, 4, (1, 4)), (314, 5, (1, 6)),  # only 6 columns are free
    ):  # fmt: skip
        cache.lengths = np.array([length])
        zeros = np.zeros((1, nodes), np.int64)
        output = tiny_harness.run_pass(cache, zeros, np.eye(nodes, dtype=bool), zeros, tiny_harness.engine)
        assert output.logits[0, :nodes].shape == (nodes, 48)
        assert (engine_runs[-1][0], engine_runs[-1][1]["token_ids"]) == (expected[0], (1, expected[1])), (length, nodes)


def test_padding_nodes_attend_to_the_first_column_only() -> None:
    cache = CachePair(2, pool=POOL).cache
    cache.lengths = np.array([20, 3])
    mask = np.zeros((2, 3, 67), bool)
    mask[0, :, :20] = True
    mask[1, :, :3] = True
    mask[:, :, 64:] = np.tri(3, dtype=bool)
    encoded = cache.encode_pass_inputs(PassInput(np.full((2, 3), 5), mask), 8)
    bits = np.unpackbits(encoded["seen"].astype("<u2").view(np.uint8), axis=-1, bitorder="little")
    assert bits.shape == (2, 8, 64)
    assert bits[:, 3:, 0].all()
    assert not bits[:, 3:, 1:].any()
    assert [row.sum(-1).tolist() for row in bits[:, :3]] == [[21, 22, 23], [4, 5, 6]]
    assert bits[0, 2, :23].all()
    assert bits[1, 2, :6].all()
    assert encoded["write"].tolist() == [20, 3]
    assert encoded["position_ids"].tolist() == [[5, 5, 5, 0, 0, 0, 0, 0]] * 2


# ---------------------------------------------------------------- errors


def test_sizes_beyond_the_profiles_name_the_build_option(tiny_harness: DecoderHarness) -> None:
    engine = tiny_harness.engine
    error = catch_error(EngineError, lambda: engine.make_cache(5, 10))
    assert (error.found, error.remedy) == ("5 rows", "rebuild with `lantern-rt build-engine tiny --max-rows 5`")
    assert catch_error(EngineError, lambda: engine.make_cache(1, 500)).found == "474 columns of a cache"
    cache = engine.make_cache(1, 340)
    for length, nodes, size in ((0, 25, "25 nodes in one pass"), (319, 2, "384 columns of a cache")):
        cache.lengths = np.array([length])
        assert catch_error(EngineError, lambda nodes=nodes: engine.past_columns(cache, nodes)).found == size


def test_a_file_that_is_not_an_engine_is_rejected(tiny_harness: DecoderHarness, tmp_path: Path) -> None:
    junk = tmp_path / "junk.plan"
    junk.write_bytes(b"junk")
    assert catch_error(EngineError, lambda: tiny_harness.load_tensorrt_engine(junk)).problem.startswith(
        "host_tensorrt 1.0 does not load this engine: Seriali"
    )
    assert catch_error(
        EngineError, lambda: tiny_harness.load_tensorrt_engine(tmp_path / "none.plan")
    ).problem.startswith("cannot be read")


@pytest.mark.parametrize(
    ("load_options", "difference"),
    [
        ({"profiles": PROFILES[:1]}, "2 profiles"),
        ({"num_layers": 1}, "tensor `past_key_values.1.key`: float32 [any, 2, 320, 16]"),
        ({"num_layers": 3}, "tensor `past_key_values.2.key`: none"),
        ({"vocab_size": 47}, "tensor `logits`: float32 [any, any, 48]"),
        ({"dtype": "float16"}, "tensor `embeddings`: float32 [any, 64]"),
    ],
)
def test_an_engine_that_differs_from_the_manifest_is_rejected(
    tiny_harness: DecoderHarness, load_options: dict[str, Any], difference: str
) -> None:
    assert catch_error(EngineError, lambda: tiny_harness.load_tensorrt_engine(**load_options)).found == difference


def test_an_engine_that_fails_without_a_message_is_an_error(
    tiny_harness: DecoderHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_ExecutionContext, "execute_async_v3", lambda self, stream: False)
    error = catch_error(EngineError, lambda: tiny_harness.prefill(1).run_queued_pass())
    assert error.problem == "host_tensorrt 1.0 does not run this engine: no reason given"
