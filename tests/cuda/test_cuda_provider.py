"""ONNX Runtime's CUDA provider on stub libraries that count CUDA operations and compute nothing, without a GPU.

The tests need onnxruntime-gpu, a C compiler and binutils. A process that loads the stubs cannot use the real CUDA.
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

PAST_LENGTH = 100  # entries of the KV cache before the measured forward pass


@pytest.fixture(scope="module", autouse=True)
def _load_stub_libraries(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("null-cuda")
    subprocess.run(["bash", Path(__file__).with_name("build.sh"), folder, sys.executable], check=True)
    null_cuda.load(folder)
    null_cuda.fill_copies_with_noise(4, deviation=0)  # memory that no kernel writes may contain NaN


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "check_provider", lambda name: None)  # cuDNN has no stub
        return Pipeline.from_bundle("scenes", provider="cuda")


def test_a_missing_cudnn_is_an_error_that_says_how_to_install_it() -> None:
    with pytest.raises(EngineError) as caught:
        Pipeline.from_bundle("scenes", provider="cuda")
    assert caught.value.remedy.startswith("install cuDNN")


def make_chain_pass(pipe: Pipeline) -> Callable[[], None]:
    """Return a function that runs the target over a chain, appends nodes to the KV cache, and truncates it again."""
    target = pipe.engines.target
    cache = target.make_cache(2, PAST_LENGTH + 16)

    def run_pass(nodes: int = 16, num_appended: int = 3, length: int = PAST_LENGTH) -> None:
        past_length = int(cache.lengths[0])
        mask = np.zeros((2, nodes, target.past_columns(cache, nodes) + nodes), bool)
        mask[:, :, :past_length] = True
        mask[:, :, -nodes:] = np.tri(nodes, dtype=bool)
        tokens = np.zeros((2, nodes), np.int64)
        cache.append(target.run(PassInput(tokens, mask, tokens), cache).new_kv, [np.arange(num_appended)] * 2)
        cache.run_queued_pass()  # no code reads the outputs, so the pass would not run
        cache.truncate(np.full(2, length))

    run_pass(50, 50, 50)  # fill the cache with twice 50 entries
    run_pass(50, 50)
    return run_pass


def test_a_pass_with_append_and_truncate_needs_few_operations(pipe: Pipeline) -> None:
    """Check upper bounds, so that the test fails if a change adds operations."""
    run_pass = make_chain_pass(pipe)
    layers = open_bundle("scenes").manifest.target.num_layers
    run_pass()
    with null_cuda.count_cuda_operations() as ops:
        run_pass()
    assert ops.gemms <= 5 * layers + 2
    assert ops.kernels <= 10 * layers + 40
    assert ops.h2d == 1, "all inputs are copied to the device in one copy"
    assert ops.bytes_down <= 4, "logits stay on the device until they are read"


def test_a_recorded_pass_is_one_graph_launch(pipe: Pipeline) -> None:
    run_pass = make_chain_pass(pipe)
    for _ in range(3):  # twice before it is recorded
        run_pass()
    with null_cuda.count_cuda_operations() as ops:
        run_pass()
    assert ops.graph_launches == 1
    assert ops.kernels + ops.gemms == 0
    assert (ops.h2d, ops.d2h) == (1, 1), "a copy of the inputs, and of one number to wait for"
    assert ops.allocations == 0, "memory is allocated in earlier passes"


def test_a_new_kv_cache_reuses_the_memory_of_a_released_one(pipe: Pipeline) -> None:
    target = pipe.engines.target
    cache = target.make_cache(2, PAST_LENGTH)
    block = cache.block_handle.block
    del cache
    assert target.make_cache(2, PAST_LENGTH).block_handle.block is block


def count_step_operations(pipe: Pipeline, method: str, num_warm_ups: int = 12) -> null_cuda.Operations:
    """Count the CUDA operations of a decoding step, after warm-up steps in which CUDA graphs are recorded."""
    steps = pipe.stream("a red sphere on sand", method=method, seed=1)
    operations = []
    assert len(list(islice(steps, num_warm_ups))) == num_warm_ups
    for _ in range(8):
        with null_cuda.count_cuda_operations() as ops:
            assert next(steps)
        operations.append(ops)
    # The steps with more operations also copy noise to the device.
    return min(operations, key=lambda counts: counts.total)


@pytest.mark.parametrize(
    "method", ["ar", "sjd:window=3", "eagle:tree=chain-3", "eagle:tree=dynamic-8-4-2:drafter=eagle", "lantern++"]
)
def test_every_decoding_method_runs_on_the_cuda_provider(pipe: Pipeline, method: str) -> None:
    null_cuda.fill_copies_with_noise(4 * pipe.bundle.manifest.codebook_size)
    try:
        steps = list(islice(pipe.stream("a red sphere on sand", method=method, num_images=2), 12))
    finally:
        null_cuda.fill_copies_with_noise(4, deviation=0)
    assert steps[-1].done >= 2 * len(steps)


@pytest.mark.parametrize(
    ("method", "launches", "reads"),
    [("ar", 2, 1), ("sjd:window=3", 2, 3), ("lantern++", 1, 3), ("eagle:tree=dynamic-8-4-2:drafter=eagle", 10, 5)],
)
def test_a_decoding_step_needs_few_graph_launches_and_copies(
    pipe: Pipeline, method: str, launches: int, reads: int
) -> None:
    ops = count_step_operations(pipe, method)
    assert 0 < ops.h2d <= reads
    assert 0 < ops.d2h <= reads
    assert ops.graph_launches == launches, "a launch for each pass, and for each head that samples tokens on the device"
    assert ops.captures == ops.allocations == 0


@pytest.mark.skipif(
    "LANTERN_BUNDLES" not in os.environ, reason="needs bundles written by benchmarks/export.py --output"
)
@pytest.mark.parametrize("method", ["ar", "sjd:window=1", "rows:window=3"])
@pytest.mark.parametrize("shape", ["Lumina2-7B", "GLM-Image-9B"])
def test_a_step_of_lumina2_and_glm_image_copies_to_the_host_once(
    shape: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count the copies of a step in GLM-Image's small grid, where the method `rows` generates one token per pass."""
    monkeypatch.setattr(backend, "check_provider", lambda name: None)
    pipe = Pipeline.from_bundle(Path(os.environ["LANTERN_BUNDLES"]) / f"tiny-{shape}", provider="cuda")
    ops = count_step_operations(pipe, method)
    assert (ops.h2d, ops.d2h) == (1, 1)
    assert (ops.graph_launches, ops.kernels) == (2, 0), (
        "a launch for the forward pass, and for the head that samples tokens"
    )
    assert ops.captures == ops.allocations == 0


