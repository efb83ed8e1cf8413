"""ONNX Runtime's real CUDA provider on libraries that only count: what it takes, how much it asks of a GPU, what fails.

No GPU and no values. Needs onnxruntime-gpu, a C compiler and binutils; one process has either CUDA or the stand-ins.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

try:
    importlib.metadata.version("onnxruntime-gpu")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("needs onnxruntime-gpu", allow_module_level=True)
if sys.platform != "linux" or not all(map(shutil.which, ("cc", "nm", "readelf", "bash"))):
    pytest.skip("needs Linux, a C compiler and binutils", allow_module_level=True)

import null_cuda

from lantern_rt import EngineError, Pipeline, open_bundle
from lantern_rt.engines.ort import backend, device
from lantern_rt.runtime.engine import PassInput

PAST = 100


@pytest.fixture(scope="module", autouse=True)
def _libraries(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("null-cuda")
    subprocess.run(["bash", Path(__file__).with_name("build.sh"), folder, sys.executable], check=True)
    null_cuda.load(folder)


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    """Load scenes on the provider, which must take every node of its graphs: otherwise loading fails."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "check_provider", lambda name: None)  # there is no stand-in for cuDNN
        return Pipeline.from_bundle("scenes", provider="cuda")


def test_without_cudnn_opening_a_bundle_says_so_not_the_first_image() -> None:
    with pytest.raises(EngineError) as caught:
        Pipeline.from_bundle("scenes", provider="cuda")
    assert caught.value.remedy.startswith("install cuDNN")


def make_chain_pass(pipe: Pipeline) -> Callable[[], None]:
    """Return a target pass over a chain of 16 nodes on a past of 100; it appends three nodes, then truncates them."""
    target = pipe.engines.target
    cache = target.new_cache(2, PAST + 16)

    def run(nodes: int = 16, num_appended: int = 3, length: int = PAST) -> None:
        start = int(cache.lengths[0])
        mask = np.zeros((2, nodes, target.padded_past_length(cache, nodes) + nodes), bool)
        mask[:, :, :start] = True
        mask[:, :, -nodes:] = np.tri(nodes, dtype=bool)
        tokens = np.zeros((2, nodes), np.int64)
        cache.append(target.run(PassInput(tokens, mask, tokens), cache).new_kv, [np.arange(num_appended)] * 2)
        cache.run_queued_pass()  # nobody reads its outputs
        cache.truncate(np.full(2, length))

    run(50, 50, 50)
    run(50, 50)
    return run


def test_a_pass_keeps_to_its_operations_and_appending_asks_for_none(pipe: Pipeline) -> None:
    """Check upper bounds for each layer, so that a change's additional operations show here."""
    run = make_chain_pass(pipe)
    layers = open_bundle("scenes").manifest.target.num_layers
    run()
    with null_cuda.counting() as ops:
        run()
    assert ops.gemms <= 5 * layers + 2
    assert ops.kernels <= 10 * layers + 40
    assert ops.h2d == 1, "all inputs go up at once"
    assert ops.bytes_down <= 4, "logits stay on the device until they are read"


def test_a_pass_whose_shape_comes_again_is_one_launch(pipe: Pipeline) -> None:
    run = make_chain_pass(pipe)
    for _ in range(3):  # twice before it is recorded
        run()
    with null_cuda.counting() as ops:
        run()
    assert ops.graph_launches == 1
    assert ops.kernels + ops.gemms == 0
    assert (ops.h2d, ops.d2h) == (1, 1), "inputs, and a number that is waited for"
    assert ops.allocations == 0, "memory is taken once"


def test_images_one_after_the_other_use_the_memory_and_the_recordings_of_the_first(pipe: Pipeline) -> None:
    target = pipe.engines.target
    first = target.new_cache(2, PAST)
    block = first.block_handle.block
    del first
    assert target.new_cache(2, PAST).block_handle.block is block


def count_step(pipe: Pipeline, method: str, warm: int = 12) -> null_cuda.Operations:
    """Count the operations of a step after recurring shapes have been recorded."""
    steps = pipe.stream("a red sphere on sand", method=method, seed=1)
    operations = []
    assert len(list(islice(steps, warm))) == warm
    for _ in range(8):
        with null_cuda.counting() as ops:
            assert next(steps)
        operations.append(ops)
    return min(operations, key=lambda counts: counts.total)  # other steps also copied noise to the device


