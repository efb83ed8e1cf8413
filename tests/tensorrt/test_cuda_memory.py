"""Device memory through the driver's library: a stand-in compiled from C, and the GPU where there is one."""

from __future__ import annotations

import ctypes
import gc
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from refusals import refused

from lantern_rt.engines.trt.cuda import ALIGNMENT, Block, CudaMemory, Lines, find_gpu, open_gpu
from lantern_rt.engines.trt.device_cache import BlockCache, Layout
from lantern_rt.errors import EngineError
from lantern_rt.runtime.engine import Pass


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver's functions on host memory."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("needs a C compiler, cc")
    library = tmp_path_factory.mktemp("driver") / "libcuda.so"
    source = Path(__file__).with_name("host_cuda.c")
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return library


@pytest.fixture(params=["stand-in", pytest.param("gpu", marks=pytest.mark.gpu)])
def memory(request: pytest.FixtureRequest) -> CudaMemory:
    if request.param == "stand-in":
        return CudaMemory(str(request.getfixturevalue("stand_in")))
    if find_gpu() is None:
        pytest.skip("needs an NVIDIA GPU and its driver")
    return open_gpu()


def numbers(memory: CudaMemory, address: int, count: int) -> list[int]:
    found = np.empty(count, np.uint8)
    memory.download(found, address)
    memory.synchronise()
    return found.tolist()


def test_bytes_go_to_the_device_and_come_back(memory: CudaMemory) -> None:
    sent = np.random.default_rng(0).standard_normal((37, 1001), np.float32)
    block, found = Block(memory, sent.nbytes), np.empty_like(sent)
    assert block.address % ALIGNMENT == 0
    memory.upload(block.address, sent)
    memory.download(found, block.address)
    memory.synchronise()
    np.testing.assert_array_equal(found, sent)


def test_freed_memory_stays_with_the_process(stand_in: Path) -> None:
    CudaMemory(str(stand_in))
    assert ctypes.c_uint64.in_dll(ctypes.CDLL(str(stand_in)), "host_pool_keeps").value == 2**64 - 1


def test_zeros_and_lines_land_where_they_should(memory: CudaMemory) -> None:
    source, target = Block(memory, 96), Block(memory, 96)
    memory.upload(source.address, np.arange(96, dtype=np.uint8))
    memory.upload(target.address, np.full(96, 99, np.uint8))
    memory.zero(target.address + 1, 3)
    memory.copy(Lines(target.address + 5, 9, 4), Lines(source.address + 2, 7, 5), 3, 4, 2)
    expected = np.full(96, 99)
    expected[1:4] = 0
    for slice_ in range(2):
        for line in range(4):
            expected[5 + 9 * (4 * slice_ + line) :][:3] = np.arange(3) + 2 + 7 * (5 * slice_ + line)
    assert numbers(memory, target.address, 96) == expected.tolist()


def test_a_cache_of_many_layers_keeps_the_accepted_nodes(memory: CudaMemory) -> None:
    rows, nodes, layout = 3, 8, Layout(tensors=72, heads=5, columns=64, entry=48)
    cache = BlockCache(memory, rows, 60, layout)
    held = np.random.default_rng(1).integers(0, 255, (72, rows, 5, 64, 48), np.uint8)
    memory.upload(cache.block.address, held)
    accepted_indices = [np.array(pick) for pick in ([0, 1, 4], [0, 2], [0])]
    batch = Pass(np.zeros((rows, nodes), np.int64), np.zeros((rows, nodes, 64 + nodes), bool))
    for nodes_of_rows in (accepted_indices, [np.array([1, 2, 3])] * rows):
        cache.append(cache.encode(batch, nodes)["write"], nodes_of_rows)
    cache.keep_rows(np.array([1, 0]))
    found = np.empty((72, 2, 5, 64, 48), np.uint8)
    memory.download(found, cache.block.address)
    memory.synchronise()
    for place, row in enumerate([1, 0]):
        first = accepted_indices[row]
        order = [*first, *(len(first) + np.array([1, 2, 3]))]
        np.testing.assert_array_equal(found[:, place, :, : len(order)], held[:, row][:, :, order])


def test_every_thread_may_call(memory: CudaMemory) -> None:
    found: list[list[int]] = []

    def work() -> None:
        block = Block(memory, 8)
        memory.zero(block.address, 8)
        found.append(numbers(memory, block.address, 8))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[0] * 8] * 4


def test_what_fails_is_said_in_the_drivers_own_words(memory: CudaMemory) -> None:
    with refused(EngineError, "cuMemAllocAsync for 67,108,864 MiB failed: out of memory (status 2)"):
        memory.allocate(1 << 46)


def test_memory_is_given_back_when_nothing_refers_to_it(stand_in: Path) -> None:
    memory, library = CudaMemory(str(stand_in)), ctypes.CDLL(str(stand_in))
    library.live_blocks.restype = ctypes.c_longlong
    gc.collect()
    before = library.live_blocks()
    block = Block(memory, 100)
    assert library.live_blocks() == before + 1
    del block
    gc.collect()
    assert library.live_blocks() == before


def test_strided_arrays_are_refused_before_they_are_misread(stand_in: Path) -> None:
    memory = CudaMemory(str(stand_in))
    block = Block(memory, 64)
    with pytest.raises(ValueError, match="expected a contiguous one"):
        memory.upload(block.address, np.zeros((4, 8), np.uint8)[:, ::2])


def test_a_host_without_a_driver_is_told_so(tmp_path: Path) -> None:
    missing = tmp_path / "libcuda.so.1"
    with refused(EngineError, f"{missing}: cannot be used (", "install or update the NVIDIA driver"):
        CudaMemory(str(missing))
