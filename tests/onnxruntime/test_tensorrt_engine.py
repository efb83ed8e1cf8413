"""TensorRT engines on a stand-in for the GPU: caches, outputs, shapes, and rejected files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from host_tensorrt import _Context
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import error_of
from tiny_graphs import TINY
from tiny_rig import PROFILES, Rig

from lantern_rt.engines.device_engine import DeviceCache
from lantern_rt.engines.kv_cache import KVCache
from lantern_rt.engines.ort.cache_pool import CachePool
from lantern_rt.engines.ort.device import OrtDevice
from lantern_rt.errors import EngineError
from lantern_rt.runtime.engine import PassInput


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    torch.set_num_threads(1)
    return Rig(tmp_path_factory.mktemp("tiny"), TINY, "plan")


# ---------------------------------------------------------------- the cache and outputs


TENSORS = 4
HEADS = 2
COLUMNS = 64
WIDTH = 2


class CachePair:
    """A cache on the device and a NumPy cache; passes write the same random numbers into both."""

    def __init__(self, rows: int, capacity: int = 40, pool: CachePool | None = None) -> None:
        self.rng = np.random.default_rng(0)
        self.numpy_cache = KVCache.empty(rows, capacity, TENSORS // 2, HEADS, WIDTH, np.float32)
        pool = pool or CachePool(OrtDevice("cpu"), TENSORS, "float32", WIDTH, HEADS)
        self.cache = DeviceCache(pool, rows, capacity, COLUMNS)

    def device_array(self) -> np.ndarray[Any, Any]:
        """Return the device's memory, `[tensors, rows, heads, columns, head_dim]`, not a copy."""
        (value,) = self.cache.block_handle.block.device_values
        array: np.ndarray[Any, Any] = value.numpy()
        return array.reshape(TENSORS, len(self.cache.lengths), HEADS, COLUMNS, WIDTH)

    def run(self, accepted_indices: list[np.ndarray[Any, Any]], nodes: int = 4) -> None:
        """Run a pass over `nodes` nodes and append the accepted ones."""
        rows = len(accepted_indices)
        new_kv = self.rng.standard_normal((TENSORS, nodes, rows, HEADS, WIDTH), np.float32)
        batch = PassInput(np.zeros((rows, nodes), np.int64), np.zeros((rows, nodes, 64 + nodes), bool))
        write = self.cache.encode_pass_inputs(batch, nodes)["write"]
        contents = self.device_array().copy()
        for row, start in enumerate(write.tolist()):
            contents[:, row, :, start : start + nodes] = new_kv[:, :, row].transpose(0, 2, 1, 3)
        (value,) = self.cache.block_handle.block.device_values
        value.update_inplace(contents.reshape(value.shape()))
        self.numpy_cache.append(list(new_kv), accepted_indices)
        self.cache.append(self.cache.written_columns, accepted_indices)

    def check(self) -> None:
        """Check that both caches have the same entries."""
        contents = self.device_array()
        assert np.isfinite(contents).all()
        assert self.cache.lengths.tolist() == self.numpy_cache.lengths.tolist()
        for row, length in enumerate(self.numpy_cache.lengths.tolist()):
            for tensor, device_tensor in zip(self.numpy_cache.tensors, contents, strict=True):
                np.testing.assert_array_equal(device_tensor[row, :, :length], tensor[:length, row].swapaxes(0, 1))


POOL = CachePair(1).cache.pool


@settings(deadline=None, max_examples=60)
@given(data=st.data(), rows=st.integers(1, 3), steps=st.integers(1, 4), together=st.booleans())
def test_a_cache_on_the_device_has_the_entries_of_a_numpy_cache(
    data: st.DataObject, rows: int, steps: int, together: bool
) -> None:
    caches = CachePair(rows, pool=POOL)
    node_lists = st.sets(st.integers(0, 7)).map(sorted)
    for _ in range(steps):
        accepted = [data.draw(node_lists)] * rows if together else [data.draw(node_lists) for _ in range(rows)]
        caches.run([np.array(nodes, np.int64) for nodes in accepted], nodes=8)
    caches.check()
    if data.draw(st.booleans()):
        rows_to_keep = np.array(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=4)))
        caches.numpy_cache.keep_rows(rows_to_keep)
        caches.cache.keep_rows(rows_to_keep)
        caches.check()
    added = CachePair(data.draw(st.integers(1, 2)), 50, POOL)
    added.run([np.arange(30)] * len(added.cache.lengths), nodes=30)
    caches.numpy_cache.extend(added.numpy_cache)
    caches.cache.extend(added.cache)
    caches.check()
    assert caches.cache.capacity == 50
    caches.run([np.array([1, 2, 3])] * len(caches.cache.lengths))
    caches.check()