@pytest.mark.parametrize(
    "method", ["ar", "sjd:window=3", "eagle:tree=chain-3", "eagle:tree=dynamic-8-4-2:drafter=eagle", "lantern++"]
)
def test_every_method_decodes_on_the_provider(pipe: Pipeline, method: str) -> None:
    null_cuda.noise(4 * pipe.bundle.manifest.codebook_size)
    try:
        steps = list(islice(pipe.stream("a red sphere on sand", method=method, num_images=2), 12))
    finally:
        null_cuda.noise(0)
    assert steps[-1].done >= 2 * len(steps)


@pytest.mark.parametrize(
    ("method", "launches", "reads"),
    [("ar", 2, 1), ("sjd:window=3", 2, 3), ("lantern++", 1, 3), ("eagle:tree=dynamic-8-4-2:drafter=eagle", 10, 5)],
)
def test_a_step_reads_once_a_pass_and_heads_read_logits_and_states(
    pipe: Pipeline, method: str, launches: int, reads: int
) -> None:
    ops = count_step(pipe, method)
    assert 0 < ops.h2d <= reads
    assert 0 < ops.d2h <= reads
    assert ops.graph_launches == launches, "each pass is recorded, and its head where codes are drawn there"
    assert ops.captures == ops.allocations == 0


@pytest.mark.skipif("LANTERN_BUNDLES" not in os.environ, reason="needs what benchmarks/export.py --output wrote")
@pytest.mark.parametrize("method", ["ar", "sjd:window=1", "rows:window=3"])
@pytest.mark.parametrize("shape", ["Lumina2-7B", "GLM-Image-9B"])
def test_a_step_of_each_family_reads_once(shape: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check this within the small grid of GLM-Image, too, where `rows` has not begun."""
    monkeypatch.setattr(backend, "check_provider", lambda name: None)
    pipe = Pipeline.from_bundle(Path(os.environ["LANTERN_BUNDLES"]) / f"tiny-{shape}", provider="cuda")
    ops = count_step(pipe, method)
    assert (ops.h2d, ops.d2h) == (1, 1)
    assert (ops.graph_launches, ops.kernels) == (2, 0), "the pass, and its head"
    assert ops.captures == ops.allocations == 0


def test_threads_may_decode_while_others_record(pipe: Pipeline) -> None:
    """Like CUDA, the stand-ins reject allocations and copies of all threads while one thread records."""

    def draw(seed: int) -> int:
        return sum(1 for _ in islice(pipe.stream("a cone", method="sjd:window=3", seed=seed, num_images=seed), 8))

    with null_cuda.counting() as ops, ThreadPoolExecutor(4) as threads:
        assert [*threads.map(draw, (1, 2, 3, 4))] == [8] * 4
    assert ops.captures > 0


def test_memory_is_taken_as_it_is_asked_for() -> None:
    with null_cuda.counting() as ops:
        held = device.OrtDevice("cuda").zeros((3, 1 << 20), "float32")
    assert held.shape() == [3, 1 << 20]
    assert ops.bytes_held < 1.5 * 3 * (4 << 20), "not twice what was taken last"


@pytest.mark.skipif("LANTERN_BUNDLES" not in os.environ, reason="needs what benchmarks/precision.py --work wrote")
@pytest.mark.parametrize(
    ("name", "kernel", "count"),
    [
        ("fp16+float16", "AttentionKernelIN7cutlass6half_t", 1),
        ("int8-weights+float16", "MatMulFloat8bKernelBatchedI6__half", 5),
        ("int4-weights+float16", "MatMulFloat4BatchedKernelI6__half", 5),
        ("bf16+bfloat16", "AttentionKernelIN7cutlass10bfloat16_t", 1),
    ],
)
def test_each_precision_has_its_kernels(name: str, kernel: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "check_provider", lambda name: None)
    pipe = Pipeline.from_bundle(Path(os.environ["LANTERN_BUNDLES"]) / f"scenes-{name}", provider="cuda")
    run = make_chain_pass(pipe)
    layers = pipe.bundle.manifest.target.num_layers
    run(2, 2)  # four nodes of both rows; for many nodes, integer weights are dequantised first
    with null_cuda.counting() as ops:
        run(2, 2)
    assert sum(launches for call, launches in ops.calls.items() if kernel in call) == count * layers
