"""What this host offers: cores, quotas, memory, ONNX Runtime, and what doctor says of it."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from lantern_rt.cli.main import run_program
from lantern_rt.engines import doctor, host, kv_cache
from lantern_rt.engines.doctor import host_report
from lantern_rt.engines.gpu import Gpu
from lantern_rt.engines.host import import_onnxruntime, thread_count
from lantern_rt.engines.kv_cache import KVCache
from lantern_rt.engines.ort.session import load_session
from lantern_rt.engines.system import host_memory
from lantern_rt.errors import EngineError
from lantern_rt.memory import anonymous_memory


def test_doctor_says_what_will_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime")
    assert run_program(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == []
    assert report["facts"]["will use"].startswith("ONNX Runtime, provider cpu, threads: ")
    assert run_program(["doctor"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in report["facts"])


def test_two_onnxruntime_distributions_are_a_problem_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "installed", lambda *names: list(names))
    (problem,) = host_report().problems
    assert "pip uninstall -y onnxruntime onnxruntime-gpu" in problem


def test_a_missing_onnxruntime_is_a_problem_and_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert "pip install 'lantern-rt[cpu]'" in host_report().problems[0]
    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(EngineError):
        import_onnxruntime()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1" if name == "tensorrt-rtx" else version(name))
    assert "pip install 'lantern-rt[gpu]'" in host_report().problems[0]


def test_a_driver_older_than_the_installed_libraries_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_gpu", lambda: Gpu("12.8", "SM89", "L4"))
    monkeypatch.setattr(doctor, "_installed", lambda: {"tensorrt-rtx": "1.7.1"})
    monkeypatch.setattr(doctor, "installed", lambda *_: [])
    assert "found one for CUDA 12.8, expected CUDA 13, driver 580 or newer" in host_report().problems[-1]


def test_ctrl_c_while_onnxruntime_is_imported_is_no_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "onnxruntime":
                raise ImportError("initialization failed") from KeyboardInterrupt()

    monkeypatch.delitem(sys.modules, "onnxruntime", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(KeyboardInterrupt):
        import_onnxruntime()


def test_an_installed_provider_that_cannot_run_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(doctor, "_installed", lambda: {"onnxruntime-ep-webgpu": "1"})
    monkeypatch.setattr(doctor, "installed", lambda *_: [])
    monkeypatch.setitem(sys.modules, "onnxruntime_ep_webgpu", None)
    (problem,) = host_report().problems
    assert problem.startswith("provider webgpu: no module onnxruntime_ep_webgpu")


@pytest.mark.parametrize("threads", [0, 1025, True, "2"])
def test_numbers_of_threads_have_bounds(threads: int) -> None:
    with pytest.raises(EngineError) as caught:
        thread_count(threads)
    assert caught.value.field == "threads"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu.max": "nonsense"}, None),
    ],
)
def test_the_cpu_quota_limits_the_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], quota: float | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    monkeypatch.setattr(host, "_affinity", lambda: {0, 1, 2, 3})
    monkeypatch.setattr(host, "_CPU", tmp_path)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 4)
    assert host.cpu_quota() == quota
    assert host.usable_cores() == (4 if quota is None else int(quota))


def test_control_groups_are_the_processs_own_and_all_above_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_read", lambda path: "0::/a/../b\n3:cpu,cpuacct:/c\n4:memory:/d")
    own = ("", "cpu", "a", "a/b", "cpu/c")
    assert host._cgroups() == [host._CGROUP / path for path in own]


def test_hyperthreads_of_one_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu in range(4):
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
    monkeypatch.setattr(host, "_CPU", tmp_path)
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    monkeypatch.setattr(host, "_affinity", lambda: {0, 1, 2, 3})
    assert host.usable_cores() == 2


def test_without_sys_the_system_is_asked_for_physical_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_CPU", tmp_path)  # as on macOS and Windows
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    for logical, physical, cores in ((8, 4, 4), (2, 4, 2), (8, None, 8)):
        monkeypatch.setattr(host, "_affinity", lambda logical=logical: set(range(logical)))
        monkeypatch.setattr(psutil, "cpu_count", lambda logical, physical=physical: None if logical else physical)
        assert host.usable_cores() == cores


def test_without_proc_the_system_is_asked_for_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    monkeypatch.setattr(host, "_CPU", tmp_path)
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    monkeypatch.setattr(host, "_affinity", lambda: {0, 1, 2})
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: (tmp_path / "cpuinfo").read_text())
    assert host.usable_cores() == 3
    assert 1 << 20 < host.available_memory() <= host_memory("total")
    assert host_report().facts["memory"].count("GiB") == 2
    assert anonymous_memory() is None


def test_an_onnxruntime_that_needs_proc_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(f"{'FAIL : ' * 99}Secure opened-file canonicalization requires procfs at /proc/self/fd/6")

    monkeypatch.setattr(import_onnxruntime(), "InferenceSession", refuse)
    with pytest.raises(EngineError) as caught:
        load_session(b"", 1, "cpu")
    assert caught.value.remedy == "mount /proc"


@pytest.mark.parametrize(
    ("system", "machine", "features", "expected"),
    [
        ("win32", "AMD64", {"AVX": True, "AVX2": True, "AVX512VNNI": True, "SVE": False}, "AMD64 avx avx2 avx512_vnni"),
        ("win32", "ARM64", {"ASIMDDP": True}, "ARM64 asimddp"),
        ("darwin", "arm64", {}, "arm64 asimddp"),
        ("darwin", "x86_64", {"AVX2": True}, "x86_64 avx2"),
    ],
)
def test_instruction_sets_are_known_without_proc(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str, features: dict[str, bool], expected: str
) -> None:
    monkeypatch.setattr(host, "_CPU_INFO", Path("nowhere"))
    monkeypatch.setattr(host, "_numpy_features", lambda: features)
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert host.processor() == expected


def test_numpy_says_what_linux_says(monkeypatch: pytest.MonkeyPatch) -> None:
    before = host.processor().split()
    monkeypatch.setattr(host, "_CPU_INFO", Path("nowhere"))
    assert {*host.processor().split()} <= {*before}


@pytest.mark.parametrize("known", [True, False])
def test_a_limit_on_address_space_counts_as_memory(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    resource = pytest.importorskip("resource")
    before, room = resource.getrlimit(resource.RLIMIT_AS), 256 << 20
    if not known:  # as of a limit that nobody tells
        monkeypatch.setattr(kv_cache, "available_memory", lambda: 1 << 50)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + room, before[1]))
        assert 0 < host.available_memory() <= room
        with pytest.raises(EngineError) as caught:
            KVCache.empty(2, 1 << 20, 8, 4, 64, np.float32)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert caught.value.field == "memory"
    assert "1,048,576 tokens need 32.0 GiB" in str(caught.value)