def test_accepted_chains_stay_in_place_and_nodes_of_trees_move_in_one_operation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moves: list[int] = []
    move_vectors = OrtDevice.move_vectors
    monkeypatch.setattr(
        OrtDevice,
        "move_vectors",
        lambda self, value, at, to, steps: moves.append(len(at)) or move_vectors(self, value, at, to, steps),
    )
    for accepted_indices, entries in (
        ([[0, 1, 2]] * 3, []),
        ([[0, 1, 2], [0], []], []),
        ([[0, 3]] * 3, [3]),
        ([[0, 2, 3, 4]] * 3, [9]),  # some nodes are read from columns that others are written to
        ([[0, 3], [0, 1], [0, 4]], [2]),
    ):
        moves.clear()
        caches = CachePair(3, pool=POOL)
        caches.run([np.array(nodes, np.int64) for nodes in accepted_indices], nodes=8)
        assert moves == entries, accepted_indices
        caches.check()


def test_outputs_are_valid_while_referenced_and_their_memory_is_reused_afterwards(tiny: Rig) -> None:
    cache = tiny.prefill(2)
    among = np.eye(2, dtype=bool)
    positions = cache.lengths[:, None] + np.arange(2)

    def run(first: int) -> Any:
        return tiny.run(cache, np.array([[first, 4], [5, 6]]), among, positions, tiny.engine)

    outputs = [run(code) for code in (3, 7, 9)]
    before = [output.logits[:, :2] for output in outputs]
    values = {id(output.logits.device_value) for output in outputs}
    assert np.abs(before[0] - before[1]).max() > 0.1
    with pytest.raises(ValueError, match="not from the last pass"):
        cache.append(outputs[0].new_kv, [np.arange(2)] * 2)
    del outputs[1]
    repeated = run(7)
    assert id(repeated.logits.device_value) in values
    for output, logits in zip([outputs[0], repeated, outputs[1]], before, strict=True):
        np.testing.assert_array_equal(output.logits[:, :2], logits)


# ---------------------------------------------------------------- shapes


def test_the_smallest_profile_that_fits_is_chosen_and_nodes_are_rounded_up_to_powers_of_two(tiny: Rig) -> None:
    cache = tiny.prefill(1, capacity=320)
    runs = tiny.library.engines[0].runs
    for length, nodes, expected in (
        (4, 2, (0, 2)), (4, 3, (1, 4)), (4, 5, (1, 8)), (4, 13, (1, 16)), (4, 17, (1, 24)),
        (314, 2, (0, 2)), (314, 4, (1, 4)), (314, 5, (1, 6)),  # not more nodes than columns
    ):  # fmt: skip
        cache.lengths = np.array([length])
        zeros = np.zeros((1, nodes), np.int64)
        output = tiny.run(cache, zeros, np.eye(nodes, dtype=bool), zeros, tiny.engine)
        assert output.logits[0, :nodes].shape == (nodes, 48)
        assert (runs[-1][0], runs[-1][1]["token_ids"]) == (expected[0], (1, expected[1])), (length, nodes)


def test_padding_nodes_attend_to_the_first_column_and_no_node_attends_to_them() -> None:
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


def test_the_error_of_sizes_beyond_the_profiles_names_the_option_that_allows_them(tiny: Rig) -> None:
    engine = tiny.engine
    error = error_of(EngineError, lambda: engine.new_cache(5, 10))
    assert (error.found, error.remedy) == ("5 rows", "rebuild with `lantern-rt build-engine tiny --max-rows 5`")
    assert error_of(EngineError, lambda: engine.new_cache(1, 500)).found == "474 columns of a cache"
    cache = engine.new_cache(1, 340)
    for length, nodes, size in ((0, 25, "25 nodes in one pass"), (319, 2, "384 columns of a cache")):
        cache.lengths = np.array([length])
        assert error_of(EngineError, lambda nodes=nodes: engine.padded_past_length(cache, nodes)).found == size


def test_a_file_that_is_not_an_engine_is_rejected(tiny: Rig, tmp_path: Path) -> None:
    junk = tmp_path / "junk.plan"
    junk.write_bytes(b"junk")
    assert error_of(EngineError, lambda: tiny.load_executable(junk)).problem.startswith(
        "host_tensorrt 1.0 does not load this engine: Seriali"
    )
    assert error_of(EngineError, lambda: tiny.load_executable(tmp_path / "none.plan")).problem.startswith(
        "cannot be read"
    )


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"profiles": PROFILES[:1]}, "2 profiles"),
        ({"num_layers": 1}, "tensor `past_key_values.1.key`: float32 [any, 2, 320, 16]"),
        ({"num_layers": 3}, "tensor `past_key_values.2.key`: none"),
        ({"vocab_size": 47}, "tensor `logits`: float32 [any, any, 48]"),
        ({"dtype": "float16"}, "tensor `embeddings`: float32 [any, 64]"),
    ],
)
def test_an_engine_that_differs_from_the_manifest_is_rejected(tiny: Rig, change: dict[str, Any], fault: str) -> None:
    assert error_of(EngineError, lambda: tiny.load_executable(**change)).found == fault


def test_a_run_that_fails_without_a_message_is_an_error(tiny: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Context, "execute_async_v3", lambda self, stream: False)
    error = error_of(EngineError, lambda: tiny.prefill(1).run_queued_pass())
    assert error.problem == "host_tensorrt 1.0 does not run this engine: no reason given"
