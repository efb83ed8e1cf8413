"""Execution providers: by name, and never replaced in silence."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from refusals import refused

from lantern_rt.engines.ort import providers
from lantern_rt.engines.ort.providers import (
    ON_CPU,
    PROVIDERS,
    Providers,
    Turns,
    attach,
    check_taken,
    find_provider,
    host_plugins,
    preload,
)
from lantern_rt.engines.ort.session import check_convolutions
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


def test_an_unknown_provider_is_answered_with_the_known_ones() -> None:
    with refused(EngineError, "provider: found 'abacus', expected one of cpu, cuda, webgpu, openvino, openvino-"):
        find_provider("abacus", Runtime([CPU]))


def test_graphs_that_run_once_an_image_may_have_a_provider_of_their_own() -> None:
    assert Providers.read(()) == Providers.read("cpu") == ON_CPU
    asked = Providers.read(["cuda", "vq_decoder=openvino-bf16", "condition=cpu"])
    assert [asked.of(role) for role in ("target", "drafter", "condition", "vq_decoder")] == [
        "cuda",
        "cuda",
        "cpu",
        "openvino-bf16",
    ]
    assert Providers.read(str(asked)) == asked


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            "vq=cpu",
            "provider: found graph 'vq', expected condition or vq_decoder; all others run on one provider, NAME",
        ),
        ("target=cuda", "provider: found graph 'target', expected condition or vq_decoder"),
        ("vq_decoder=", "provider: found '', expected one of cpu, cuda, "),
        ("cpu,cuda", "provider: found cpu and cuda for all graphs, expected one"),
        ("condition=cpu,condition=cuda", "provider: found cpu and cuda for graph condition, expected one"),
        ("openvino-bf16", "for all graphs, but it rounds to bfloat16; give it to the image decoder alone, vq_decoder="),
        ("condition=openvino-bf16", "found openvino-bf16 for condition, but it rounds to bfloat16"),
    ],
)
def test_what_no_graph_can_run_on_is_refused(given: str, line: str) -> None:
    with refused(EngineError, line):
        Providers.read(given)


def test_a_provider_that_this_onnxruntime_lacks_comes_with_the_package_that_has_it() -> None:
    words = f"has no {CUDA}, found AzureExecutionProvider, {CPU}", "install onnxruntime-gpu[cuda,cudnn] instead"
    with refused(EngineError, "provider cuda: onnxruntime 1.31.1", *words):
        find_provider("cuda", Runtime(["AzureExecutionProvider", CPU]))
    assert find_provider("cuda", Runtime([CUDA, CPU])).execution_provider == CUDA


def test_a_provider_that_did_not_load_stops_instead_of_running_on_the_cpu() -> None:
    words = (
        "target.onnx: provider cuda did not load",
        "check its driver, install onnxruntime-gpu[cuda,cudnn], or ask for provider cpu",
    )
    with refused(EngineError, *words):
        check_taken(GRAPH, PROVIDERS["cuda"], Session([CPU], []))


def test_nodes_that_a_provider_leaves_to_the_cpu_are_counted_by_op() -> None:
    parts = [Part(CUDA, ["MatMul"] * 3), Part(CPU, ["MatMul", "Shape", "Softmax", "MatMul"])]
    words = "provider cuda does not take 3 nodes of this graph (2 MatMul, 1 Softmax)", "ask for provider cpu, or update"
    with refused(EngineError, "target.onnx: ", *words):
        check_taken(GRAPH, PROVIDERS["cuda"], Session([CUDA, CPU], parts))


def test_arithmetic_on_shapes_may_stay_on_the_cpu() -> None:
    parts = [Part(CUDA, ["MatMul", "Softmax"]), Part(CPU, ["Shape", "Concat", "MemcpyToHost"])]
    check_taken(GRAPH, PROVIDERS["cuda"], Session([CUDA, CPU], parts))


def test_an_onnxruntime_that_cannot_tell_is_refused_for_every_provider_but_the_cpu() -> None:
    words = "cannot say which nodes provider openvino takes, expected 1.24", "update onnxruntime-ep-openvino"
    with refused(EngineError, "target.onnx: ", *words):
        check_taken(GRAPH, PROVIDERS["openvino"], OldSession(["OpenVINOExecutionProvider", CPU]))
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
    with refused(EngineError, "provider cuda: ONNX Runtime cannot run a convolution (NOT_IMPLEMENTED", "install cuDNN"):
        check_convolutions("cuda")


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


def test_a_plugin_that_is_not_installed_comes_with_the_command_that_installs_it(
    plugin: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, PROVIDERS["webgpu"].plugin, None)
    with refused(EngineError, "provider webgpu: found no module onnxruntime_ep_webgpu", "pip install onnxruntime-ep-"):
        find_provider("webgpu", Plugins())


@pytest.mark.usefixtures("plugin")
def test_a_plugin_without_a_device_is_refused() -> None:
    with refused(EngineError, "provider webgpu: ONNX Runtime finds no device that it runs on", "ask for provider cpu"):
        find_provider("webgpu", Plugins("OtherExecutionProvider"))


def test_a_plugin_whose_library_does_not_load_says_why(plugin: SimpleNamespace) -> None:
    plugin.get_library_path = lambda: "broken.so"
    with refused(EngineError, "provider webgpu: onnxruntime 1.31.1 cannot load its library (libvulkan", "driver"):
        find_provider("webgpu", Plugins(WEBGPU))


def test_plugins_beside_the_cpu_are_told_from_those_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "_registered", set())
    module = PROVIDERS["openvino"].plugin
    monkeypatch.setitem(sys.modules, module, None)
    assert host_plugins(Plugins()) == ([], ["openvino", "openvino-bf16"])
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(get_library_path=lambda: "plugin.so"))
    runtime = Plugins("OpenVINOExecutionProvider")
    assert host_plugins(runtime) == (["openvino", "openvino-bf16"], [])
    assert len(runtime.registered) == 1, "both are of one library"


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
