"""Decoders on a device: caches that change size, hidden states read from device memory, and invalid graph files."""

from __future__ import annotations

import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_backends import SINGLE_THREAD, SMALL, SmallModel
from refusals import expects_error
from tiny_bundle import make_tiny_bundle
from tiny_graphs import TINY
from tiny_rig import spec_of

from lantern_rt.bundle.files import open_bundle
from lantern_rt.engines.contracts import TensorSpec
from lantern_rt.engines.device_engine import DeviceCache
from lantern_rt.engines.graph_writer import GraphWriter
from lantern_rt.engines.ort.cache_pool import CachePool
from lantern_rt.engines.ort.device import GraphTensors, OrtDevice
from lantern_rt.engines.ort.engine import OrtDeviceEngine
from lantern_rt.engines.ort.providers import PROVIDERS
from lantern_rt.errors import BundleError
from lantern_rt.export.graph.graphs import make_target_graph, write_graph
from lantern_rt.export.models.decoder import Decoder, DecoderConfig
from lantern_rt.methods import Sampling
from lantern_rt.runtime.device import SamplingRequest
from lantern_rt.runtime.engine import Floats, HiddenStateView, PassInput
from lantern_rt.runtime.noise import Noise
from lantern_rt.runtime.passes import PrefixBatch, build_committed_mask
from lantern_rt.runtime.state import PrefixRow

