"""What this host offers: cores, quotas, memory, ONNX Runtime, and what doctor says of it."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path

import pytest

from lantern_rt.cli.main import run_program
from lantern_rt.engines import doctor, host
from lantern_rt.engines.doctor import host_report
from lantern_rt.engines.host import import_onnxruntime, thread_count
from lantern_rt.errors import EngineError


def test_doctor_says_what_will_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime")
    assert run_program(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == []
    assert report["facts"]["will use"].startswith("ONNX Runtime on the CPU, threads: ")
    assert run_program(["doctor"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in report["facts"])


def test_two_onnxruntime_distributions_are_a_problem_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "installed_runtimes", lambda: ["onnxruntime", "onnxruntime-gpu"])
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
    monkeypatch.setattr(doctor, "installed_runtimes", list)
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
    assert host.cpu_quota() == quota
    assert host.usable_cores() == (4 if quota is None else int(quota))


def test_hyperthreads_of_one_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu in range(4):
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
    monkeypatch.setattr(host, "_CPU", tmp_path)
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    monkeypatch.setattr(host, "_affinity", lambda: {0, 1, 2, 3})
    assert host.usable_cores() == 2
