"""Exceptions raised in signal handlers, such as time limits, reach the caller unchanged."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from evaluation_graphs import make_feature_graph
from PIL import Image

from lantern_rt import BundleError, EngineError, Pipeline, open_bundle
from lantern_rt.bundle.hub import convert_hub_errors
from lantern_rt.compare.image_graph import ImageFeatureModel, Preprocessing
from lantern_rt.engines.host import import_onnxruntime
from lantern_rt.engines.ort.providers import PROVIDERS, find_plugin_devices
from lantern_rt.engines.ort.session import check_provider
from lantern_rt.inputs import convert_read_errors
from lantern_rt.output.recipe import read_recipe

InterruptedFunction = Callable[..., Any]


def test_a_time_limit_ends_a_call_and_spoils_no_later_one(
    pipe: Pipeline, interrupt: InterruptedFunction, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = pipe("red cube", seed=1).codes[0]
    with monkeypatch.context() as patched:
        patched.setattr(import_onnxruntime().InferenceSession, "run", interrupt)
        with pytest.raises(TimeoutError):
            pipe("red cube", seed=1)
    assert (pipe("red cube", seed=1).codes[0] == codes).all()


def test_a_time_limit_ends_the_loading_of_a_pipeline(
    pipe: Pipeline, interrupt: InterruptedFunction, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_onnxruntime(), "InferenceSession", interrupt)
    with pytest.raises(TimeoutError):
        Pipeline.from_bundle(pipe.bundle, threads=1)


def test_a_time_limit_ends_the_check_of_an_execution_provider(
    interrupt: InterruptedFunction, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lantern_rt.engines.ort.session.find_available_provider", lambda name, runtime: PROVIDERS[name])
    monkeypatch.setattr("lantern_rt.engines.ort.session.load_session", lambda *_: SimpleNamespace(run=interrupt))
    with pytest.raises(TimeoutError):
        check_provider("cuda")
    provider = PROVIDERS["webgpu"]
    module = SimpleNamespace(get_library_path=interrupt)
    monkeypatch.setitem(sys.modules, provider.package.replace("-", "_"), module)
    with pytest.raises(TimeoutError):
        find_plugin_devices(provider, object())


def test_a_time_limit_ends_an_evaluation(
    tmp_path: Path, interrupt: InterruptedFunction, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_feature_graph(tmp_path / "f.onnx")
    extract = ImageFeatureModel(path, Preprocessing(), 1)
    monkeypatch.setattr(import_onnxruntime().InferenceSession, "run", interrupt)
    with pytest.raises(TimeoutError):
        extract([Image.new("RGB", (8, 8))])
    monkeypatch.setattr(import_onnxruntime(), "InferenceSession", interrupt)
    with pytest.raises(TimeoutError):
        ImageFeatureModel(path, Preprocessing(), 1)


def test_a_time_limit_ends_the_reading_of_a_file(
    tmp_path: Path, words_bundle: Path, interrupt: InterruptedFunction, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TimeoutError), convert_read_errors(tmp_path, "a file", BundleError, "give another"):
        interrupt()
    with pytest.raises(TimeoutError), convert_hub_errors("hf:owner/name", BundleError, "try again"):
        interrupt()
    monkeypatch.setattr("lantern_rt.bundle.files.compute_sha256", interrupt)
    with pytest.raises(TimeoutError):
        open_bundle(words_bundle)
    monkeypatch.setattr("lantern_rt.output.recipe.PngImageFile", interrupt)
    Image.new("RGB", (8, 8)).save(tmp_path / "image.png")
    with pytest.raises(TimeoutError):
        read_recipe(tmp_path / "image.png")


@pytest.mark.usefixtures("interrupt")
def test_a_timeout_that_no_signal_handler_raised_is_converted(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise TimeoutError("not from a signal")

    with pytest.raises(BundleError), convert_read_errors(Path("file"), "a file", BundleError, "give another"):
        fail()
    monkeypatch.setattr(import_onnxruntime().InferenceSession, "run", fail)
    with pytest.raises(EngineError):
        pipe("red cube", seed=1)
