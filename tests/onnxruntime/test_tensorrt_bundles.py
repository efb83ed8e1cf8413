"""Whole images from plans, with the host in the GPU's place: image decoder, engine folder, pipeline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from host_tensorrt import HostLibrary, HostMemory, write_plan
from test_tensorrt_engine import PROFILES, message
from tiny_bundle import make_tiny_bundle
from tiny_graphs import Painter, export

from lantern_rt.bundle import Bundle, open_bundle
from lantern_rt.engines import tensorrt_backend
from lantern_rt.engines.backends import Built
from lantern_rt.engines.build import build_engines
from lantern_rt.engines.cuda_driver import Gpu
from lantern_rt.engines.engine_folder import open_engine_folder
from lantern_rt.engines.onnxruntime_session import Tensor
from lantern_rt.engines.profiles import BuildOptions, Profile
from lantern_rt.engines.tensorrt_engine import (
    TensorRTEngine,
    TensorRTFunction,
)
from lantern_rt.engines.tensorrt_plan import PlanSource
from lantern_rt.pipeline import Pipeline
from lantern_rt.runtime.engine import Pass

# ---------------------------------------------------------------- functions and bundles


def test_images_beyond_the_rows_of_a_plan_are_decoded_in_turns(tmp_path: Path) -> None:
    path, codes = tmp_path / "vq.onnx", np.random.default_rng(0).integers(0, 48, (5, 16))
    module = Painter(48, 4).eval()
    free = {"codes": {0: "rows"}, "images": {0: "rows"}}
    export(module, {"codes": torch.zeros(2, 16, dtype=torch.int64)}, ["images"], free, path)
    rows = (Profile(name="rows", rows=(1, 2, 2), nodes=(0, 0, 0), past=(0, 0, 0)),)
    memory = HostMemory()
    library = HostLibrary(memory)
    options = PlanSource(write_plan(path, rows, tmp_path / "vq.plan"), rows, "again")
    tensors = [Tensor("codes", ("int64",), (None, 16))], [Tensor("images", ("float32",), (None, 3, 8, 8))]
    (images,) = TensorRTFunction(library, memory, options, *tensors).run({"codes": codes})
    with torch.no_grad():
        np.testing.assert_allclose(images, module(torch.from_numpy(codes)).numpy(), atol=1e-6)
    assert [shapes["codes"][0] for _, shapes in library.engines[0].runs] == [2, 2, 1]


@pytest.fixture
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, HostLibrary]:
    """A tiny bundle, an engine folder of "plans" for it, and the library that they run in."""
    library = HostLibrary(HostMemory())

    def build(
        self: object, bundle: Bundle, role: str, shapes: tuple[Profile, ...], options: object, folder: Path, say: object
    ) -> Built:
        return Built((write_plan(bundle.path(role), shapes, folder / f"{role}.plan"),), 0.0)

    monkeypatch.setattr(tensorrt_backend.TensorRTBackend, "build", build)
    monkeypatch.setattr(tensorrt_backend, "import_library", lambda name: library)
    monkeypatch.setattr(tensorrt_backend, "find_gpu", lambda: Gpu("13.0", "SM89"))
    monkeypatch.setattr(tensorrt_backend, "open_gpu", lambda: library.memory)
    bundle, folder = make_tiny_bundle(tmp_path / "tiny"), tmp_path / "plans"
    options = BuildOptions("tensorrt-rtx", max_rows=6, max_nodes=16, compute_capabilities=("SM89",))
    build_engines(open_bundle(bundle), str(bundle), options, folder, False, lambda what, done, total: None)
    return bundle, folder, library


@pytest.mark.parametrize("method", ["ar", "eagle", "lantern", "lantern++"])
def test_a_bundle_draws_the_same_images_from_plans(plans: tuple[Path, Path, HostLibrary], method: str) -> None:
    bundle, folder, library = plans
    images = []
    for engines in (None, folder):
        pipeline = Pipeline.from_bundle(bundle, engines=engines, threads=1)
        results = pipeline(["a red sphere", "a cube"], seed=3, method=method)
        images.append([np.asarray(image) for image in results.images])
    for plain, found in zip(*images, strict=True):
        np.testing.assert_array_equal(found, plain)
    assert len(library.engines) == (2 if method == "ar" else 3)  # the condition graph stays with ONNX Runtime


def test_an_altered_plan_is_not_loaded(plans: tuple[Path, Path, HostLibrary]) -> None:
    bundle, folder, library = plans
    with (folder / "drafter.plan").open("a") as file:
        file.write(" ")
    assert "engines are code and an altered one is not run" in message(
        lambda: Pipeline.from_bundle(bundle, engines=open_engine_folder(folder))
    )
    assert library.engines == []


def test_a_float16_drafter_is_fed_float16(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    from half_graph import halve_graph

    scenes, memory = open_bundle("scenes"), HostMemory()
    halve_graph(scenes.path("drafter"), tmp_path / "half.onnx")
    options = PlanSource(write_plan(tmp_path / "half.onnx", PROFILES, tmp_path / "half.plan"), PROFILES, "again")
    spec = scenes.manifest.drafter
    assert spec is not None
    engine = TensorRTEngine(HostLibrary(memory), memory, options, spec)
    cache = engine.new_cache(2, 20)
    span = engine.next_span(cache, 3)
    visible = np.zeros((2, 3, span + 3), bool)
    visible[:, :, span:] = np.tri(3, dtype=bool)
    hidden = np.random.default_rng(0).standard_normal((2, 3, spec.width)).astype(np.float32)
    output = engine.run(Pass(np.tile(np.arange(3), (2, 1)), visible, np.ones((2, 3), np.int64), hidden=hidden), cache)
    assert np.isfinite(output.logits[:, :]).all()
    assert output.hidden[0].dtype == np.float32
    cache.append(output.fresh, [np.arange(3)] * 2)
    assert cache.entry == 2 * spec.kv_heads * spec.head_width
    memory.synchronise()