RNG = np.random.default_rng(0)
PREFIX = RNG.standard_normal((8, SMALL.prefix, SMALL.hidden_size), np.float32)
NO_PADDING = np.zeros((1, 0), bool)
TABLE = np.zeros((TINY.vocab_size, TINY.hidden_size), np.float32)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    return SmallModel(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def target(small: SmallModel) -> OrtDeviceEngine:
    engine = small.model_on("onnxruntime, device").target
    assert isinstance(engine, OrtDeviceEngine)
    return engine


@pytest.fixture(scope="module")
def drafter(small: SmallModel, target: OrtDeviceEngine) -> OrtDeviceEngine:
    return OrtDeviceEngine(small.folder / "drafter.onnx", small.drafter_spec, None, SINGLE_THREAD, target.device)


def causal_pass(engine: OrtDeviceEngine, cache: DeviceCache, tokens: Any, hidden: Any = None) -> PassInput:
    nodes = np.array(tokens)
    mask, past_length = build_committed_mask(engine, cache, cache.lengths, nodes.shape[1], NO_PADDING)
    mask[:, :, past_length:] = np.tri(nodes.shape[1], dtype=bool)
    positions = np.minimum(cache.lengths[:, None] + np.arange(nodes.shape[1]), SMALL.num_rope_positions - 1)
    return PassInput(positions, mask, nodes, hidden=hidden)


def filled_cache(engine: OrtDeviceEngine, first: int, codes: list[list[int]], capacity: int) -> DeviceCache:
    """Return a cache whose rows have consecutive prefixes, from number `first` on, and then these codes.

    Args:
        engine: engine of the cache.
        first: number of the first prefix.
        codes: codes of each row.
        capacity: capacity of the cache.
    """
    cache = engine.new_cache(len(codes), capacity)
    prefixes = PrefixBatch([PrefixRow(row, np.ones(SMALL.prefix, bool)) for row in PREFIX[first : first + len(codes)]])
    output = engine.run(prefixes.build_prefill(engine, cache), cache)
    cache.append(output.new_kv, [np.arange(SMALL.prefix)] * len(codes))
    longest = max(map(len, codes))
    for start in range(0, longest, 8):
        parts = [row_codes[start : start + 8] for row_codes in codes]
        tokens = np.zeros((len(codes), max(2, *map(len, parts))), np.int64)
        for row, part in enumerate(parts):
            tokens[row, : len(part)] = part
        output = engine.run(causal_pass(engine, cache, tokens), cache)
        cache.append(output.new_kv, [np.arange(len(part)) for part in parts])
    return cache


def next_logits(engine: OrtDeviceEngine, cache: DeviceCache, codes: list[int]) -> Floats:
    """Return the logits after another code in each row, which is not appended to the cache."""
    logits: Floats = engine.run(causal_pass(engine, cache, [[code, 0] for code in codes]), cache).logits[:, 0]
    return logits


CODES: list[list[int]] = [[0, 1, 2], [3] * 20, [1, 2], [], [2, 0, 3, 1] * 22]


def test_a_nearly_full_row_shares_passes_with_rows_of_many_nodes(target: OrtDeviceEngine) -> None:
    full = [1] * 118
    fresh = [2, 1]
    cache = filled_cache(target, 0, [full, fresh], capacity=127)
    codes = RNG.integers(0, 4, (2, 16))
    output = target.run(causal_pass(target, cache, codes), cache)
    cache.append(output.new_kv, [np.arange(4), np.arange(16)])
    for row, (row_codes, count) in enumerate([(full, 6), (fresh, 16)]):  # 6 columns are free
        alone = filled_cache(target, row, [row_codes], capacity=190)
        expected = target.run(causal_pass(target, alone, codes[row : row + 1, :count]), alone).logits[0, :count]
        np.testing.assert_allclose(output.logits[row, :count], expected, atol=1e-5)
    expected = filled_cache(target, 0, [[*full, *codes[0, :4]], [*fresh, *codes[1]]], capacity=190)
    np.testing.assert_allclose(next_logits(target, cache, [3, 3]), next_logits(target, expected, [3, 3]), atol=1e-5)


def test_hidden_states_are_read_from_device_memory(target: OrtDeviceEngine, drafter: OrtDeviceEngine) -> None:
    cache = filled_cache(target, 0, [[0], [1], [2]], 40)
    source = target.run(causal_pass(target, cache, RNG.integers(0, 4, (3, 5))), cache).hidden
    rows = np.array([[2, 0, 1], [1, 1, 0]])  # 5 nodes are stored as 8
    nodes = np.array([[4, 0, 3], [2, 2, 1]])
    states = HiddenStateView(source, rows, nodes).read()
    assert states.shape == (2, 3, SMALL.hidden_size)
    np.testing.assert_array_equal(states, source[:, :5][rows, nodes])
    other_pass: Any = SimpleNamespace(
        device=OrtDevice("cpu"), outputs={"": source.device_value}, output_owners=set(), run_queued_pass=lambda: None
    )
    elsewhere = type(source)(other_pass, "")
    hidden_inputs = [
        states,
        HiddenStateView(source, rows, nodes),
        HiddenStateView(source[:, :5], rows, nodes),
        HiddenStateView(elsewhere, rows, nodes),
    ]
    outputs = []
    for hidden in hidden_inputs:
        cache_of_drafter = drafter.new_cache(2, 40)
        output = drafter.run(causal_pass(drafter, cache_of_drafter, [[0, 1, 2], [3, 2, 1]], hidden), cache_of_drafter)
        outputs.append([output.logits[:, :3], output.hidden[:, :3]])
    for logits, predicted in outputs[1:]:
        np.testing.assert_array_equal(logits, outputs[0][0])
        np.testing.assert_array_equal(predicted, outputs[0][1])
    assert np.abs(outputs[0][0][0] - outputs[0][0][1]).max() > 0.1


def test_outputs_stay_valid_after_their_cache_is_freed(target: OrtDeviceEngine) -> None:
    cache = filled_cache(target, 0, CODES[:2], 40)
    output = target.run(causal_pass(target, cache, [[1, 2], [3, 0]]), cache)
    before = output.hidden[:, :2]
    del cache
    for _ in range(2):  # the same shape, so that memory may be reused
        next_cache = filled_cache(target, 2, CODES[:2], 40)
        for _ in range(2):
            next_logits(target, next_cache, [1, 2])
    np.testing.assert_array_equal(output.hidden[:, :2], before)


def test_sampled_codes_stay_valid_when_their_pass_is_run_again(target: OrtDeviceEngine) -> None:
    cache = filled_cache(target, 0, CODES[:2], 40)
    nodes = np.array([[0, 1], [0, 1]])
    request = SamplingRequest(
        slice(0, 2), nodes, Sampling(cfg_scale=2.0), Noise(3), np.arange(2), np.full(2, 2, np.float32)
    )
    samples = []
    for tokens in ([[1, 2], [3, 0]], [[0, 3], [1, 1]]):
        logits = target.run(causal_pass(target, cache, tokens), cache).logits
        ((codes, scores),) = logits.sample_top_codes([request], 4)
        ((codes_again, scores_again),) = logits.sample_top_codes([request], 4)  # a second request of the same pass
        np.testing.assert_array_equal(codes, codes_again)
        np.testing.assert_allclose(scores, scores_again, atol=1e-6)
        samples.append((codes, scores, codes.copy(), scores.copy()))
    for codes, scores, codes_before, scores_before in samples:
        np.testing.assert_array_equal(codes, codes_before)
        np.testing.assert_array_equal(scores, scores_before)


def test_a_pass_whose_output_is_not_read_still_runs_before_its_cache_is_used(target: OrtDeviceEngine) -> None:
    expected = next_logits(target, filled_cache(target, 0, [[0, 1], [2, 3]], 40), [1, 1])
    cache = filled_cache(target, 0, [[0], [2]], 40)
    output = target.run(causal_pass(target, cache, [[1, 0], [3, 0]]), cache)
    cache.append(output.new_kv, [np.arange(1)] * 2)
    cache.extend(filled_cache(target, 2, [[0]], 40))
    cache.keep_rows(np.array([0, 1]))
    np.testing.assert_allclose(next_logits(target, cache, [1, 1]), expected, atol=1e-5)


def test_passes_of_many_nodes_are_not_kept_for_reuse(target: OrtDeviceEngine) -> None:
    cache = filled_cache(target, 0, [[0]], 200)
    bound = cache.block_handle.block.bound_passes
    for nodes, num_kept in ((64, 1), (65, 0)):
        before = len(bound)
        target.run(causal_pass(target, cache, [[1] * nodes]), cache)
        assert len(bound) - before == num_kept


def write_copy(graph: GraphWriter) -> GraphTensors:
    graph.op("Identity", "data", name="out")
    return [TensorSpec("data", ("float32",), (None,))], [TensorSpec("out", ("float32",), (None,))]


def test_a_bound_pass_is_recorded_at_its_third_run_up_to_the_limit_and_released_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(PROVIDERS, "cpu", PROVIDERS["cpu"]._replace(max_captured_graphs=1))
    device = OrtDevice("cpu")
    graph_ids = list[str]()
    released = list[int]()
    values = {"data": np.zeros(2, np.float32), "out": device.empty((2,), "float32")}
    graph = device.get_helper_graph("copy", write_copy)
    graph.session = SimpleNamespace(
        io_binding=graph.session.io_binding,
        run_with_iobinding=lambda binding, options: graph_ids.append(options.get_run_config_entry("gpu_graph_id")),
        release_captured_graph=released.append,
    )
    bound = [graph.bind_tensors(values, capture_graph=True) for _ in range(2)]
    for number in (0, 0, 0, 1, 1, 1):
        bound[number]()
    assert graph_ids == ["-1", "-1", "1", "-1", "-1", "-1"]
    del bound[0]
    assert released == [1]


def test_memory_that_was_released_last_is_reused_first() -> None:
    pool = CachePool(OrtDevice("cpu"), 1, "float32", 4, None)
    handles = [pool.acquire_block(1, columns) for columns in (1, 2, 3)]
    used = [handle.block for handle in handles]
    while handles:
        del handles[0]
    new_handles = [pool.acquire_block(1, columns) for columns in (3, 2, 1)]
    assert [handle.block in used for handle in new_handles] == [True, True, False]


def test_memory_that_contained_nan_is_not_reused(target: OrtDeviceEngine) -> None:
    expected = next_logits(target, filled_cache(target, 0, [[0, 1], [1]], 40), [2, 3])
    cache = filled_cache(target, 0, [[0, 1], [1]], 40)
    cache.forbid_memory_reuse()
    discarded = cache.block_handle.block
    for value in discarded.device_values:
        value.update_inplace(np.full(value.shape(), np.nan, np.float32))
    del cache
    new_cache = filled_cache(target, 0, [[0, 1], [1]], 40)
    assert new_cache.block_handle.block is not discarded
    np.testing.assert_array_equal(next_logits(target, new_cache, [2, 3]), expected)


def test_several_threads_may_use_one_engine(target: OrtDeviceEngine) -> None:
    def generate(first: int) -> list[Floats]:
        logits = []
        for length in range(6):
            cache = filled_cache(target, first, [[first % 4] * length, [1] * length], 40)
            logits.append(next_logits(target, cache, [2, 3]))
            cache.keep_rows(np.array([1]))
            logits.append(next_logits(target, cache, [3]))
        return logits

    expected = [generate(first) for first in range(6)]
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # seconds, so that threads switch as often as possible
    try:
        with ThreadPoolExecutor(6) as threads:
            for _ in range(3):
                for logits, expected_logits in zip(threads.map(generate, range(6)), expected, strict=True):
                    for values, expected_values in zip(logits, expected_logits, strict=True):
                        np.testing.assert_array_equal(values, expected_values)
    finally:
        sys.setswitchinterval(usual)


def test_a_pass_without_the_inputs_of_its_decoder_is_rejected(
    target: OrtDeviceEngine, drafter: OrtDeviceEngine
) -> None:
    for engine, message in ((target, "either `tokens` or `embeds`"), (drafter, "`tokens` and `hidden`")):
        cache = engine.new_cache(1, 40)
        mask = np.zeros((1, 2, 64 + 2), bool)
        tokens = None if engine is target else np.zeros((1, 2), np.int64)
        with pytest.raises(ValueError, match=message):
            engine.run(PassInput(np.zeros((1, 2), np.int64), mask, tokens), cache)
        with pytest.raises(ValueError, match="a pass over 4 past columns, expected 64"):
            engine.run(PassInput(np.zeros((1, 2), np.int64), mask[:, :, :6], tokens), cache)


def load(path: Path, spec: Any, table: Floats | None) -> OrtDeviceEngine:
    return OrtDeviceEngine(path, spec, table, SINGLE_THREAD, OrtDevice("cpu"))


@pytest.mark.parametrize("content", [b"", b"no graph", b"\x3a\x05abc"], ids=["empty", "text", "truncated"])
def test_a_file_that_is_not_a_graph_is_rejected(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "target.onnx"
    path.write_bytes(content)
    with expects_error(BundleError, "target.onnx: ", "export the bundle again"):
        load(path, spec_of(TINY), TABLE)
    path.unlink()
    with expects_error(BundleError, "target.onnx: ", "export the bundle again"):
        load(path, spec_of(TINY), TABLE)


def test_decoders_without_an_architecture_in_the_manifest_are_rejected(tmp_path: Path) -> None:
    bundle = open_bundle(make_tiny_bundle(tmp_path / "tiny"))
    for role, spec in (("target", bundle.manifest.target), ("drafter", bundle.manifest.drafter)):
        assert spec is not None
        with expects_error(
            BundleError, f"{role}.onnx: found no `architecture` in bundle.json; export the bundle again"
        ):
            load(bundle.path(role), spec, TABLE if role == "target" else None)


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_a_graph_without_its_weights_is_rejected(tmp_path: Path, damage: str) -> None:
    torch.manual_seed(0)
    config = DecoderConfig(128, 2, 4, 4, 512, 300, 3, 2, spare_positions=8)
    path, data = write_graph(make_target_graph(Decoder(config).eval(), torch.randn(300, 128)), tmp_path)
    table = np.zeros((300, 128), np.float32)
    load(path, spec_of(config), table)
    if damage == "missing":
        data.unlink()
    else:
        data.write_bytes(data.read_bytes()[:5000])
    with expects_error(BundleError, "target.onnx", "export the bundle again"):
        load(path, spec_of(config), table)


@pytest.mark.parametrize("change", [{"num_layers": 1}, {"num_layers": 3}, {"vocab_size": 5}], ids=str)
def test_a_graph_whose_sizes_differ_from_the_manifest_is_rejected(small: SmallModel, change: dict[str, int]) -> None:
    spec = small.target_spec.model_copy(update=change)
    with expects_error(BundleError, "target.onnx: ", "; "):
        load(small.folder / "target.onnx", spec, small.table)


def test_a_target_in_place_of_a_drafter_is_rejected_and_the_reverse(small: SmallModel, tmp_path: Path) -> None:
    shutil.copy(small.folder / "target.onnx", tmp_path / "drafter.onnx")
    shutil.copy(small.folder / "drafter.onnx", tmp_path / "target.onnx")
    with expects_error(BundleError, "drafter.onnx: has no weight embed.weight; export the bundle again"):
        load(tmp_path / "drafter.onnx", small.drafter_spec, None)
    with expects_error(BundleError, "target.onnx: has no weight norm.weight; export the bundle again"):
        load(tmp_path / "target.onnx", small.target_spec, small.table)
