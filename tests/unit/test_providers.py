"""ONNX Runtime execution providers: their choice by name, and errors if a provider cannot run a graph."""

from __future__ import annotations

import re
import sys
import threading
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from refusals import catch_error
from tiny_bundle import make_tiny_bundle

from lantern_rt import Pipeline, open_bundle
from lantern_rt.cli.options import EngineOptions
from lantern_rt.engines.gpu import Gpu
from lantern_rt.engines.ort import providers
from lantern_rt.engines.ort.providers import (
    ON_CPU,
    PROVIDERS,
    Provider,
    ProviderChoice,
    check_node_assignment,
    detect_provider,
    find_available_provider,
    get_device_lock,
)
from lantern_rt.engines.ort.session import GraphSession, check_provider
from lantern_rt.errors import EngineError

GRAPH = Path("target.onnx")
WEBGPU = "WebGpuExecutionProvider"
CUDA = "CUDAExecutionProvider"
CPU = "CPUExecutionProvider"
PLUGIN = "onnxruntime_ep_webgpu"


def make_mock_session(*active: str, **nodes: list[str]) -> Any:
    parts = [
        SimpleNamespace(ep_name=name, get_nodes=lambda ops=ops: [SimpleNamespace(op_type=op) for op in ops])
        for name, ops in nodes.items()
    ]
    return SimpleNamespace(get_providers=lambda: active, get_provider_graph_assignment_info=lambda: parts)


class MockOnnxRuntime:
    __version__ = "1.31.1"

    def __init__(self, *providers: str, devices: tuple[str, ...] = ()) -> None:
        self.providers = providers
        self.devices = devices
        self.registered_plugins = list[tuple[str, str]]()

    def get_available_providers(self) -> tuple[str, ...]:
        return self.providers

    def register_execution_provider_library(self, name: str, path: str) -> None:
        if path == "broken.so":
            raise RuntimeError("libvulkan.so.1: cannot open shared object file")
        self.registered_plugins.append((name, path))

    def get_ep_devices(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(ep_name=name) for name in (CPU, *self.devices)]


def test_every_graph_but_the_target_may_have_another_provider() -> None:
    assert ProviderChoice.parse(()) == ProviderChoice.parse("auto") != ProviderChoice.parse("cpu") == ON_CPU
    choice = ProviderChoice.parse(["cuda", "vq_decoder=openvino-bf16", "condition=cpu", "drafter=webgpu"])
    roles = ("target", "drafter", "condition", "vq_decoder", "vq_encoder")
    assert [choice.get_provider(role) for role in roles] == ["cuda", "webgpu", "cpu", "openvino-bf16", "cuda"]
    assert ProviderChoice.parse(str(choice)) == choice


@pytest.mark.parametrize(
    ("names", "expected_fault"),
    [
        ("abacus", "'abacus'"),
        ("vq=cpu", "graph 'vq'"),
        ("target=cuda", "graph 'target'"),
        ("vq_decoder=", "''"),
        ("drafter=auto", "'auto'"),
        ("cpu,cuda", "cpu and cuda for all graphs"),
        ("condition=cpu,condition=cuda", "cpu and cuda for condition"),
        ("openvino-bf16", "openvino-bf16 for all graphs"),
        ("condition=openvino-bf16", "openvino-bf16 for condition"),
    ],
)
def test_invalid_provider_options_are_rejected(names: str, expected_fault: str) -> None:
    error = catch_error(EngineError, ProviderChoice.parse, names)
    assert (error.field, error.found) == ("provider", expected_fault)


def test_the_image_decoder_may_run_on_another_provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.setitem(PROVIDERS, "twin", Provider("twin", CPU, "onnxruntime", {}))
    bundle = make_tiny_bundle(tmp_path / "tiny")
    run = GraphSession.run
    graphs_by_provider = dict[str, set[str]]()

    def record_session(session: GraphSession, feeds: Any) -> Any:
        graphs_by_provider.setdefault(session.provider, set()).add(session.path.stem)
        return run(session, feeds)

    monkeypatch.setattr(GraphSession, "run", record_session)
    pipe = Pipeline.from_bundle(bundle, threads=1, provider="cpu,vq_decoder=twin")
    pipe("red sphere", method="ar")
    assert graphs_by_provider == {"cpu": {"condition", "target"}, "twin": {"vq_decoder"}}
    assert (pipe.engines.backend, pipe.engines.image_backend) == ("onnxruntime-cpu", "onnxruntime-twin")


def test_a_missing_provider_names_its_package() -> None:
    error = catch_error(EngineError, find_available_provider, "cuda", MockOnnxRuntime("AzureExecutionProvider", CPU))
    assert (error.found, error.expected) == (f"onnxruntime 1.31.1 with AzureExecutionProvider, {CPU}", CUDA)
    assert "onnxruntime-gpu[cuda,cudnn]" in error.remedy
    assert find_available_provider("cuda", MockOnnxRuntime(CUDA, CPU)).execution_provider == CUDA


