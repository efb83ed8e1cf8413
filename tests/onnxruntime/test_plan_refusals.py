"""Plans that do not load or run as asked for, in one line each, with the host in the GPU's place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from host_rig import PROFILES, HostRig
from host_tensorrt import HostLibrary, _Context, _Engine
from tiny_graphs import TINY
from tiny_rig import Rig

from lantern_rt.errors import EngineError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> HostRig:
    torch.set_num_threads(1)
    return HostRig(Rig(tmp_path_factory.mktemp("tiny"), TINY))


def refusal(call: Callable[[], object]) -> EngineError:
    with pytest.raises(EngineError) as caught:
        call()
    return caught.value


def test_more_than_a_plan_was_built_for_is_refused_with_the_option_that_allows_it(tiny: HostRig) -> None:
    engine = tiny.engine
    error = refusal(lambda: engine.new_cache(5, 10))
    assert (error.found, error.remedy) == ("5 rows", "rebuild with `lantern-rt build-engine tiny --max-rows 5`")
    assert refusal(lambda: engine.new_cache(1, 500)).found == "474 columns of a cache"
    cache = engine.new_cache(1, 340)
    for length, nodes, found in ((0, 25, "25 nodes in one pass"), (319, 2, "384 columns of a cache")):
        cache.lengths = np.array([length])
        assert refusal(lambda nodes=nodes: engine.next_past_length(cache, nodes)).found == found


def test_a_file_that_is_no_plan_is_refused(tiny: HostRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: HostLibrary, plan: bytes) -> None:
        raise RuntimeError("no\n  driver")

    (junk := tmp_path / "junk.plan").write_bytes(b"junk")
    assert refusal(lambda: tiny.load(junk)).problem.startswith("host_tensorrt 1.0 does not load this plan: Seriali")
    assert refusal(lambda: tiny.load(tmp_path / "none.plan")).problem.startswith("cannot be read")
    monkeypatch.setattr(HostLibrary, "deserialize_cuda_engine", refuse)
    assert refusal(tiny.load).problem == "host_tensorrt 1.0 does not load this plan: no driver"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"profiles": PROFILES[:1]}, "2 profiles"),
        ({"num_layers": 1}, "a tensor `past_key_values.1.key`"),
        ({"num_layers": 3}, "no tensor `past_key_values.2.key`"),
        ({"vocab_size": 47}, "`logits` as float32 [-1, -1, 48]"),
        ({"dtype": "float16"}, "`embeddings` as float32 [-1, 64]"),
    ],
)
def test_a_plan_that_is_not_the_one_described_is_refused(tiny: HostRig, change: dict[str, Any], found: str) -> None:
    assert refusal(lambda: tiny.load(**change)).found == found


@pytest.mark.parametrize(
    ("call", "result", "expected"),
    [
        ("create_execution_context", None, "does not make an execution context (is the device's memory full?)"),
        ("set_optimization_profile_async", False, "does not choose profile `ar`"),
        ("set_input_shape", False, "does not take `embeddings` as [48, 64]"),
        ("execute_v2", False, "does not run this plan"),
    ],
)
def test_a_call_that_fails_without_a_word_is_named(
    tiny: HostRig, monkeypatch: pytest.MonkeyPatch, call: str, result: Any, expected: str
) -> None:
    engine = tiny.load()
    kind = _Engine if call == "create_execution_context" else _Context
    monkeypatch.setattr(kind, call, lambda self, *arguments: result)
    error = refusal(lambda: tiny.last_of(engine))
    assert error.problem == f"host_tensorrt 1.0 {expected}: no reason given"


def test_outputs_of_another_shape_than_expected_are_refused(tiny: HostRig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny.load()
    monkeypatch.setattr(_Context, "get_tensor_shape", lambda self, name: (1, 2, 7))
    assert refusal(lambda: tiny.last_of(engine)).found == "`logits` as [1, 2, 7]"


def test_caches_of_other_engines_are_refused(tiny: HostRig) -> None:
    with pytest.raises(TypeError, match="a cache of another engine: KVCache"):
        tiny.engine.next_past_length(tiny.rig.engine.new_cache(1, 10), 2)
