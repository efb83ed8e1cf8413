"""What TensorRT says no to when it builds, in one line each, with a stand-in for the library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from plan_requests import ONE_ROW, RTX, bad_graph, silent
from refusals import refused

from lantern_rt.bundle.files import open_bundle
from lantern_rt.engines.trt import backend as tensorrt_backend
from lantern_rt.engines.trt.backend import TensorRTBackend
from lantern_rt.errors import EngineError, RequestError


class NodeError:
    """What a parser says of a node."""

    def node(self) -> int:
        return 1

    def node_name(self) -> str:
        return "strange_2"

    def node_operator(self) -> str:
        return "Bogus"

    def desc(self) -> str:
        return "no\n importer"

    def code(self) -> Any:
        return SimpleNamespace(name="UNSUPPORTED_NODE")


class Refusing:
    """A library that parses as told, then builds nothing; any call it does not know gives another of its kind."""

    __name__, __version__ = "refusing", "11.0"
    BuilderFlag = SimpleNamespace(TF32=1)
    ComputeCapability = SimpleNamespace(__members__={"NONE": 0, "SM75": 75, "SM89": 89, "SM120": 120})
    num_inputs = 0

    class ILogger:
        ERROR, INTERNAL_ERROR = 1, 0

    class IProgressMonitor:
        pass

    def __init__(self, parses: bool = True, errors: tuple[NodeError, ...] = (), words: str = "") -> None:
        self.parses, self.errors, self.words = parses, errors, words
        self.NetworkDefinitionCreationFlag, self.num_errors = SimpleNamespace(), len(errors)

    def Builder(self, logger: Any) -> Refusing:  # noqa: N802
        self.logger = logger
        return self

    def OnnxParser(self, network: Any, logger: Any) -> Refusing:  # noqa: N802
        return self

    def parse(self, model: bytes, path: str) -> bool:
        return self.parses or self.complain()

    def build_serialized_network(self, network: Any, config: Any) -> None:
        self.complain()

    def complain(self) -> bool:
        if self.words:
            self.logger.log(1, self.words)
        return False

    def get_error(self, index: int) -> NodeError:
        return self.errors[index]

    def __getattr__(self, name: str) -> Callable[..., Refusing]:
        return lambda *arguments: self


@pytest.mark.parametrize(
    ("library", "expected"),
    [
        (Refusing(False, words="no\n file"), "cannot parse this graph: no file; export the bundle again"),
        (Refusing(False), "cannot parse this graph: no reason given; export the bundle again"),
        (
            Refusing(False, (NodeError(),)),
            "cannot parse node `strange_2` (Bogus) near `layers.3.ffn.up.weight`: unsupported node (no importer); "
            "update tensorrt-rtx, or build with another --backend",
        ),
        (
            Refusing(words="no kernel"),
            "does not build this graph: no kernel; try smaller --max-rows, --max-nodes or --max-past, or another "
            "--backend",
        ),
    ],
)
def test_a_graph_that_is_refused_comes_with_the_librarys_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: Refusing, expected: str
) -> None:
    path = tmp_path / "vq_decoder.onnx"
    bundle = bad_graph(path, "Bogus")
    monkeypatch.setattr(tensorrt_backend, "import_library", lambda name: library)
    backend = TensorRTBackend("tensorrt-rtx")
    with refused(EngineError, f"{path}: tensorrt-rtx 11.0 {expected}"):
        backend.build(bundle, "vq_decoder", [ONE_ROW], RTX, tmp_path, silent)


def test_an_unknown_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt_backend, "import_library", lambda name: Refusing())
    backend, scenes = TensorRTBackend("tensorrt-rtx"), open_bundle("scenes")
    with refused(RequestError, "compute-capability: found 'SM31', expected one of SM75, SM89, SM120"):
        backend.build(scenes, "vq_decoder", [], replace(RTX, compute_capabilities=("SM31",)), tmp_path, silent)
