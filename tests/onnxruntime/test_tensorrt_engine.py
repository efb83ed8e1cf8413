"""TensorRT engines with the host in the GPU's place: caches, rows that come back, shapes."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
import torch
from host_rig import PROFILES, HostRig
from host_tensorrt import HostMemory
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_graphs import TINY
from tiny_rig import WIDE, Rig, close

from lantern_rt.engines.kv_cache import KVCache
from lantern_rt.engines.profiles import Profile
from lantern_rt.engines.trt.device_cache import BlockCache, DeviceRows, NewKV, runs
from lantern_rt.engines.trt.engine import fit, pad_nodes
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


def test_a_tree_pass_gives_the_bits_of_the_graph_without_the_nodes_added_to_it(wide: HostRig) -> None:
    rng, nodes = np.random.default_rng(2), 7
    among = np.eye(nodes, dtype=bool)
    for node, parent in enumerate([-1, 0, 0, 1, 1, 2, 4]):
        if parent >= 0:
            among[node] |= among[parent]
    tokens, paths = rng.integers(0, 256, (3, nodes)), [np.array([0, 1, 4, 6]), np.array([0, 2]), np.array([0])]
    results = []
    for engine in (wide.rig.engine, wide.engine):
        cache: Any = wide.rig.prefilled(3, engine)  # type: ignore[arg-type]
        positions = cache.lengths[:, None] + np.array([0, 1, 1, 2, 2, 2, 3])
        output = wide.rig.run(cache, tokens, among, positions, engine)  # type: ignore[arg-type]
        logits, hidden = np.array(output.logits[:, :]), np.array(output.hidden[:, :])
        cache.append(output.new_kv, paths)
        after = wide.rig.run(cache, tokens[:, :2], np.eye(2, dtype=bool), positions[:, :2], engine)  # type: ignore[arg-type]
        results.append((logits, hidden, np.array(after.logits[:, :])))
    assert wide.library.engines[-1].runs[-2][1]["position_ids"] == (3, 8)  # seven nodes ran as eight
    for plain, found in zip(*results, strict=True):
        np.testing.assert_array_equal(found, plain)


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


@settings(deadline=None, max_examples=60)
@given(data=st.data(), rows=st.integers(1, 3), steps=st.integers(1, 4), together=st.booleans())
def test_a_cache_on_the_device_holds_what_one_in_numpy_does(
    data: st.DataObject, rows: int, steps: int, together: bool
) -> None:
    nodes, count, rng, memory = 4, 4, np.random.default_rng(0), HostMemory()
    plain = KVCache.empty(rows, nodes * steps, layers=2, num_kv_heads=1, head_dim=2, dtype=np.float32)
    cache = BlockCache(memory, rows, nodes * steps, count, entry=8)
    for _ in range(steps):
        new_kv = rng.standard_normal((count, nodes, rows, 1, 2), np.float32)
        address = memory.allocate(new_kv.nbytes)
        memory.upload(address, new_kv)
        one = st.lists(st.integers(0, nodes - 1), max_size=nodes, unique=True)
        drawn = [data.draw(one)] * rows if together else [data.draw(one) for _ in range(rows)]
        accepted_indices = [np.array(pick, np.int64) for pick in drawn]
        plain.append(list(new_kv), accepted_indices)
        cache.append(NewKV(address, new_kv.nbytes // count, number=0), accepted_indices)
    if data.draw(st.booleans()):
        kept = np.array(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=4)))
        plain.keep_rows(kept)
        cache.keep_rows(kept)
    if data.draw(st.booleans()):
        entries, added = data.draw(st.integers(1, 80)), data.draw(st.integers(1, 2))
        others = KVCache.empty(added, 90, 2, 1, 2, np.float32), BlockCache(memory, added, 90, count, entry=8)
        new_kv = rng.standard_normal((count, entries, added, 1, 2), np.float32)
        address = memory.allocate(new_kv.nbytes)
        memory.upload(address, new_kv)
        others[0].append(list(new_kv), [np.arange(entries)] * added)
        others[1].append(NewKV(address, new_kv.nbytes // count, number=0), [np.arange(entries)] * added)
        plain.extend(others[0])
        cache.extend(others[1])
    memory.synchronise()
    assert cache.lengths.tolist() == plain.lengths.tolist()
    for tensor, start in zip(plain.tensors, cache.addresses(), strict=True):
        held = memory.view(start, tensor.nbytes).view(np.float32).reshape(tensor.shape)
        np.testing.assert_array_equal(held, tensor)  # what is unused too: zeros


def test_appending_takes_one_copy_per_run_of_nodes_however_many_layers(tiny: HostRig) -> None:
    cache = BlockCache(tiny.memory, 3, 100, count=72, entry=64)
    new_kv = NewKV(tiny.memory.allocate(72 * 8 * 3 * 64), 8 * 3 * 64, number=0)
    for accepted_indices, copies in (([[0, 1, 2]] * 3, 1), ([[0, 2, 3]] * 3, 2), ([[0], [0, 1], [0]], 2)):
        before = tiny.memory.copies
        cache.append(new_kv, [np.array(pick) for pick in accepted_indices])
        assert tiny.memory.copies - before == copies, accepted_indices


def test_runs_join_places_that_follow_each_other() -> None:
    places = [np.array(values) for values in ([5, 6, 7, 3, 9], [1, 2, 3, 4, 0])]
    assert list(runs(*places)) == [(9, 0, 1), (5, 1, 3), (3, 4, 1)]
    assert list(runs(np.array([], np.int64), np.array([], np.int64))) == []


def test_rows_come_back_as_numpy_would_index_them(tiny: HostRig) -> None:
    stretched, width = 4, 5
    values = np.random.default_rng(0).standard_normal((3, stretched, width)).astype(np.float16)
    address = tiny.memory.allocate(values.nbytes)
    tiny.memory.upload(address, values)
    rows = DeviceRows(BlockCache(tiny.memory, 3, 1, 2, 64), address, np.float16, (3, 3, width), stretched)
    whole = values[:, :3].astype(np.float32)
    keys: list[Any] = [0, (1, 2), slice(0, 2), (slice(0, 3, 2), 1), (slice(None), slice(0, 2)), (2, np.array([2, 0]))]
    keys += [(np.arange(3), np.array([2, 0, 1])), (np.arange(3)[:, None], np.array([[1, 1], [0, 2], [2, 0]])), -1]
    for key in keys:
        found = rows[key]
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, whole[key])


def test_outputs_of_an_earlier_pass_are_not_read_as_if_they_were_there(tiny: HostRig) -> None:
    cache = tiny.prefilled(1)
    tokens, among = np.zeros((1, 2), np.int64), np.eye(2, dtype=bool)
    first = tiny.rig.run(cache, tokens, among, tokens, tiny.engine)  # type: ignore[arg-type]
    assert tiny.memory.late == []  # the pass is over when `run` returns, and its time is its own
    tiny.rig.run(cache, tokens, among, tokens, tiny.engine)  # type: ignore[arg-type]
    for late in (lambda: first.logits[0], lambda: cache.append(first.new_kv, [np.arange(2)])):
        with pytest.raises(ValueError, match="outputs of pass 2 on this cache, expected those of its last, 3"):
            late()


def test_memory_is_given_back_with_its_cache(tiny: HostRig) -> None:
    gc.collect()
    before = len(tiny.memory.blocks)
    cache = tiny.prefilled(2)
    cache.keep_rows(np.array([1]))
    assert len(tiny.memory.blocks) == before + 2  # keys and values, inputs and outputs
    del cache
    gc.collect()
    assert len(tiny.memory.blocks) == before


def test_contexts_share_memory_that_is_given_back_with_the_engine(tiny: HostRig) -> None:
    rig = HostRig(tiny.rig)
    cache = rig.prefilled(1)
    rig.extend(cache, [[1, 2, 3, 4]])
    contexts = rig.library.engines.pop().contexts
    assert sorted(context.profile for context in contexts) == [1, 2]  # one for each profile that was used
    assert len({context.memory for context in contexts}) == 1
    del cache, rig.engine
    gc.collect()
    assert (len(rig.memory.blocks), len(contexts)) == (0, 0)


# ---------------------------------------------------------------- shapes


def test_the_smallest_profile_that_fits_is_chosen() -> None:
    chosen = {(2, 2, 64): 1, (4, 3, 64): 2, (1, 12, 320): 2, (1, 13, 64): 0, (1, 24, 64): 0}
    chosen |= {(1, 13, 128): None, (5, 2, 64): None, (1, 2, 384): None, (1, 25, 64): None}
    for asked, number in chosen.items():
        found = fit(PROFILES, *asked)
        assert (found and found[0]) == number, asked


def test_nodes_are_rounded_up_to_powers_of_two_within_the_profile() -> None:
    tree = Profile(name="tree", rows=(1, 2, 8), nodes=(2, 60, 60), past=(64, 64, 64))
    padded = {1: 2, 2: 2, 3: 4, 4: 4, 5: 8, 17: 32, 32: 32, 33: 60, 60: 60}
    assert {nodes: fit([tree], 1, nodes, 64) for nodes in padded} == {nodes: (0, n) for nodes, n in padded.items()}


def test_nodes_added_to_a_pass_see_themselves_and_nobody_sees_them() -> None:
    batch = Pass(
        np.full((2, 3), 5), np.ones((2, 3, 7), bool), np.full((2, 3), 9), hidden=np.ones((2, 3, 4), np.float32)
    )
    longer = pad_nodes(batch, 5)
    assert longer.attention_mask.shape == (2, 5, 9)
    assert longer.attention_mask[:, :3, :7].all()
    assert not longer.attention_mask[:, :3, 7:].any()
    assert longer.attention_mask[:, 3:].sum(-1).tolist() == [[1, 1]] * 2
    assert longer.attention_mask[:, 3, 7].all()
    assert longer.attention_mask[:, 4, 8].all()
    assert longer.tokens is not None
    assert longer.hidden is not None
    assert not longer.tokens[:, 3:].any()
    assert not longer.hidden[:, 3:].any()
    assert pad_nodes(batch, 3) is batch


def test_shapes_and_addresses_are_set_again_only_where_they_changed(
    tiny: HostRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tiny.prefilled(1)
    tiny.extend(cache, [[1, 2]])
    (context,) = (one for one in tiny.library.engines[0].contexts if one.profile == 1)
    calls: list[str] = []
    for name in ("set_input_shape", "set_tensor_address"):
        set_it = getattr(context, name)
        monkeypatch.setattr(context, name, lambda what, value, f=set_it: calls.append(what) or f(what, value))
    tiny.extend(cache, [[3, 4]])
    assert calls == []
    cache.keep_rows(np.array([0]))
    tiny.extend(cache, [[5, 6]])
    assert sorted(set(calls)) == sorted(tiny.engine._past)  # they lie elsewhere now