def test_a_graph_that_runs_partly_on_the_cpu_is_rejected() -> None:
    cuda = PROVIDERS["cuda"]
    assert catch_error(EngineError, check_node_assignment, GRAPH, cuda, make_mock_session(CPU)).found == CPU
    nodes = {CUDA: ["MatMul"] * 3, CPU: ["MatMul", "Shape", "Softmax", "MatMul"]}
    error = catch_error(EngineError, check_node_assignment, GRAPH, cuda, make_mock_session(CUDA, CPU, **nodes))
    assert "3 nodes of this graph (2 MatMul, 1 Softmax)" in error.problem
    check_node_assignment(GRAPH, cuda, make_mock_session(CUDA, CPU, **{CPU: ["Shape", "Concat", "MemcpyToHost"]}))


def test_a_provider_without_convolutions_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    check_provider("cpu")

    def fail(*_: object) -> None:
        raise RuntimeError("NOT_IMPLEMENTED: cuDNN is not there")

    monkeypatch.setattr("lantern_rt.engines.ort.session.find_available_provider", lambda name, runtime: PROVIDERS[name])
    monkeypatch.setattr("lantern_rt.engines.ort.session.load_session", lambda *_: SimpleNamespace(run=fail))
    assert catch_error(EngineError, check_provider, "cuda").remedy.startswith("install cuDNN")


def test_a_provider_plugin_is_registered_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, PLUGIN, SimpleNamespace(get_library_path=lambda: "plugin.so"))
    runtime = MockOnnxRuntime(CPU, devices=(WEBGPU, WEBGPU))
    for _ in range(2):
        assert find_available_provider("webgpu", runtime).is_plugin
    assert runtime.registered_plugins == [(WEBGPU, "plugin.so")]


@pytest.mark.parametrize(
    ("path", "words"), [("plugin.so", "no device"), ("broken.so", "libvulkan"), (None, "no module onnxruntime_ep")]
)
def test_an_unusable_provider_plugin_is_rejected(monkeypatch: pytest.MonkeyPatch, path: str | None, words: str) -> None:
    module = None if path is None else SimpleNamespace(get_library_path=lambda: path)
    monkeypatch.setitem(sys.modules, PLUGIN, module)
    runtime = MockOnnxRuntime(CPU, devices=("OtherExecutionProvider",))
    assert words in catch_error(EngineError, find_available_provider, "webgpu", runtime).problem


def test_webgpu_is_rejected_if_cuda_would_allocate_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, PLUGIN, SimpleNamespace(get_library_path=lambda: "plugin.so"))
    runtime = MockOnnxRuntime(CUDA, CPU, devices=(WEBGPU,))
    error = catch_error(EngineError, find_available_provider, "webgpu", runtime)
    assert (error.field, error.found, error.expected) == ("provider webgpu", "onnxruntime-gpu", "onnxruntime")
    monkeypatch.setattr(providers, "list_installed_packages", lambda name: name != "onnxruntime")
    for gpu, expected in ((Gpu("13.0", "SM89", "L4"), "cuda"), (None, "cpu")):
        monkeypatch.setattr(providers, "find_gpu", lambda gpu=gpu: gpu)
        assert detect_provider(runtime) == expected
    assert runtime.registered_plugins == []


def test_the_gpu_is_the_default_if_its_package_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, PLUGIN, SimpleNamespace(get_library_path=lambda: "plugin.so"))
    for package, provider in (("onnxruntime", "cpu"), ("onnxruntime-gpu", "cuda"), ("onnxruntime-ep-webgpu", "webgpu")):
        monkeypatch.setattr(providers, "list_installed_packages", lambda name, package=package: name == package)
        for gpu, expected in ((Gpu("13.0", "SM89", "L4"), provider), (None, "cpu")):
            monkeypatch.setattr(providers, "find_gpu", lambda gpu=gpu: gpu)
            assert detect_provider(MockOnnxRuntime(CPU, devices=(WEBGPU,) if gpu else ())) == expected


def test_an_unusable_gpu_stops_loading_of_gpu_bundles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime")
    bundle = open_bundle(make_tiny_bundle(tmp_path / "tiny"))
    monkeypatch.setattr("lantern_rt.engines.loader.detect_provider", lambda _: "cuda")
    assert catch_error(EngineError, Pipeline.from_bundle, bundle).field == "provider cuda"
    assert not EngineOptions().runs_on_cpu(bundle)
    assert capsys.readouterr().err == "running on the GPU, provider cuda; --provider cpu for the CPU\n"
    target = bundle.manifest.target.model_copy(update={"precision": "int8"})
    integers = replace(bundle, manifest=bundle.manifest.model_copy(update={"target": target}))
    assert EngineOptions().runs_on_cpu(integers)


def test_minimum_gpu_libraries_are_those_of_constraints_txt() -> None:
    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    minimum_versions = {re.sub(r"(\[.*])?>=", "==", line) for line in (*extras["gpu"], *extras["webgpu"])}
    assert minimum_versions <= {*(root / "constraints.txt").read_text("utf-8").splitlines()}


def test_one_thread_at_a_time_uses_a_device_with_cuda_graphs() -> None:
    events = list[str]()

    def use_device() -> None:
        with get_device_lock("cuda"):
            events.append("second thread")

    thread = threading.Thread(target=use_device)
    with get_device_lock("cuda"), get_device_lock("cuda"), get_device_lock("webgpu"):  # the lock is reentrant
        thread.start()
        thread.join(0.05)
        events.append("first thread")
    thread.join(10)
    assert events == ["first thread", "second thread"]
    with get_device_lock("cpu"), get_device_lock("cpu"):
        pass
