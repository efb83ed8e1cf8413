"""Execution providers: by name, and never replaced in silence."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_bundle import make_tiny_bundle

from lantern_rt import Pipeline
from lantern_rt.engines.ort import providers
from lantern_rt.engines.ort.providers import (
    ON_CPU,
    PROVIDERS,
    Provider,
    Providers,
    attach,
    check_taken,
    find_provider,
    preload,
)
from lantern_rt.engines.ort.session import GraphSession, check_convolutions
from lantern_rt.engines.ort.turns import Turns
from lantern_rt.errors import EngineError

GRAPH = Path("target.onnx")
WEBGPU, CUDA, CPU = "WebGpuExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"


@dataclass
class Node:
    op_type: str


@dataclass
class Part:
    ep_name: str
    ops: list[str]

    def get_nodes(self) -> list[Node]:
        return [Node(op) for op in self.ops]


@dataclass
class OldSession:
    providers: list[str]

    def get_providers(self) -> list[str]:
        return self.providers


@dataclass
class Session(OldSession):
    parts: list[Part]

    def get_provider_graph_assignment_info(self) -> list[Part]:
        return self.parts


@dataclass
class Runtime:
    """Stands in for the onnxruntime module."""

    providers: list[str]
    __version__ = "1.31.1"

    def get_available_providers(self) -> list[str]:
        return self.providers


def refusal(call: Callable[..., object], *arguments: object) -> EngineError:
    with pytest.raises(EngineError) as caught:
        call(*arguments)
    return caught.value


def test_graphs_that_run_once_an_image_may_have_a_provider_of_their_own() -> None:
    assert Providers.read(()) == Providers.read("cpu") == ON_CPU
    chosen = Providers.read(["cuda", "vq_decoder=openvino-bf16", "condition=cpu"])
    roles = ("target", "drafter", "condition", "vq_decoder")
    assert [chosen.of(role) for role in roles] == ["cuda", "cuda", "cpu", "openvino-bf16"]
    assert Providers.read(str(chosen)) == chosen


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("abacus", "'abacus'"),
        ("vq=cpu", "graph 'vq'"),
        ("target=cuda", "graph 'target'"),
        ("vq_decoder=", "''"),
        ("cpu,cuda", "cpu and cuda for all graphs"),
        ("condition=cpu,condition=cuda", "cpu and cuda for condition"),
        ("openvino-bf16", "it for all graphs"),
        ("condition=openvino-bf16", "it for condition"),
    ],
)
def test_what_no_graph_can_run_on_is_refused(names: str, found: str) -> None:
    error = refusal(Providers.read, names)
    assert (error.field, error.found) == ("provider", found)


def test_the_image_decoder_alone_may_have_another_provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.setitem(PROVIDERS, "twin", Provider("twin", CPU, "onnxruntime", {}))
    bundle, run, used = make_tiny_bundle(tmp_path / "tiny"), GraphSession.run, dict[str, set[str]]()

    def note(session: GraphSession, feeds: Any) -> Any:
        used.setdefault(session.provider, set()).add(session.path.stem)
        return run(session, feeds)

    monkeypatch.setattr(GraphSession, "run", note)
    pipe = Pipeline.from_bundle(bundle, threads=1, provider="vq_decoder=twin")
    pipe("red sphere", method="ar")
    assert used == {"cpu": {"condition", "target"}, "twin": {"vq_decoder"}}
    assert (pipe.engines.backend, pipe.engines.picture_backend) == ("onnxruntime-cpu", "onnxruntime-twin")


def test_a_provider_that_this_onnxruntime_lacks_comes_with_the_package_that_has_it() -> None:
    error = refusal(find_provider, "cuda", Runtime(["AzureExecutionProvider", CPU]))
    assert error.found == f"AzureExecutionProvider, {CPU}"
    assert "onnxruntime-gpu[cuda,cudnn]" in error.remedy
    assert find_provider("cuda", Runtime([CUDA, CPU])).execution_provider == CUDA


def test_a_provider_that_did_not_load_stops_instead_of_running_on_the_cpu() -> None:
    assert refusal(check_taken, GRAPH, PROVIDERS["cuda"], Session([CPU], [])).found == CPU


def test_nodes_that_a_provider_leaves_to_the_cpu_are_counted_by_op() -> None:
    parts = [Part(CUDA, ["MatMul"] * 3), Part(CPU, ["MatMul", "Shape", "Softmax", "MatMul"])]
    error = refusal(check_taken, GRAPH, PROVIDERS["cuda"], Session([CUDA, CPU], parts))
    assert "3 nodes of this graph (2 MatMul, 1 Softmax)" in error.problem
    check_taken(GRAPH, PROVIDERS["cuda"], Session([CUDA, CPU], [Part(CPU, ["Shape", "Concat", "MemcpyToHost"])]))


def test_an_onnxruntime_that_cannot_tell_is_refused_for_every_provider_but_the_cpu() -> None:
    assert refusal(check_taken, GRAPH, PROVIDERS["openvino"], OldSession(["OpenVINOExecutionProvider", CPU])).expected
    check_taken(GRAPH, PROVIDERS["cpu"], OldSession([CPU]))


def test_cudas_libraries_are_loaded_before_its_provider_and_nothing_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    loaded: list[str] = []

    class Talking(Runtime):
        def preload_dlls(self) -> None:
            loaded.append("cudart")
            print("Failed to load libcudnn.so.9")

    preload(PROVIDERS["cpu"], Talking([CPU]))
    assert loaded == []
    preload(PROVIDERS["cuda"], Talking([CUDA, CPU]))
    assert loaded == ["cudart"]
    assert capsys.readouterr() == ("", "")


def test_a_provider_without_convolutions_is_refused_before_an_image_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    check_convolutions("cpu")

    class NoConvolutions:
        def run(self, *_: object) -> None:
            raise RuntimeError("NOT_IMPLEMENTED: cuDNN is not there")

    monkeypatch.setattr("lantern_rt.engines.ort.session.load_session", lambda *_: NoConvolutions())
    assert refusal(check_convolutions, "cuda").remedy.startswith("install cuDNN")


class Plugins(Runtime):
    """Stands in for an onnxruntime that plugins can be registered with."""

    def __init__(self, *found: str) -> None:
        super().__init__([CPU])
        self.found, self.registered = found, list[tuple[str, str]]()

    def register_execution_provider_library(self, name: str, path: str) -> None:
        if path == "broken.so":
            raise RuntimeError("libvulkan.so.1: cannot open shared object file")
        self.registered.append((name, path))

    def get_ep_devices(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(ep_name=name) for name in (CPU, *self.found)]


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The module of a plugin, in a process where none is registered."""
    monkeypatch.setattr(providers, "_registered", set())
    module = SimpleNamespace(get_library_path=lambda: "plugin.so")
    monkeypatch.setitem(sys.modules, PROVIDERS["webgpu"].plugin, module)
    return module


