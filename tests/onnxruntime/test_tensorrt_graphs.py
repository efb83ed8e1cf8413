"""CUDA graphs of plan passes and weight streaming, with the host in the GPU's place."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from host_rig import PROFILES, HostRig, message
from host_tensorrt import HostMemory, write_plan
from tiny_graphs import TINY
from tiny_rig import Rig, close

from lantern_rt.engines.contracts import PlanOptions
from lantern_rt.engines.trt import plan as tensorrt_plan
from lantern_rt.engines.trt.cuda import Block, BlockPool
from lantern_rt.engines.trt.device_cache import BlockCache
from lantern_rt.errors import EngineError

GRAPHS = PlanOptions(cuda_graphs=True)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    torch.set_num_threads(1)
    return Rig(tmp_path_factory.mktemp("tiny"), TINY)


@pytest.fixture
def tiny(exported: Rig) -> HostRig:
    """An engine that records passes, as the caller of TensorRT."""
    rig = HostRig(exported)
    rig.engine = rig.load(options=GRAPHS)
    return rig


def counts(rig: HostRig) -> tuple[int, int, int]:
    """Passes run by the engine loaded last, graphs captured, graphs launched."""
    return len(rig.library.engines[-1].runs), rig.memory.captures, rig.memory.launches


def draw(rig: HostRig, codes: list[int]) -> Any:
    """A request: a prefill pass, a pass for every two codes, and logits like those of a full forward."""
    cache = rig.prefilled(1)
    rig.extend(cache, [codes])
    close(rig.last(cache, [7])[0], rig.rig.reference(0, [*codes, 7])[-1])
    return cache


def test_a_pass_is_captured_when_it_recurs_and_launched_from_then_on(tiny: HostRig) -> None:
    cache = tiny.prefilled(1)
    seen = [counts(tiny)]
    for start in range(0, 10, 2):
        tiny.extend(cache, [[start, start + 1]])
        seen.append(counts(tiny))
    # once plainly, once in a context of its own while it is captured; every pass runs exactly once
    assert seen == [(1, 0, 0), (2, 0, 0), (3, 1, 0), (4, 1, 1), (5, 1, 2), (6, 1, 3)]
    close(tiny.last(cache, [7])[0], tiny.rig.reference(0, [*range(10), 7])[-1])


def test_what_was_captured_for_one_request_serves_the_next(tiny: HostRig) -> None:
    codes = np.random.default_rng(0).integers(0, 48, (4, 124)).tolist()  # two spans
    for request in codes[:2]:
        draw(tiny, request)
    before = counts(tiny)
    for request in codes[2:]:
        draw(tiny, request)
    after = counts(tiny)
    assert after[1] == before[1] == 3  # prefill, and two nodes at each span
    assert after[2] - before[2] == after[0] - before[0] == 2 * 64


def test_requests_side_by_side_have_graphs_of_their_own(tiny: HostRig) -> None:
    caches = [tiny.prefilled(1), tiny.prefilled(1)]
    for step in range(4):
        for cache, codes in zip(caches, ([1, 2], [3, 4]), strict=True):
            tiny.extend(cache, [codes])
        assert tiny.memory.captures == (0 if step == 0 else 2)
    for cache, codes in zip(caches, ([1, 2] * 4, [3, 4] * 4), strict=True):
        close(tiny.last(cache, [7])[0], tiny.rig.reference(0, [*codes, 7])[-1])


def test_passes_that_ran_long_ago_are_forgotten_first(tiny: HostRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt_plan, "MOST_KINDS", 2)
    first, second, third = (tiny.prefilled(1, capacity) for capacity in (64, 128, 192))
    for cache in (first, second, first, second):
        tiny.extend(cache, [[1, 2]])
    assert len(tiny.memory.graphs) == 2
    tiny.extend(first, [[3, 4]])
    tiny.extend(third, [[1, 2]])  # one too many: `second` ran before `first` did
    assert len(tiny.memory.graphs) == 1
    launches = tiny.memory.launches
    tiny.extend(first, [[5, 6]])
    assert tiny.memory.launches == launches + 1
    tiny.extend(second, [[3, 4]])
    assert tiny.memory.launches == launches + 1
    close(tiny.last(second, [7])[0], tiny.rig.reference(0, [1, 2, 1, 2, 3, 4, 7])[-1])


def test_tensorrt_rtx_records_by_itself_in_a_context_for_each_pass_that_recurs(exported: Rig) -> None:
    rig = HostRig(exported, records=True)
    rig.engine = rig.load(options=GRAPHS)
    engine = rig.library.engines[-1]
    for codes in ([1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4]):
        draw(rig, codes)
    assert rig.memory.captures == 0
    found = sorted((context.records, context.profile, context.runs) for context in engine.contexts)
    # plainly the first prefill and the first pass of two nodes; the rest in contexts that are bound once
    assert found == [(False, 1, 1), (False, 2, 1), (True, 1, 7), (True, 2, 1)]


def test_a_pass_that_cannot_be_captured_is_named(tiny: HostRig) -> None:
    tiny.library.uncapturable = "a loop cannot be captured"
    cache = tiny.prefilled(1)
    tiny.extend(cache, [[1, 2]])
    assert message(lambda: tiny.extend(cache, [[3, 4]])) == (
        f"{tiny.plan}: host_tensorrt 1.0 does not run as a CUDA graph: a loop cannot be captured; "
        "run without CUDA graphs"
    )


def test_a_library_that_does_not_record_is_named(exported: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = HostRig(exported, records=True)
    rig.engine = rig.load(options=GRAPHS)
    members = type(rig.library.CudaGraphStrategy.DISABLED)
    stubborn = property(lambda self: members.DISABLED, lambda self, value: None)
    monkeypatch.setattr(type(rig.library.engines[-1].create_runtime_config()), "cuda_graph_strategy", stubborn)
    cache = rig.prefilled(1)
    rig.extend(cache, [[1, 2]])
    assert message(lambda: rig.extend(cache, [[3, 4]])) == (
        f"{rig.plan}: host_tensorrt 1.0 does not record CUDA graphs: no reason given; rebuild with "
        "`lantern-rt build-engine tiny`"
    )


def test_memory_and_graphs_are_given_back_with_the_engine(tiny: HostRig) -> None:
    draw(tiny, [1, 2, 3, 4, 5, 6])
    gc.collect()
    assert len(tiny.memory.graphs) == 1
    kept = len(tiny.memory.blocks)
    assert kept == 3  # for the next request: keys and values, inputs and outputs; intermediate results
    draw(tiny, [1, 2])
    gc.collect()
    assert len(tiny.memory.blocks) == kept
    contexts = tiny.library.engines.pop().contexts
    del tiny.engine
    gc.collect()
    assert (len(tiny.memory.blocks), len(tiny.memory.graphs), len(contexts)) == (0, 0, 0)


# ---------------------------------------------------------------- memory kept for the next request


def test_a_freed_block_is_handed_out_again_for_its_size_only() -> None:
    memory = HostMemory()
    pool = BlockPool(memory)
    first, second = Block(pool, 1000), Block(pool, 2000)
    places = first.address, second.address
    del first, second
    assert len(memory.blocks) == 2
    other, again = Block(pool, 1500), Block(pool, 2000)
    assert other.address not in places
    assert again.address == places[1]
    assert Block(pool, 1000).address == places[0]


def test_no_more_blocks_are_kept_than_that_and_the_oldest_go_first() -> None:
    memory = HostMemory()
    pool = BlockPool(memory, most=2)
    blocks = [Block(pool, 1000 * size) for size in (1, 2, 3)]
    places = [block.address for block in blocks]
    while blocks:
        del blocks[0]
    assert sorted(memory.blocks) == sorted(places[1:])


def test_kept_blocks_are_given_back_before_memory_runs_out() -> None:
    memory = HostMemory(most=3000)
    pool = BlockPool(memory)
    blocks = [Block(pool, 1000), Block(pool, 1000)]
    blocks.clear()
    block = Block(pool, 2500)
    assert list(memory.blocks) == [block.address]
    with pytest.raises(EngineError, match="out of memory"):
        Block(pool, 1000)


def test_a_cache_in_memory_that_was_used_before_is_zero() -> None:
    memory = HostMemory()
    pool = BlockPool(memory)
    block = Block(pool, 2 * 64 * 3 * 16)
    place = block.address
    memory.upload(place, np.ones(block.size, np.uint8))
    del block
    cache = BlockCache(memory, 3, 10, 2, 16, pool)
    assert cache.block.address == place
    memory.synchronise()
    assert not memory.view(place, cache.block.size).any()


# ---------------------------------------------------------------- weight streaming, and what is refused


@pytest.mark.parametrize(("budget", "kept"), [(0, 0), (300, 300), (5000, 1000)])
def test_no_more_weights_than_the_budget_stay_on_the_device(tiny: HostRig, budget: int, kept: int) -> None:
    plan = write_plan(tiny.rig.path, PROFILES, tiny.plan.with_name("streamed.plan"), streamable=1000)
    tiny.engine = tiny.load(plan, options=PlanOptions(weight_budget=budget))
    assert tiny.library.engines[-1].weight_streaming_budget_v2 == kept
    draw(tiny, [1, 2])


def test_a_plan_that_streams_no_weights_takes_no_budget(tiny: HostRig) -> None:
    found = message(lambda: tiny.load(options=PlanOptions(weight_budget=300)))
    assert found.startswith(f"{tiny.plan}: found no weights that can be streamed, expected ")
    assert "leave weight-budget out" in found
    assert found.endswith("; rebuild with `lantern-rt build-engine tiny --weight-streaming`")


def test_a_library_that_does_not_keep_to_a_budget_is_named(tiny: HostRig, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = write_plan(tiny.rig.path, PROFILES, tiny.plan.with_name("streamed.plan"), streamable=5 << 20)
    stubborn = property(lambda self: 5 << 20, lambda self, value: None)
    monkeypatch.setattr(type(tiny.library.engines[-1]), "weight_streaming_budget_v2", stubborn, raising=False)
    assert message(lambda: tiny.load(plan, options=PlanOptions(weight_budget=3 << 20))) == (
        f"{plan}: host_tensorrt 1.0 does not keep to 3 MiB of weights on the device: no reason given; rebuild with "
        "`lantern-rt build-engine tiny`"
    )
