"""Execution providers: by name, and never replaced in silence."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from refusals import refused

from lantern_rt.engines.ort.providers import PROVIDERS, check_taken, find_provider, preload
from lantern_rt.engines.ort.session import check_convolutions
from lantern_rt.errors import EngineError

GRAPH = Path("target.onnx")
CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


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
    with refused(EngineError, "provider: found 'abacus', expected one of cpu, cuda, openvino, coreml, directml"):
        find_provider("abacus", Runtime([CPU]))


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
    words = "cannot say which nodes provider openvino takes, expected 1.24", "update onnxruntime-openvino"
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
    with refused(EngineError, "provider cpu: ONNX Runtime cannot run a convolution (NOT_IMPLEMENTED", "install cuDNN"):
        check_convolutions("cpu")