@pytest.mark.usefixtures("plugin")
def test_a_plugin_is_registered_once_and_its_first_device_chosen() -> None:
    runtime, chosen = Plugins(WEBGPU, WEBGPU), []
    options = SimpleNamespace(add_provider_for_devices=lambda devices, given: chosen.append((devices, given)))
    for _ in range(2):
        assert attach(options, find_provider("webgpu", runtime), runtime) == {}
    assert runtime.registered == [(WEBGPU, "plugin.so")]
    assert chosen == [([SimpleNamespace(ep_name=WEBGPU)], {})] * 2


def test_a_plugin_that_is_missing_broken_or_without_a_device_is_refused(
    plugin: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no device" in refusal(find_provider, "webgpu", Plugins("OtherExecutionProvider")).problem
    providers._registered.clear()
    plugin.get_library_path = lambda: "broken.so"
    assert "libvulkan" in refusal(find_provider, "webgpu", Plugins(WEBGPU)).problem
    monkeypatch.setitem(sys.modules, PROVIDERS["webgpu"].plugin, None)
    assert refusal(find_provider, "webgpu", Plugins()).remedy == "run `pip install onnxruntime-ep-webgpu`"


def test_plugins_have_modules_of_their_packages_names() -> None:
    for provider in PROVIDERS.values():
        assert provider.plugin in ("", provider.package.replace("-", "_"))
        assert provider.resident == (provider.memory != "cpu")


def test_who_records_waits_for_the_others_and_they_wait_for_it() -> None:
    turns, events = Turns(), list[str]()
    inside, recording, leave = threading.Event(), threading.Event(), threading.Event()

    def run() -> None:
        with turns.among_others():
            inside.set()
            leave.wait(10)
            events.append("ran")

    def record() -> None:
        with turns.alone():
            recording.set()
            with turns.among_others():  # its own runs are none of the others
                events.append("recorded")

    threads = [threading.Thread(target=run), threading.Thread(target=record)]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    assert not recording.wait(0.05), "somebody uses the device"
    leave.set()
    for thread in threads:
        thread.join(10)
    assert events == ["ran", "recorded"]
    with turns.alone():
        late = threading.Thread(target=run)
        late.start()
        late.join(0.05)
        assert late.is_alive(), "a pass is being recorded"
    late.join(10)
    assert events == ["ran", "recorded", "ran"]
