"""TensorRT engines with the host in the GPU's place: caches, rows that come back, shapes."""

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
from lantern_rt.engines.ort.device import Device
from lantern_rt.errors import EngineError
from lantern_rt.runtime.engine import PassInput


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    torch.set_num_threads(1)
    return Rig(tmp_path_factory.mktemp("tiny"), TINY, "plan")


# ---------------------------------------------------------------- the cache and what comes back


TENSORS = 4
HEADS = 2
COLUMNS = 64
WIDTH = 2


class Twin:
    """A cache on the device beside one in NumPy; passes write random numbers into both."""

    def __init__(self, rows: int, capacity: int = 40, pool: CachePool | None = None) -> None:
        self.rng = np.random.default_rng(0)
        self.plain = KVCache.empty(rows, capacity, TENSORS // 2, HEADS, WIDTH, np.float32)
        pool = pool or CachePool(Device("cpu"), TENSORS, "float32", WIDTH, HEADS)
        self.cache = DeviceCache(pool, rows, capacity, COLUMNS)

    def held(self) -> np.ndarray[Any, Any]:
        """What the device holds, `[tensors, rows, heads, columns, head_dim]`, to be changed there."""
        (value,) = self.cache.handle.block.values
        found: np.ndarray[Any, Any] = value.numpy()
        return found.reshape(TENSORS, len(self.cache.lengths), HEADS, COLUMNS, WIDTH)

    def run(self, accepted_indices: list[np.ndarray[Any, Any]], nodes: int = 4) -> None:
        """A pass over so many nodes, some of which are accepted."""
        rows = len(accepted_indices)
        new_kv = self.rng.standard_normal((TENSORS, nodes, rows, HEADS, WIDTH), np.float32)
        batch = PassInput(np.zeros((rows, nodes), np.int64), np.zeros((rows, nodes, 64 + nodes), bool))
        write = self.cache.encode(batch, nodes)["write"]
        held = self.held().copy()
        for row, start in enumerate(write.tolist()):
            held[:, row, :, start : start + nodes] = new_kv[:, :, row].transpose(0, 2, 1, 3)
        (value,) = self.cache.handle.block.values
        value.update_inplace(held.reshape(value.shape()))
        self.plain.append(list(new_kv), accepted_indices)
        self.cache.append(self.cache.written, accepted_indices)

    def check(self) -> None:
        """Both hold the same."""
        held = self.held()
        assert np.isfinite(held).all()
        assert self.cache.lengths.tolist() == self.plain.lengths.tolist()
        for row, length in enumerate(self.plain.lengths.tolist()):
            for tensor, own in zip(self.plain.tensors, held, strict=True):
                np.testing.assert_array_equal(own[row, :, :length], tensor[:length, row].swapaxes(0, 1))


SLABS = Twin(1).cache.pool


@settings(deadline=None, max_examples=60)
@given(data=st.data(), rows=st.integers(1, 3), steps=st.integers(1, 4), together=st.booleans())
def test_a_cache_on_the_device_holds_what_one_in_numpy_does(
    data: st.DataObject, rows: int, steps: int, together: bool
) -> None:
    twin = Twin(rows, pool=SLABS)
    one = st.sets(st.integers(0, 7)).map(sorted)
    for _ in range(steps):
        drawn = [data.draw(one)] * rows if together else [data.draw(one) for _ in range(rows)]
        twin.run([np.array(pick, np.int64) for pick in drawn], nodes=8)
    twin.check()
    if data.draw(st.booleans()):
        kept = np.array(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=4)))
        twin.plain.keep_rows(kept)
        twin.cache.keep_rows(kept)
        twin.check()
    added = Twin(data.draw(st.integers(1, 2)), 50, SLABS)
    added.run([np.arange(30)] * len(added.cache.lengths), nodes=30)
    twin.plain.extend(added.plain)
    twin.cache.extend(added.cache)
    twin.check()
    assert twin.cache.capacity == 50
    twin.run([np.array([1, 2, 3])] * len(twin.cache.lengths))
    twin.check()


def test_a_chain_is_in_place_and_a_trees_nodes_move_in_one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[int] = []
    moved = Device.move
    monkeypatch.setattr(
        Device, "move", lambda self, value, at, to, steps: moves.append(len(at)) or moved(self, value, at, to, steps)
    )
    for accepted_indices, entries in (
        ([[0, 1, 2]] * 3, []),
        ([[0, 1, 2], [0], []], []),
        ([[0, 3]] * 3, [3]),
        ([[0, 2, 3, 4]] * 3, [9]),  # some are read where others are written
        ([[0, 3], [0, 1], [0, 4]], [2]),
    ):
        moves.clear()
        twin = Twin(3, pool=SLABS)
        twin.run([np.array(pick, np.int64) for pick in accepted_indices], nodes=8)
        assert moves == entries, accepted_indices
        twin.check()