def test_threads_can_decode_while_another_records_a_cuda_graph(pipe: Pipeline) -> None:
    """Decode in four threads. Like CUDA, the stubs reject allocations and copies while any thread records a graph."""

    def count_steps(seed: int) -> int:
        return sum(1 for _ in islice(pipe.stream("a cone", method="sjd:window=3", seed=seed, num_images=seed), 8))

    with null_cuda.count_cuda_operations() as ops, ThreadPoolExecutor(4) as threads:
        assert [*threads.map(count_steps, (1, 2, 3, 4))] == [8] * 4
    assert ops.captures > 0


def test_a_device_array_allocates_little_more_than_its_size() -> None:
    with null_cuda.count_cuda_operations() as ops:
        array = device.OrtDevice("cuda").zeros((3, 1 << 20), "float32")
    assert array.shape() == [3, 1 << 20]
    assert ops.bytes_held < 1.5 * 3 * (4 << 20), "an allocator that doubles would hold twice as much"


@pytest.mark.skipif(
    "LANTERN_BUNDLES" not in os.environ, reason="needs bundles written by benchmarks/precision.py --work"
)
@pytest.mark.parametrize(
    ("name", "kernel", "count"),
    [
        ("fp16+float16", "AttentionKernelIN7cutlass6half_t", 1),
        ("int8-weights+float16", "MatMulFloat8bKernelBatchedI6__half", 5),
        ("int4-weights+float16", "MatMulFloat4BatchedKernelI6__half", 5),
        ("bf16+bfloat16", "AttentionKernelIN7cutlass10bfloat16_t", 1),
    ],
)
def test_each_precision_runs_the_expected_cuda_kernels(
    name: str, kernel: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "check_provider", lambda name: None)
    pipe = Pipeline.from_bundle(Path(os.environ["LANTERN_BUNDLES"]) / f"scenes-{name}", provider="cuda")
    run_pass = make_chain_pass(pipe)
    layers = pipe.bundle.manifest.target.num_layers
    run_pass(2, 2)  # four nodes in all: with many nodes, other kernels dequantize integer weights first
    with null_cuda.count_cuda_operations() as ops:
        run_pass(2, 2)
    assert sum(launches for call, launches in ops.calls.items() if kernel in call) == count * layers
