"""Plans that do not load or run as asked for, in one line each, with the host in the GPU's place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from host_rig import PROFILES, HostRig, message
from host_tensorrt import HostLibrary, _Context, _Engine
from tiny_graphs import TINY
from tiny_rig import Rig

from lantern_rt.engines.profiles import Profile
from lantern_rt.runtime.engine import Pass


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> HostRig:
    torch.set_num_threads(1)
    return HostRig(Rig(tmp_path_factory.mktemp("tiny"), TINY))


def test_more_than_a_plan_was_built_for_is_refused_with_the_command_that_builds_it(tiny: HostRig) -> None:
    where = f"{tiny.plan}: found"
    rebuild = "which it was built for; rebuild with `lantern-rt build-engine tiny"
    new_cache, next_past_length = tiny.engine.new_cache, tiny.engine.next_past_length
    assert message(lambda: new_cache(5, 10)) == f"{where} 5 rows, expected at most 4, {rebuild} --max-rows 5`"
    assert message(lambda: new_cache(1, 500)) == (
        f"{where} 512 past columns, expected at most 320, {rebuild} --max-past 512`"
    )
    cache = new_cache(1, 340)
    assert message(lambda: next_past_length(cache, 25)) == (
        f"{where} 25 nodes in one pass, expected at most 24, {rebuild} --max-nodes 25`"
    )
    cache.lengths = np.array([65])
    assert message(lambda: next_past_length(cache, 13)) == (
        f"{where} 13 nodes in one pass, expected at most 12, {rebuild} --max-nodes 13`"
    )
    cache.lengths = np.array([321])
    assert message(lambda: next_past_length(cache, 2)) == (
        f"{where} 384 past columns, expected at most 320, {rebuild} --max-past 384`"
    )


def test_a_plan_that_is_not_the_one_described_is_refused(tiny: HostRig, tmp_path: Path) -> None:
    again = "; rebuild with `lantern-rt build-engine tiny`"
    junk = tmp_path / "junk.plan"
    junk.write_bytes(b"junk")
    assert message(lambda: tiny.load(junk)) == (
        f"{junk}: host_tensorrt 1.0 does not load this plan: Serialization assertion failed{again}"
    )
    assert message(lambda: tiny.load(tmp_path / "none.plan")) == (
        f"{tmp_path / 'none.plan'}: cannot be read (No such file or directory)"
    )
    found = f"{tiny.plan}: found"
    assert message(lambda: tiny.load(profiles=PROFILES[:2])) == (
        f"{found} 3 profiles, expected 2, those of engine.json{again}"
    )
    assert message(lambda: tiny.load(num_layers=1)) == (
        f"{found} a tensor `new_key_values.1.key`, expected 9 tensors{again}"
    )
    assert message(lambda: tiny.load(num_layers=3)) == (
        f"{found} no tensor `new_key_values.2.key`, expected 17 tensors{again}"
    )
    assert message(lambda: tiny.load(vocab_size=47)) == (
        f"{found} `logits` as float32 [-1, -1, 48], expected float32 or float16 [any, any, 47]{again}"
    )
    assert message(lambda: tiny.load(dtype="float16")) == (
        f"{found} `past_key_values.0.key` as float32 [-1, -1, 2, 16], expected float16 [any, any, 2, 16]{again}"
    )


def test_what_the_library_says_of_a_failed_run_is_passed_on(tiny: HostRig) -> None:
    engine = tiny.load(profiles=tuple(replace_past(profile, 640) for profile in PROFILES))  # engine.json says more
    cache = engine.new_cache(1, 500)
    cache.lengths = np.array([400])
    batch = Pass(np.zeros((1, 2), np.int64), np.ones((1, 2, 450), bool), np.zeros((1, 2), np.int64))
    assert message(lambda: engine.run(batch, cache)) == (
        f"{tiny.plan}: host_tensorrt 1.0 does not take `attention_mask` as [1, 1, 2, 450]: attention_mask: "
        "(1, 1, 2, 450) does not satisfy [(1, 4), (1, 1), (2, 2), (66, 322)]; rebuild with `lantern-rt build-engine "
        "tiny`"
    )


@pytest.mark.parametrize(
    ("call", "result", "expected"),
    [
        ("create_execution_context", None, "does not make an execution context (is the device's memory full?)"),
        ("set_optimization_profile_async", False, "does not choose profile `ar`"),
        ("set_tensor_address", False, "does not take an address for `input_embeds`"),
        ("execute_async_v3", False, "does not run this plan"),
    ],
)
def test_a_call_that_fails_without_a_word_is_named(
    tiny: HostRig, monkeypatch: pytest.MonkeyPatch, call: str, result: Any, expected: str
) -> None:
    engine = tiny.load()
    kind = _Engine if call == "create_execution_context" else _Context
    monkeypatch.setattr(kind, call, lambda self, *arguments: result)
    assert message(lambda: tiny.last_of(engine)) == (
        f"{tiny.plan}: host_tensorrt 1.0 {expected}: no reason given; rebuild with `lantern-rt build-engine tiny`"
    )


def test_memory_that_a_context_does_not_take_is_said(tiny: HostRig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny.load()
    monkeypatch.setattr(_Context, "set_device_memory", lambda self, start, size: self.engine.complain(f"{size} bytes"))
    assert message(lambda: tiny.last_of(engine)) == (
        f"{tiny.plan}: host_tensorrt 1.0 does not take memory for intermediate results: 1000 bytes; rebuild with "
        "`lantern-rt build-engine tiny`"
    )


def test_outputs_of_another_shape_than_expected_are_refused(tiny: HostRig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny.load()
    monkeypatch.setattr(_Context, "get_tensor_shape", lambda self, name: (1, 2, 7))
    assert message(lambda: tiny.last_of(engine)) == (
        f"{tiny.plan}: found `logits` as [1, 2, 7], expected [1, 2, 48]; rebuild with `lantern-rt build-engine tiny`"
    )


def test_a_library_that_raises_instead_of_loading_is_quoted(tiny: HostRig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: HostLibrary, plan: bytes) -> None:
        raise RuntimeError("no\n  driver")

    monkeypatch.setattr(HostLibrary, "deserialize_cuda_engine", refuse)
    assert message(tiny.load).startswith(f"{tiny.plan}: host_tensorrt 1.0 does not load this plan: no driver; rebuild ")


def replace_past(profile: Profile, largest: int) -> Profile:
    return profile.model_copy(update={"past": (64, 64, largest)})


def test_caches_of_other_engines_are_refused(tiny: HostRig) -> None:
    with pytest.raises(TypeError, match="a cache of another engine: KVCache"):
        tiny.engine.next_past_length(tiny.rig.engine.new_cache(1, 10), 2)
