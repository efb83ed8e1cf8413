"""Plans that do not load or run as asked for, in one line each, with the host in the GPU's place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from host_rig import PROFILES, HostRig
from host_tensorrt import HostLibrary, _Context, _Engine
from refusals import refused
from tiny_graphs import TINY
from tiny_rig import Rig

from lantern_rt.errors import EngineError
from lantern_rt.runtime.engine import Pass


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> HostRig:
    torch.set_num_threads(1)
    return HostRig(Rig(tmp_path_factory.mktemp("tiny"), TINY))


def test_more_than_a_plan_was_built_for_is_refused_with_the_option_that_allows_it(tiny: HostRig) -> None:
    where, built = f"{tiny.plan}: found", "rebuild with `lantern-rt build-engine tiny"
    with refused(EngineError, f"{where} 5 rows, expected at most 4", f"{built} --max-rows 5`"):
        tiny.engine.new_cache(5, 10)
    with refused(EngineError, f"{where} 474 columns of a cache, expected at most 320", f"{built} --max-past 474`"):
        tiny.engine.new_cache(1, 500)
    cache = tiny.engine.new_cache(1, 340)
    for length, nodes, found, option in (
        (0, 25, "25 nodes in one pass, expected at most 24", "--max-nodes 25"),
        (319, 2, "384 columns of a cache, expected at most 320", "--max-past 384"),
    ):
        cache.lengths = np.array([length])
        with refused(EngineError, f"{where} {found}", f"{built} {option}`"):
            tiny.engine.next_past_length(cache, nodes)


def test_a_file_that_is_no_plan_is_refused(tiny: HostRig, tmp_path: Path) -> None:
    (junk := tmp_path / "junk.plan").write_bytes(b"junk")
    with refused(EngineError, f"{junk}: host_tensorrt 1.0 does not load this plan: Serialization", "rebuild with"):
        tiny.load(junk)
    with refused(EngineError, f"{tmp_path / 'none.plan'}: cannot be read (No such file or directory)"):
        tiny.load(tmp_path / "none.plan")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"profiles": PROFILES[:1]}, "2 profiles, expected 1, those of engine.json"),
        ({"num_layers": 1}, "a tensor `past_key_values.1.key`, expected 11 tensors"),
        ({"num_layers": 3}, "no tensor `past_key_values.2.key`, expected 19 tensors"),
        ({"vocab_size": 47}, "`logits` as float32 [-1, -1, 48], expected float32 [any, any, 47]"),
        (
            {"dtype": "float16"},
            "`embeddings` as float32 [-1, 64], expected float16 [any, 64]",
        ),
    ],
)
def test_a_plan_that_is_not_the_one_described_is_refused(tiny: HostRig, change: dict[str, Any], found: str) -> None:
    with refused(EngineError, f"{tiny.plan}: found {found}; rebuild with `lantern-rt build-engine tiny`"):
        tiny.load(**change)


def test_what_the_library_says_of_a_failed_run_is_passed_on(tiny: HostRig) -> None:
    longer = tuple(profile.model_copy(update={"rows": (1, 2, 8)}) for profile in PROFILES)
    engine = tiny.load(profiles=longer)  # engine.json says more than the plan takes
    cache = engine.new_cache(5, 300)
    batch = Pass(np.zeros((5, 2), np.int64), np.ones((5, 2, 66), bool), np.zeros((5, 2), np.int64))
    with refused(EngineError, "does not take `token_ids` as [5, 2]: ", "does not satisfy", "rebuild with"):
        engine.run(batch, cache)


@pytest.mark.parametrize(
    ("call", "result", "expected"),
    [
        ("create_execution_context", None, "does not make an execution context (is the device's memory full?)"),
        ("set_optimization_profile_async", False, "does not choose profile `ar`"),
        ("execute_v2", False, "does not run this plan"),
    ],
)
def test_a_call_that_fails_without_a_word_is_named(
    tiny: HostRig, monkeypatch: pytest.MonkeyPatch, call: str, result: Any, expected: str
) -> None:
    engine = tiny.load()
    kind = _Engine if call == "create_execution_context" else _Context
    monkeypatch.setattr(kind, call, lambda self, *arguments: result)
    with refused(EngineError, f"{tiny.plan}: host_tensorrt 1.0 {expected}: no reason given; rebuild with"):
        tiny.last_of(engine)


def test_outputs_of_another_shape_than_expected_are_refused(tiny: HostRig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny.load()
    monkeypatch.setattr(_Context, "get_tensor_shape", lambda self, name: (1, 2, 7))
    with refused(EngineError, f"{tiny.plan}: found `logits` as [1, 2, 7], expected [1, 2, 48]; rebuild with"):
        tiny.last_of(engine)


def test_a_library_that_raises_instead_of_loading_is_quoted(tiny: HostRig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: HostLibrary, plan: bytes) -> None:
        raise RuntimeError("no\n  driver")

    monkeypatch.setattr(HostLibrary, "deserialize_cuda_engine", refuse)
    with refused(EngineError, f"{tiny.plan}: host_tensorrt 1.0 does not load this plan: no driver; rebuild with"):
        tiny.load()


def test_caches_of_other_engines_are_refused(tiny: HostRig) -> None:
    with pytest.raises(TypeError, match="a cache of another engine: KVCache"):
        tiny.engine.next_past_length(tiny.rig.engine.new_cache(1, 10), 2)
