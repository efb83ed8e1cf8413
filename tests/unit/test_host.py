"""Properties of the host: cores, quotas, memory, ONNX Runtime, and the report of `doctor`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from refusals import catch_error

from lantern_rt.cli.main import run_program
from lantern_rt.engines import doctor, host, kv_cache
from lantern_rt.engines import gpu as gpu_module
from lantern_rt.engines.doctor import make_host_report
from lantern_rt.engines.gpu import Gpu, find_gpu
from lantern_rt.engines.host import RUNTIMES, choose_thread_count, import_onnxruntime
from lantern_rt.engines.kv_cache import KVCache
from lantern_rt.engines.ort.session import load_session
from lantern_rt.engines.system import read_host_memory
from lantern_rt.errors import EngineError
from lantern_rt.inputs import make_install_command
from lantern_rt.memory import measure_process_memory


def test_doctor_reports_the_provider_and_the_number_of_threads(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime")
    assert run_program(["doctor"]) == 0
    facts = dict(re.split("  +", line.strip(), maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert facts["will use"].startswith("ONNX Runtime, provider cpu, threads: ")
    assert facts.keys() > {"lantern-rt", "bundles", "memory"}
    assert "problem" not in facts


@pytest.fixture
def install_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that adds a distribution with metadata but without a module."""

    def install_distribution(name: str) -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-1.7.1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.7.1\n")

    monkeypatch.syspath_prepend(tmp_path)
    return install_distribution


def test_doctor_reports_two_onnxruntime_distributions(install_distribution: Callable[[str], None]) -> None:
    for name in RUNTIMES:
        install_distribution(name)
    (problem,) = make_host_report().problems
    assert "pip uninstall -y onnxruntime onnxruntime-gpu" in problem


def test_doctor_reports_a_missing_onnxruntime(
    install_distribution: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert make_install_command("cpu") in make_host_report().problems[0]
    with pytest.raises(EngineError):
        import_onnxruntime()
    install_distribution("tensorrt-rtx")
    assert make_install_command("gpu") in make_host_report().problems[0]


def test_doctor_reports_a_driver_older_than_the_libraries(
    install_distribution: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "find_gpu", lambda: Gpu("12.8", "SM89", "L4"))
    install_distribution("tensorrt-rtx")
    assert "found one for CUDA 12.8, expected CUDA 13, driver 580 or newer" in make_host_report().problems[-1]


def test_ctrl_c_during_an_import_is_no_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    class InterruptedFinder:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "onnxruntime":
                raise ImportError("initialization failed") from KeyboardInterrupt()

    monkeypatch.delitem(sys.modules, "onnxruntime", raising=False)
    monkeypatch.setattr(sys, "meta_path", [InterruptedFinder(), *sys.meta_path])
    with pytest.raises(KeyboardInterrupt):
        import_onnxruntime()


def test_doctor_reports_an_installed_provider_that_cannot_run(
    install_distribution: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    install_distribution("onnxruntime-ep-webgpu")
    monkeypatch.setitem(sys.modules, "onnxruntime_ep_webgpu", None)
    (problem,) = make_host_report().problems
    assert problem.startswith("provider webgpu: no module onnxruntime_ep_webgpu")


@pytest.mark.parametrize("threads", [0, 1025, True, "2"])
def test_an_invalid_number_of_threads_is_rejected(threads: int) -> None:
    assert catch_error(EngineError, choose_thread_count, threads).field == "threads"


CGROUP = "/sys/fs/cgroup"
# Control groups that contain this process; it uses /d for memory only.
PROCESS_CGROUPS = {"/proc/self/cgroup": "0::/a/../b\n3:cpu,cpuacct:/c\n4:memory:/d"}
SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
HYPERTHREADS = {SIBLINGS.format(n): f"{n % 2},{n % 2 + 2}" for n in range(4)}


def make_cgroup_v1_quota(folder: str, quota: int) -> dict[str, str]:
    return {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("files", "logical", "physical", "expected"),
    [
        ({}, 8, 4, "4 physical usable"),  # macOS and Windows have no files below /proc and /sys
        ({}, 2, 4, "2 physical usable"),
        ({}, 8, None, "8 physical usable"),
        (HYPERTHREADS, 4, 4, "2 physical usable"),  # hyperthreads of one core count once
        ({f"{CGROUP}/cpu.max": "max 100000"}, 4, 4, "4 physical usable"),
        ({f"{CGROUP}/cpu.max": "nonsense"}, 4, 4, "4 physical usable"),
        ({f"{CGROUP}/cpu.max": "150000 100000"}, 4, 4, "1 physical usable, quota 1.5"),
        (make_cgroup_v1_quota(f"{CGROUP}/cpu", 200000), 4, 4, "2 physical usable, quota 2"),
        (make_cgroup_v1_quota(f"{CGROUP}/cpu", -1), 4, 4, "4 physical usable"),
        (PROCESS_CGROUPS | {f"{CGROUP}/a/b/cpu.max": "300000 100000"}, 4, 4, "3 physical usable, quota 3"),
        (PROCESS_CGROUPS | {f"{CGROUP}/a/cpu.max": "100000 100000"}, 4, 4, "1 physical usable, quota 1"),
        (PROCESS_CGROUPS | make_cgroup_v1_quota(f"{CGROUP}/cpu/c", 200000), 4, 4, "2 physical usable, quota 2"),
        (PROCESS_CGROUPS | {f"{CGROUP}/d/cpu.max": "100000 100000"}, 4, 4, "4 physical usable"),
    ],
)
def test_doctor_and_threads_respect_cores_affinity_and_quota(
    system_files: dict[str, str], monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str], logical: int, physical: int | None, expected: str,
) -> None:  # fmt: skip
    system_files.update(files)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(logical)}, raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: None if logical else physical)
    assert make_host_report().facts["cores"] == expected
    assert choose_thread_count(None) == int(expected[0])