def test_outputs_stay_for_as_long_as_they_are_referred_to_and_then_make_room(tiny: Rig) -> None:
    cache = tiny.prefilled(2)
    among = np.eye(2, dtype=bool)
    positions = cache.lengths[:, None] + np.arange(2)

    def run(first: int) -> Any:
        return tiny.run(cache, np.array([[first, 4], [5, 6]]), among, positions, tiny.engine)

    outputs = [run(code) for code in (3, 7, 9)]
    before = [output.logits[:, :2] for output in outputs]
    values = {id(output.logits.value) for output in outputs}
    assert np.abs(before[0] - before[1]).max() > 0.1
    with pytest.raises(ValueError, match="not from the last pass"):
        cache.append(outputs[0].new_kv, [np.arange(2)] * 2)
    del outputs[1]
    again = run(7)
    assert id(again.logits.value) in values
    for output, logits in zip([outputs[0], again, outputs[1]], before, strict=True):
        np.testing.assert_array_equal(output.logits[:, :2], logits)


# ---------------------------------------------------------------- shapes


def test_the_smallest_profile_that_fits_is_chosen_and_nodes_are_rounded_up_to_powers_of_two(tiny: Rig) -> None:
    cache = tiny.prefilled(1, capacity=320)
    ran = tiny.library.engines[0].runs
    for length, nodes, expected in (
        (4, 2, (0, 2)), (4, 3, (1, 4)), (4, 5, (1, 8)), (4, 13, (1, 16)), (4, 17, (1, 24)),
        (314, 2, (0, 2)), (314, 4, (1, 4)), (314, 5, (1, 6)),  # no more than there are columns
    ):  # fmt: skip
        cache.lengths = np.array([length])
        zeros = np.zeros((1, nodes), np.int64)
        found = tiny.run(cache, zeros, np.eye(nodes, dtype=bool), zeros, tiny.engine)
        assert found.logits[0, :nodes].shape == (nodes, 48)
        assert (ran[-1][0], ran[-1][1]["token_ids"]) == (expected[0], (1, expected[1])), (length, nodes)


def test_nodes_added_to_a_pass_see_the_first_column_and_nobody_sees_them() -> None:
    cache = Twin(2, pool=SLABS).cache
    cache.lengths = np.array([20, 3])
    mask = np.zeros((2, 3, 67), bool)
    mask[0, :, :20] = True
    mask[1, :, :3] = True
    mask[:, :, 64:] = np.tri(3, dtype=bool)
    encoded = cache.encode(PassInput(np.full((2, 3), 5), mask), 8)
    bits = np.unpackbits(encoded["seen"].astype("<u2").view(np.uint8), axis=-1, bitorder="little")
    assert bits.shape == (2, 8, 64)
    assert bits[:, 3:, 0].all()
    assert not bits[:, 3:, 1:].any()
    assert [row.sum(-1).tolist() for row in bits[:, :3]] == [[21, 22, 23], [4, 5, 6]]
    assert bits[0, 2, :23].all()
    assert bits[1, 2, :6].all()
    assert encoded["write"].tolist() == [20, 3]
    assert encoded["position_ids"].tolist() == [[5, 5, 5, 0, 0, 0, 0, 0]] * 2


# ---------------------------------------------------------------- refusals


def test_more_than_a_plan_was_built_for_is_refused_with_the_option_that_allows_it(tiny: Rig) -> None:
    engine = tiny.engine
    error = error_of(EngineError, lambda: engine.new_cache(5, 10))
    assert (error.found, error.remedy) == ("5 rows", "rebuild with `lantern-rt build-engine tiny --max-rows 5`")
    assert error_of(EngineError, lambda: engine.new_cache(1, 500)).found == "474 columns of a cache"
    cache = engine.new_cache(1, 340)
    for length, nodes, found in ((0, 25, "25 nodes in one pass"), (319, 2, "384 columns of a cache")):
        cache.lengths = np.array([length])
        assert error_of(EngineError, lambda nodes=nodes: engine.next_past_length(cache, nodes)).found == found


def test_a_file_that_is_no_plan_is_refused(tiny: Rig, tmp_path: Path) -> None:
    (junk := tmp_path / "junk.plan").write_bytes(b"junk")
    assert error_of(EngineError, lambda: tiny.load_executable(junk)).problem.startswith(
        "host_tensorrt 1.0 does not load this engine: Seriali"
    )
    assert error_of(EngineError, lambda: tiny.load_executable(tmp_path / "none.plan")).problem.startswith(
        "cannot be read"
    )


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"profiles": PROFILES[:1]}, "2 profiles"),
        ({"num_layers": 1}, "tensor `past_key_values.1.key`: float32 [any, 2, 320, 16]"),
        ({"num_layers": 3}, "tensor `past_key_values.2.key`: none"),
        ({"vocab_size": 47}, "tensor `logits`: float32 [any, any, 48]"),
        ({"dtype": "float16"}, "tensor `embeddings`: float32 [any, 64]"),
    ],
)
def test_a_plan_that_is_not_the_one_described_is_refused(tiny: Rig, change: dict[str, Any], found: str) -> None:
    assert error_of(EngineError, lambda: tiny.load_executable(**change)).found == found


def test_a_run_that_fails_without_a_word_is_named(tiny: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Context, "execute_async_v3", lambda self, stream: False)
    error = error_of(EngineError, lambda: tiny.prefilled(1).finish())
    assert error.problem == "host_tensorrt 1.0 does not run this engine: no reason given"
