"""What goes wrong in ONNX Runtime, in one line each: with a stand-in for the module, so that all of it can be seen."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from refusals import refused

from lantern_rt.engines.contracts import Tensor
from lantern_rt.engines.decoder_tensors import kv_dtype
from lantern_rt.engines.host import import_onnxruntime, thread_count
from lantern_rt.engines.ort.session import GraphSession
from lantern_rt.errors import BundleError, EngineError, LanternError

GRAPH = Path("target.onnx")
CODES, IMAGES = Tensor("codes", ("int64",), (None, 4)), Tensor("images", ("float32", "float16"), (None, 3))


def value(name: str, kind: str, *shape: Any) -> Any:
    return SimpleNamespace(name=name, type=f"tensor({kind})", shape=list(shape))


class Session:
    """A graph from four codes to an image, which fails when it runs."""

    inputs, outputs = (value("codes", "int64", "rows", 4),), (value("images", "float", "rows", 3),)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def get_providers(self) -> list[str]:
        return ["CPUExecutionProvider"]

    def get_inputs(self) -> tuple[Any, ...]:
        return self.inputs

    def get_outputs(self) -> tuple[Any, ...]:
        return self.outputs

    def run(self, names: list[str], feeds: Mapping[str, Any]) -> None:
        raise RuntimeError("Gather node:\n index out of bounds")

    def io_binding(self) -> Any:
        bind = {name: lambda *given: None for name in ("bind_ortvalue_input", "bind_ortvalue_output")}
        return SimpleNamespace(**bind)

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        raise RuntimeError("no memory")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands in for the onnxruntime module."""

    class Options:
        def add_session_config_entry(self, key: str, text: str) -> None:
            pass

    module: Any = ModuleType("onnxruntime")
    module.__version__, module.SessionOptions, module.InferenceSession = "1.31.1", Options, Session
    module.RunOptions = lambda: SimpleNamespace(add_run_config_entry=lambda key, text: None)
    module.GraphOptimizationLevel = SimpleNamespace(ORT_DISABLE_ALL=0, ORT_ENABLE_ALL=99)
    module.get_available_providers = lambda: ["CPUExecutionProvider"]
    module.set_default_logger_severity = lambda level: None
    monkeypatch.setitem(sys.modules, "onnxruntime", module)
    return module


def load(inputs: tuple[Tensor, ...] = (CODES,), outputs: tuple[Tensor, ...] = (IMAGES,)) -> GraphSession:
    return GraphSession(GRAPH, inputs, outputs, 1)


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("InvalidProtobuf", BundleError, "not a graph that can be loaded: bad bytes; export"),
        ("NoSuchFile", BundleError, "not a graph that can be loaded: bad bytes; export"),
        ("NotImplemented", EngineError, "ONNX Runtime 1.31.1 does not take this graph: bad bytes; update onnxruntime"),
    ],
)
def test_a_damaged_graph_is_told_from_one_that_cannot_be_run(
    runtime: Any, name: str, kind: type[LanternError], expected: str
) -> None:
    error = type(name, (Exception,), {})

    def refuse(*arguments: Any, **options: Any) -> None:
        raise error(" bad\nbytes ")

    runtime.InferenceSession = refuse
    with refused(kind, f"{GRAPH}: {expected}"):
        load()


@pytest.mark.usefixtures("runtime")
def test_a_graph_that_fails_says_which_and_why() -> None:
    session = load()
    with refused(EngineError, f"{GRAPH}: ONNX Runtime failed to run the graph: Gather node: index out of bounds"):
        session.run({"codes": np.zeros((1, 4), np.int64)})
    with refused(EngineError, f"{GRAPH}: ONNX Runtime failed to run the graph: no memory"):
        session.bind({"codes": None, "images": None}, None)(False)


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize(
    ("inputs", "outputs", "expected"),
    [
        ((CODES, IMAGES), (IMAGES,), "input `images`: not in the graph, which has codes"),
        ((), (IMAGES,), "input `codes`: not expected; expected"),
        ((CODES,), (CODES,), "output `codes`: not in the graph, which has images"),
        (
            (Tensor("codes", ("int32",), (None, 4)),),
            (IMAGES,),
            "input `codes`: found int64 [rows, 4], expected int32 [any, 4]; the graph is not the one",
        ),
        (
            (CODES,),
            (Tensor("images", ("float32", "float16"), (None, 5)),),
            "output `images`: found float32 [rows, 3], expected float32 or float16 [any, 5]; the graph is not the one",
        ),
    ],
)
def test_a_graph_with_other_tensors_is_named_by_the_first(
    inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], expected: str
) -> None:
    with refused(BundleError, f"{GRAPH}: {expected}"):
        load(inputs, outputs)


def test_a_missing_onnxruntime_and_two_of_them_come_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setattr(importlib.metadata, "version", version)
    with refused(EngineError, "onnxruntime cannot be imported", "install it with `pip install 'lantern-rt[cpu]'`"):
        import_onnxruntime()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0")
    words = "onnxruntime and onnxruntime-gpu are both installed", "`pip uninstall -y onnxruntime onnxruntime-gpu`"
    with refused(EngineError, *words):
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


def test_numbers_of_threads_have_bounds() -> None:
    for count in (0, 1025):
        with refused(EngineError, f"threads: found {count}, expected 1 .. 1024"):
            thread_count(count)


def test_keys_and_values_of_two_types_are_refused() -> None:
    kinds = {"past_key_values.0.key": np.float16, "past_key_values.0.value": np.float32}
    with refused(BundleError, f"{GRAPH}: found keys and values of both float16 and float32", "export again"):
        kv_dtype(GRAPH, kinds)


def test_outputs_of_another_shape_than_declared_are_refused(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "run", lambda *_: [np.zeros((1, 5), np.float32)], raising=False)
    graph = GraphSession(GRAPH, [Tensor("codes", ("int64",), (None, 4))], [Tensor("images", ("float32",), (None, 3))])
    with refused(BundleError, f"{GRAPH}: output `images`: gave [1, 5], expected float32 [any, 3]", "export the bundle"):
        graph.run_checked({"codes": np.zeros((1, 4), np.int64)})