def test_memory_is_measured_on_a_host_without_proc(
    tmp_path: Path, system_files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: (tmp_path / "cpuinfo").read_text())
    facts = make_host_report().facts
    assert facts["cores"] == "3 physical usable"
    assert facts["memory"].count("GiB") == 2
    assert 1 << 20 < host.available_memory() <= read_host_memory("total")
    assert measure_process_memory() is None


def test_an_onnxruntime_that_needs_proc_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(f"{'FAIL : ' * 99}Secure opened-file canonicalization requires procfs at /proc/self/fd/6")

    monkeypatch.setattr(import_onnxruntime(), "InferenceSession", fail)
    assert catch_error(EngineError, load_session, Path("graph.onnx"), 1, "cpu").remedy == "mount /proc"


@pytest.mark.parametrize(
    ("system", "machine", "features", "expected"),
    [
        ("win32", "AMD64", {"AVX": True, "AVX2": True, "AVX512VNNI": True, "SVE": False}, "AMD64 avx avx2 avx512_vnni"),
        ("win32", "ARM64", {"ASIMDDP": True}, "ARM64 asimddp"),
        ("darwin", "arm64", {}, "arm64 asimddp"),
        ("darwin", "x86_64", {"AVX2": True}, "x86_64 avx2"),
    ],
)
@pytest.mark.usefixtures("system_files")
def test_instruction_sets_are_detected_on_hosts_without_proc(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str, features: dict[str, bool], expected: str
) -> None:
    monkeypatch.setattr("numpy._core._multiarray_umath.__cpu_features__", features)
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert host.describe_processor() == expected


def test_numpy_detects_only_instruction_sets_that_cpuinfo_lists(request: pytest.FixtureRequest) -> None:
    before = host.describe_processor().split()
    request.getfixturevalue("system_files")
    assert {*host.describe_processor().split()} <= {*before}


@pytest.mark.parametrize("is_readable", [True, False])
def test_a_limit_on_address_space_limits_the_memory(monkeypatch: pytest.MonkeyPatch, is_readable: bool) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_AS)
    free_bytes = 256 << 20
    if not is_readable:  # simulates a limit that cannot be read
        monkeypatch.setattr(kv_cache, "available_memory", lambda: 1 << 50)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + free_bytes, before[1]))
        assert 0 < host.available_memory() <= free_bytes
        error = catch_error(EngineError, KVCache.empty, 2, 1 << 20, 8, 4, 64, np.float32)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert error.field == "memory"
    assert "1,048,576 tokens need 32.0 GiB" in str(error)


class FakeDriver:
    def __init__(self) -> None:
        self.failing = ""

    def __getattr__(self, name: str) -> Any:
        def function(*arguments: Any) -> int:
            output = getattr(arguments[0], "_obj", arguments[0])  # the argument of `ctypes.byref`
            if name == "cuDeviceGetName":
                output.value = b"NVIDIA L4"
            elif name == "cuDeviceGetAttribute":
                output.value = {75: 8, 76: 9}[arguments[1]]  # major and minor compute capability
            elif name == "cuDriverGetVersion":
                output.value = 13000
            return 999 if name == self.failing else 0

        return function


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver()
    monkeypatch.setattr(gpu_module.ctypes, "CDLL", lambda name: driver)
    return driver


def test_find_gpu_reads_version_capability_and_name(driver: FakeDriver) -> None:
    assert find_gpu() == Gpu("13.0", "SM89", "NVIDIA L4")
    driver.failing = "cuDeviceGet"
    assert find_gpu() is None
