"""TensorRT engines with the host in the GPU's place: caches, rows that come back, shapes."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
import torch
from host_rig import HostRig
from host_tensorrt import HostMemory
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_graphs import TINY
from tiny_rig import WIDE, Rig, close

from lantern_rt.engines.kv_cache import KVCache
from lantern_rt.engines.trt.cuda import Block
from lantern_rt.engines.trt.device_cache import BlockCache, DeviceRows, Layout, runs
from lantern_rt.runtime.engine import Pass


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> HostRig:
    torch.set_num_threads(1)
    return HostRig(Rig(tmp_path_factory.mktemp("tiny"), TINY))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> HostRig:
    torch.set_num_threads(1)
    return HostRig(Rig(tmp_path_factory.mktemp("wide"), WIDE))


# ---------------------------------------------------------------- what is computed


def test_ragged_rows_over_several_spans_equal_a_full_forward_of_each(tiny: HostRig) -> None:
    rng = np.random.default_rng(1)
    codes = [rng.integers(0, 48, n).tolist() for n in (7, 0, 63, 3)]
    cache = tiny.prefilled(4)
    tiny.extend(cache, codes)
    assert cache.lengths.tolist() == [11, 4, 67, 7]
    assert tiny.engine.next_past_length(cache, 2) == 128
    found = tiny.last(cache, [5, 6, 7, 8])
    for row, last in enumerate([5, 6, 7, 8]):
        close(found[row], tiny.rig.reference(row, [*codes[row], last])[-1])


def test_a_tree_pass_gives_the_numbers_of_the_bundles_graph_without_the_nodes_added_to_it(wide: HostRig) -> None:
    rng, nodes = np.random.default_rng(2), 7
    among = np.eye(nodes, dtype=bool)
    for node, parent in enumerate([-1, 0, 0, 1, 1, 2, 4]):
        if parent >= 0:
            among[node] |= among[parent]
    tokens, paths = rng.integers(0, 256, (3, nodes)), [np.array([0, 1, 4, 6]), np.array([0, 2]), np.array([0])]
    results = []
    for engine in (wide.rig.engine, wide.engine):
        cache: Any = wide.rig.prefilled(3, engine)
        positions = cache.lengths[:, None] + np.array([0, 1, 1, 2, 2, 2, 3])
        output = wide.rig.run(cache, tokens, among, positions, engine)
        logits, hidden = np.array(output.logits[:, :]), np.array(output.hidden[:, :])
        cache.append(output.new_kv, paths)
        after = wide.rig.run(cache, tokens[:, :2], np.eye(2, dtype=bool), positions[:, :2], engine)
        results.append((logits, hidden, np.array(after.logits[:, :])))
    assert wide.library.engines[-1].runs[-2][1]["position_ids"] == (3, 8)  # seven nodes ran as eight
    for plain, found in zip(*results, strict=True):
        close(found, plain)


def test_truncated_entries_are_forgotten_and_overwritten(tiny: HostRig) -> None:
    cache = tiny.prefilled(2)
    tiny.extend(cache, [[1, 2, 3, 4], [5, 6, 7, 8]])
    cache.truncate(np.array([5, 7]))
    tiny.extend(cache, [[10, 11], [12]])
    found = tiny.last(cache, [9, 9])
    close(found[0], tiny.rig.reference(0, [1, 10, 11, 9])[-1])
    close(found[1], tiny.rig.reference(1, [5, 6, 7, 12, 9])[-1])


def test_kept_rows_go_on_in_their_new_order(tiny: HostRig) -> None:
    cache = tiny.prefilled(4)
    codes = [[1], [2, 3], [4, 5, 6], []]
    tiny.extend(cache, codes)
    cache.keep_rows(np.array([2, 3, 0]))
    assert cache.lengths.tolist() == [7, 4, 5]
    found = tiny.last(cache, [9, 8, 7])
    for place, (row, last) in enumerate([(2, 9), (3, 8), (0, 7)]):
        close(found[place], tiny.rig.reference(row, [*codes[row], last])[-1])


def test_threads_with_caches_of_their_own_do_not_meet(tiny: HostRig) -> None:
    codes = [np.random.default_rng(i).integers(0, 48, 6).tolist() for i in range(4)]
    found: list[Any] = [None] * 4
    turn = threading.Lock()  # the stand-in's memory takes one caller at a time; passes still interleave

    def work(i: int, cache: Any) -> None:
        for start in range(0, 6, 2):
            with turn:
                tiny.extend(cache, [codes[i][start : start + 2]])
        with turn:
            found[i] = tiny.last(cache, [3])[0]

    caches = [tiny.prefilled(1) for _ in range(4)]
    threads = [threading.Thread(target=work, args=(i, cache)) for i, cache in enumerate(caches)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(4):
        close(found[i], tiny.rig.reference(0, [*codes[i], 3])[-1])


# ---------------------------------------------------------------- the cache and what comes back


LAYOUT = Layout(tensors=4, heads=2, columns=64, entry=8)


class Twin:
    """A cache on the device beside one in NumPy; passes write random numbers into both."""

    def __init__(self, memory: HostMemory, rows: int, capacity: int = 40) -> None:
        self.memory, self.rng = memory, np.random.default_rng(0)
        self.plain = KVCache.empty(rows, capacity, layers=2, num_kv_heads=2, head_dim=2, dtype=np.float32)
        self.cache = BlockCache(memory, rows, capacity, LAYOUT)

    def held(self) -> np.ndarray[Any, Any]:
        """What the device holds, `[tensors, rows, heads, columns, head_dim]`."""
        self.memory.synchronise()
        shape = (LAYOUT.tensors, len(self.cache.lengths), LAYOUT.heads, LAYOUT.columns, 2)
        start = self.cache.addresses()[0]
        return self.memory.view(start, LAYOUT.tensors * self.cache.stride).view(np.float32).reshape(shape)

    def run(self, accepted_indices: list[np.ndarray[Any, Any]], nodes: int = 4) -> None:
        """A pass over so many nodes, some of which are accepted."""
        rows = len(accepted_indices)
        new_kv = self.rng.standard_normal((LAYOUT.tensors, nodes, rows, LAYOUT.heads, 2), np.float32)
        batch = Pass(np.zeros((rows, nodes), np.int64), np.zeros((rows, nodes, 64 + nodes), bool))
        write, held = self.cache.encode(batch, nodes)["write"], self.held()
        for row, start in enumerate(write.tolist()):
            held[:, row, :, start : start + nodes] = new_kv[:, :, row].transpose(0, 2, 1, 3)
        self.plain.append(list(new_kv), accepted_indices)
        self.cache.append(write, accepted_indices)

    def check(self) -> None:
        """Both hold the same."""
        held = self.held()
        assert np.isfinite(held).all()
        assert self.cache.lengths.tolist() == self.plain.lengths.tolist()
        for row, length in enumerate(self.plain.lengths.tolist()):
            for tensor, own in zip(self.plain.tensors, held, strict=True):
                np.testing.assert_array_equal(own[row, :, :length], tensor[:length, row].swapaxes(0, 1))


@settings(deadline=None, max_examples=60)
@given(data=st.data(), rows=st.integers(1, 3), steps=st.integers(1, 4), together=st.booleans())
def test_a_cache_on_the_device_holds_what_one_in_numpy_does(
    data: st.DataObject, rows: int, steps: int, together: bool
) -> None:
    twin, one = Twin(HostMemory(), rows), st.sets(st.integers(0, 7)).map(sorted)
    for _ in range(steps):
        drawn = [data.draw(one)] * rows if together else [data.draw(one) for _ in range(rows)]
        twin.run([np.array(pick, np.int64) for pick in drawn], nodes=8)
    twin.check()
    if data.draw(st.booleans()):
        kept = np.array(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=4)))
        twin.plain.keep_rows(kept)
        twin.cache.keep_rows(kept)
        twin.check()
    added = Twin(twin.memory, data.draw(st.integers(1, 2)), capacity=50)
    added.run([np.arange(30)] * len(added.cache.lengths), nodes=30)
    twin.plain.extend(added.plain)
    twin.cache.extend(added.cache)
    twin.check()
    assert twin.cache.capacity == 50
    twin.run([np.array([1, 2, 3])] * len(twin.cache.lengths))
    twin.check()


def test_a_chain_is_in_place_and_a_tree_moves_a_run_of_all_layers_at_once() -> None:
    for accepted_indices, copies in (
        ([[0, 1, 2]] * 3, 0),
        ([[0, 1, 2], [0], []], 0),
        ([[0, 3]] * 3, 1),  # rows that are alike go together
        ([[0, 3, 6]] * 3, 2),
        ([[0, 4, 5, 6]] * 3, 1),
        ([[0, 2, 3, 4]] * 3, 3),  # a copy must not read what it writes
        ([[0, 3], [0, 3], [0, 4]], 2),
    ):
        twin = Twin(HostMemory(), 3)
        twin.run([np.array(pick, np.int64) for pick in accepted_indices], nodes=8)
        assert twin.memory.copies == copies, accepted_indices
        twin.check()


def test_nodes_are_accepted_once_and_in_rising_order() -> None:
    twin, rows = Twin(HostMemory(), 1), [np.array([0, 2])]
    write = twin.cache.encode(Pass(np.zeros((1, 4), np.int64), np.zeros((1, 4, 68), bool)), 4)["write"]
    with pytest.raises(ValueError, match="expected them in rising order"):
        twin.cache.append(write, [np.array([2, 1])])
    twin.cache.append(write, rows)
    with pytest.raises(ValueError, match="a pass that was not the last one"):
        twin.cache.append(write, rows)


def test_runs_join_places_that_follow_each_other() -> None:
    places = [np.array(values) for values in ([9, 5, 6, 7, 3], [0, 1, 2, 3, 4])]
    assert list(runs(*places)) == [(9, 0, 1), (5, 1, 3), (3, 4, 1)]
    assert list(runs(np.array([], np.int64), np.array([], np.int64))) == []


def test_rows_come_back_as_numpy_would_index_them(tiny: HostRig) -> None:
    stretched, width = 4, 5
    values = np.random.default_rng(0).standard_normal((3, stretched, width)).astype(np.float16)
    block = Block(tiny.memory, values.nbytes)
    tiny.memory.upload(block.address, values)
    rows = DeviceRows(tiny.memory, block, "float16", values.shape, 3)
    whole = values[:, :3].astype(np.float32)
    keys: list[Any] = [0, (1, 2), slice(0, 2), (slice(0, 3, 2), 1), (slice(None), slice(0, 2)), (2, np.array([2, 0]))]
    keys += [(np.arange(3), np.array([2, 0, 1])), (np.arange(3)[:, None], np.array([[1, 1], [0, 2], [2, 0]])), -1]
    for key in keys:
        found = rows[key]
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, whole[key])


def test_outputs_of_earlier_passes_stay_for_as_long_as_they_are_referred_to(tiny: HostRig) -> None:
    gc.collect()
    before, cache = len(tiny.memory.blocks), tiny.prefilled(2)
    tokens, among, positions = np.array([[3, 4], [5, 6]]), np.eye(2, dtype=bool), cache.lengths[:, None] + np.arange(2)
    first = tiny.rig.run(cache, tokens, among, positions, tiny.engine)
    second = tiny.rig.run(cache, tokens, among, positions, tiny.engine)
    assert tiny.memory.late == []  # the pass is over when `run` returns, and its time is its own
    for kind in ("logits", "hidden"):
        np.testing.assert_array_equal(getattr(first, kind)[:], getattr(second, kind)[:])
    with pytest.raises(ValueError, match="a pass that was not the last one"):
        cache.append(first.new_kv, [np.arange(2)] * 2)
    assert len(tiny.memory.blocks) == before + 5  # keys and values, and two outputs of each pass
    del first, second
    cache.keep_rows(np.array([1]))
    gc.collect()
    assert len(tiny.memory.blocks) == before + 1
    del cache
    gc.collect()
    assert len(tiny.memory.blocks) == before


def test_contexts_share_memory_that_is_given_back_with_the_engine(tiny: HostRig) -> None:
    rig = HostRig(tiny.rig)
    cache = rig.prefilled(1)
    rig.extend(cache, [[1, 2, 3, 4]])
    contexts = rig.library.engines.pop().contexts
    assert sorted(context.profile for context in contexts) == [0, 1]  # one for each profile that was used
    assert len({context.memory for context in contexts}) == 1
    del cache, rig.engine
    gc.collect()
    assert (len(rig.memory.blocks), len(contexts)) == (0, 0)


# ---------------------------------------------------------------- shapes


def test_the_smallest_profile_that_fits_is_chosen_and_nodes_are_rounded_up_to_powers_of_two(tiny: HostRig) -> None:
    cache, ran = tiny.prefilled(1, capacity=320), tiny.library.engines[0].runs
    for length, nodes, expected in (
        (4, 2, (0, 2)), (4, 3, (1, 4)), (4, 5, (1, 8)), (4, 13, (1, 16)), (4, 17, (1, 24)),
        (314, 2, (0, 2)), (314, 4, (1, 4)), (314, 5, (1, 6)),  # no more than there are columns
    ):  # fmt: skip
        cache.lengths, zeros = np.array([length]), np.zeros((1, nodes), np.int64)
        found = tiny.rig.run(cache, zeros, np.eye(nodes, dtype=bool), zeros, tiny.engine)
        assert found.logits[0].shape == (nodes, 48)
        assert (ran[-1][0], ran[-1][1]["token_ids"]) == (expected[0], (1, expected[1])), (length, nodes)


def test_nodes_added_to_a_pass_see_the_first_column_and_nobody_sees_them() -> None:
    cache = BlockCache(HostMemory(), 2, 40, LAYOUT)
    cache.lengths = np.array([20, 3])
    mask = np.zeros((2, 3, 67), bool)
    mask[0, :, :20], mask[1, :, :3], mask[:, :, 64:] = True, True, np.tri(3, dtype=bool)
    encoded = cache.encode(Pass(np.full((2, 3), 5), mask), 8)
    bits = np.unpackbits(encoded["seen"].astype("<u2").view(np.uint8), axis=-1, bitorder="little")
    assert bits.shape == (2, 8, 64)
    assert bits[:, 3:, 0].all()
    assert not bits[:, 3:, 1:].any()
    assert [row.sum(-1).tolist() for row in bits[:, :3]] == [[21, 22, 23], [4, 5, 6]]
    assert bits[0, 2, :23].all()
    assert bits[1, 2, :6].all()
    assert encoded["write"].tolist() == [20, 3]
    assert encoded["position_ids"].tolist() == [[5, 5, 5, 0, 0, 0, 0, 0]] * 2


def test_shapes_and_addresses_are_set_again_only_where_they_changed(
    tiny: HostRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tiny.prefilled(1)
    tiny.extend(cache, [[1, 2]])
    (context,) = (one for one in tiny.library.engines[0].contexts if one.profile == 0)
    calls: list[str] = []
    for name in ("set_input_shape", "set_tensor_address"):
        set_it = getattr(context, name)
        monkeypatch.setattr(context, name, lambda what, value, f=set_it: calls.append(what) or f(what, value))
    tiny.extend(cache, [[3, 4]])
    assert not [name for name in calls if "key_values" in name or name == "embeddings"]
    cache.keep_rows(np.array([0]))
    tiny.extend(cache, [[5, 6]])
    assert {name.partition("_")[0] for name in calls if "key_values" in name} == {"past", "present"}  # moved
    assert "embeddings" not in calls
