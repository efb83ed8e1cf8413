"""What goes wrong in ONNX Runtime, in one line each: with a stand-in for the module, so that all of it can be seen."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lantern_rt.engines.contracts import Tensor
from lantern_rt.engines.decoder_tensors import kv_dtype
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


def refusal(kind: type[LanternError], call: Callable[[], object]) -> LanternError:
    """The error of a call, which names the graph."""
    with pytest.raises(kind) as caught:
        call()
    assert caught.value.field.startswith(str(GRAPH))
    return caught.value


@pytest.mark.parametrize(
    ("name", "kind"), [("InvalidProtobuf", BundleError), ("NoSuchFile", BundleError), ("NotImplemented", EngineError)]
)
def test_a_damaged_graph_is_told_from_one_that_cannot_be_run(runtime: Any, name: str, kind: type[LanternError]) -> None:
    error = type(name, (Exception,), {})

    def refuse(*arguments: Any, **options: Any) -> None:
        raise error(" bad\nbytes ")

    runtime.InferenceSession = refuse
    assert "bad bytes" in refusal(kind, load).problem


@pytest.mark.usefixtures("runtime")
def test_a_graph_that_fails_says_which_and_why() -> None:
    session = load()
    error = refusal(EngineError, lambda: session.run({"codes": np.zeros((1, 4), np.int64)}))
    assert error.problem.endswith("Gather node: index out of bounds")
    error = refusal(EngineError, lambda: session.bind({"codes": None, "images": None}, None)(False))
    assert error.problem.endswith("no memory")


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize(
    ("inputs", "outputs", "field", "found"),
    [
        ((CODES, IMAGES), (IMAGES,), "input `images`", "a graph of codes"),
        ((), (IMAGES,), "input `codes`", "a graph of codes"),
        ((CODES,), (CODES,), "output `codes`", "a graph of images"),
        ((Tensor("codes", ("int32",), (None, 4)),), (IMAGES,), "input `codes`", "int64 [rows, 4]"),
        ((CODES,), (Tensor("images", ("float32",), (None, 5)),), "output `images`", "float32 [rows, 3]"),
    ],
)
def test_a_graph_with_other_tensors_is_named_by_the_first(
    inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], field: str, found: str
) -> None:
    error = refusal(BundleError, lambda: load(inputs, outputs))
    assert (error.field, error.found) == (f"{GRAPH}: {field}", found)


def test_keys_and_values_of_two_types_are_refused() -> None:
    kinds = {"past_key_values.0.key": np.float16, "past_key_values.0.value": np.float32}
    refusal(BundleError, lambda: kv_dtype(GRAPH, kinds))


@pytest.mark.usefixtures("runtime")
def test_outputs_of_another_shape_than_declared_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "run", lambda *_: [np.zeros((1, 5), np.float32)], raising=False)
    error = refusal(BundleError, lambda: load().run_checked({"codes": np.zeros((1, 4), np.int64)}))
    assert (error.found, error.expected) == ("[1, 5]", "float32 or float16 [any, 3]")
