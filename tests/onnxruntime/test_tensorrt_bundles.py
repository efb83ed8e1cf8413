"""TensorRT engines of bundles on a stand-in for TensorRT: image decoders, pipelines, and `verify`."""

from __future__ import annotations

import gc
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from host_tensorrt import HostRuntimeCache, HostTensorRT, _CudaEngine, write_engine_file
from tiny_graphs import TinyImageDecoder, export_graph

from lantern_rt.bundle.files import open_bundle
from lantern_rt.engines import build as build_module
from lantern_rt.engines.build import build_engines
from lantern_rt.engines.contracts import TensorSpec
from lantern_rt.engines.device_engine import DeviceCache
from lantern_rt.engines.engine_folder import compute_blake2b, open_engine_folder
from lantern_rt.engines.gpu import Gpu
from lantern_rt.engines.ort.device import OrtDevice, get_value_dtype
from lantern_rt.engines.profiles import BuildOptions, ShapeProfile
from lantern_rt.engines.trt import backend as tensorrt_backend
from lantern_rt.engines.trt.builder import Inputs
from lantern_rt.engines.trt.engine import TensorRTFunction
from lantern_rt.engines.trt.executable import TensorRTExecutable
from lantern_rt.errors import EngineError
from lantern_rt.export import compare_engines as compare_module
from lantern_rt.export import verify as verify_module
from lantern_rt.export.verify import VerificationReport
from lantern_rt.methods import SpeculativeJacobi
from lantern_rt.pipeline import Pipeline

# ---------------------------------------------------------------- functions and bundles


def test_more_images_than_engine_rows_decode_in_several_runs(tmp_path: Path) -> None:
    path = tmp_path / "vq.onnx"
    codes = np.random.default_rng(0).integers(0, 48, (5, 16))
    module = TinyImageDecoder(48, 4).eval()
    dynamic_axes = {"codes": {0: "rows"}, "images": {0: "rows"}}
    export_graph(module, {"codes": torch.zeros(2, 16, dtype=torch.int64)}, ["images"], dynamic_axes, path)
    profiles = (ShapeProfile(name="rows", rows=(1, 2, 2), nodes=(0, 0, 0), columns=(0, 0, 0)),)
    host_library = HostTensorRT()
    plan_path = write_engine_file(path, [{"codes": ((1, 16), (2, 16), (2, 16))}], tmp_path / "vq.plan")
    executable = TensorRTExecutable(host_library, plan_path, profiles, "again")
    tensors = [TensorSpec("codes", ("int64",), (None, 16))], [TensorSpec("images", ("float32",), (None, 3, 8, 8))]
    (images,) = TensorRTFunction(executable, *tensors, OrtDevice("cpu")).run({"codes": codes})
    with torch.no_grad():
        np.testing.assert_allclose(images, module(torch.from_numpy(codes)).numpy(), atol=1e-6)
    assert [shapes["codes"][0] for _, shapes in host_library.engines[0].runs] == [2, 2, 1]


@pytest.fixture
def host_library(monkeypatch: pytest.MonkeyPatch) -> HostTensorRT:
    host_library = HostTensorRT()

    def build_on_host(name: str, graph: Path, inputs: list[Inputs], gpus: object, progress: object) -> Path:
        return write_engine_file(graph, inputs, graph.with_suffix(".plan"))

    monkeypatch.setattr(build_module, "build_engine_file", build_on_host)
    for module in (build_module, tensorrt_backend):
        monkeypatch.setattr(module, "import_library", lambda name: host_library)
    monkeypatch.setattr(tensorrt_backend, "find_gpu", lambda: Gpu("13.0", "SM89", "L4"))
    monkeypatch.setattr(tensorrt_backend, "MEMORY", "cpu")
    return host_library


def build_host_engines(bundle: str | Path, folder: Path, max_nodes: int) -> Path:
    options = BuildOptions("tensorrt-rtx", max_rows=6, max_nodes=max_nodes, compute_capabilities=("SM89",))
    build_engines(open_bundle(bundle), str(bundle), options, folder, False, lambda stage, done, total: None)
    return folder


@pytest.fixture
def built_engines(
    tmp_path: Path, host_library: HostTensorRT, t2i_drafter_bundle: Path
) -> tuple[Path, Path, HostTensorRT]:
    return t2i_drafter_bundle, build_host_engines(t2i_drafter_bundle, tmp_path / "plans", max_nodes=64), host_library


def make_embeddings(pipeline: Pipeline, count: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return random caption embeddings without padding, and their mask."""
    condition = pipeline.bundle.manifest.condition
    shape = (count, condition.prefix, condition.caption_dim or 0)
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32), np.ones(shape[:2], np.int64)


METHODS: dict[str, dict[str, Any]] = {
    "strict": {},
    "ar": {"method": "ar"},
    "eagle": {"method": "eagle:tree=dynamic-12-4-4"},
    "lantern": {"method": "lantern:tree=dynamic-12-4-4:neighbors=8"},
    "lantern++": {"method": "lantern++:tree=tree-3-210-100:neighbors=8"},
}


@pytest.mark.parametrize("method", METHODS)
def test_tensorrt_generates_the_images_of_onnx_runtime(
    built_engines: tuple[Path, Path, HostTensorRT], method: str
) -> None:
    bundle, folder, host_library = built_engines
    results = []
    for engines in (None, folder):
        pipeline = Pipeline.from_bundle(bundle, engines=engines, threads=1)
        results.append(pipeline(embeddings=make_embeddings(pipeline, 2), seed=3, **METHODS[method]))
        # Rounding is 0 on a device, which does not recompute near-equal logits.
        assert bool(pipeline.engines.rounding_bound) == (engines is None)
    for expected, codes in zip(*(result.codes for result in results), strict=True):
        np.testing.assert_array_equal(codes, expected)
    for expected, image in zip(*(result.images for result in results), strict=True):
        np.testing.assert_array_equal(np.asarray(image), np.asarray(expected))
    # ONNX Runtime runs the condition graph, and only methods that draft load the drafter engine.
    assert len(host_library.engines) == (2 if method in ("strict", "ar") else 3)


@pytest.mark.parametrize(("max_nodes", "window"), [(64, 15), (8, 7)])
def test_the_default_is_the_widest_window_that_engines_allow(
    tmp_path: Path, host_library: HostTensorRT, t2i_drafter_bundle: Path, max_nodes: int, window: int
) -> None:
    folder = build_host_engines(t2i_drafter_bundle, tmp_path / "plans", max_nodes)
    cpu_pipe = Pipeline.from_bundle(t2i_drafter_bundle, threads=1)
    pipeline = Pipeline.from_bundle(t2i_drafter_bundle, threads=1, engines=folder)
    cpu_result, engine_result = (pipe(embeddings=make_embeddings(pipe), seed=1) for pipe in (cpu_pipe, pipeline))
    assert (cpu_result.settings.method, engine_result.settings.method) == (
        SpeculativeJacobi(window=7),
        SpeculativeJacobi(window=window),
    )
    assert cpu_result.settings.quality == engine_result.settings.quality == "strict"
    np.testing.assert_array_equal(engine_result.codes[0], cpu_result.codes[0])


def test_a_float16_bundle_generates_with_a_float16_kv_cache(
    tmp_path: Path, host_library: HostTensorRT, t2i_half_bundle: Path
) -> None:
    folder = build_host_engines(t2i_half_bundle, tmp_path / "plans", max_nodes=64)
    manifest = open_engine_folder(folder).manifest
    assert manifest.precision == "float16"
    pipeline = Pipeline.from_bundle(t2i_half_bundle, threads=1, engines=folder)
    result = pipeline(embeddings=make_embeddings(pipeline), method="eagle:tree=chain-3", seed=1)
    assert result.codes[0].shape == (36,)
    cache = pipeline.engines.target.make_cache(2, 64)
    assert isinstance(cache, DeviceCache)
    assert [get_value_dtype(value) for value in cache.block_handle.block.device_tensors] == ["float16"]


def test_engines_generate_and_decode_an_image_after_its_prologue(
    tmp_path: Path, host_library: HostTensorRT, prologue_bundle: Path
) -> None:
    folder = build_host_engines(prologue_bundle, tmp_path / "plans", max_nodes=64)
    results = [
        Pipeline.from_bundle(prologue_bundle, engines=engines, threads=1)(class_ids=3, seed=1)
        for engines in (None, folder)
    ]
    assert results[0].codes[0].tolist() == results[1].codes[0].tolist()
    np.testing.assert_array_equal(*(np.asarray(result.images[0]) for result in results))
    assert len(host_library.engines) == 2  # one of them for the image decoder


def test_row_ends_halve_the_nodes_of_a_pass(tmp_path: Path, host_library: HostTensorRT, lumina_bundle: Path) -> None:
    folder = build_host_engines(lumina_bundle, tmp_path / "plans", max_nodes=64)
    max_nodes = max(profile.nodes[2] for profile in open_engine_folder(folder).manifest.graphs["target"].profiles)
    engines = Pipeline.from_bundle(lumina_bundle, threads=1, engines=folder).engines
    assert (engines.max_nodes, engines.max_rows) == (max_nodes // 2, 6)


def test_a_prefix_graph_has_an_engine_of_its_own(
    tmp_path: Path, host_library: HostTensorRT, gear_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build_host_engines(gear_bundle, tmp_path / "plans", max_nodes=64)
    assert [*open_engine_folder(folder).manifest.graphs] == ["target", "prefix", "vq_decoder"]
    prompts = ["a red fox", "a small house near the sea"]
    cpu_pipe, pipeline = (Pipeline.from_bundle(gear_bundle, threads=1, engines=engines) for engines in (None, folder))
    for expected, codes in zip(*(pipe(prompts, seed=2).codes for pipe in (cpu_pipe, pipeline)), strict=True):
        np.testing.assert_array_equal(codes, expected)
    monkeypatch.setattr(verify_module, "find_gpu", lambda: None)
    report, _ = verify_module.verify_engines(open_bundle(gear_bundle), open_engine_folder(folder), lambda *stage: None)
    assert report.passed
    assert {row["graph"].partition(":")[0] for row in report.distributions} == {"target.onnx", "prefix.onnx"}


def generate_and_release(bundle: Path, folder: Path) -> None:
    pipeline = Pipeline.from_bundle(bundle, threads=1, engines=folder)
    pipeline(embeddings=make_embeddings(pipeline), method="eagle:tree=chain-3", seed=1)
    del pipeline
    gc.collect()


def test_compiled_kernels_are_shared_and_stored(
    built_engines: tuple[Path, Path, HostTensorRT], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bundle, folder, host_library = built_engines
    monkeypatch.setenv("LANTERN_RT_CACHE", str(tmp_path / "cache"))
    generate_and_release(bundle, folder)
    assert len(host_library.caches) == 1  # all engines of a pipeline share a runtime cache
    (kernel_file,) = (tmp_path / "cache/kernels").iterdir()
    kernel_words = json.loads(kernel_file.read_bytes())
    assert len({word.partition(" ")[0] for word in kernel_words[1:]}) == 3  # target, drafter and image decoder
    generate_and_release(bundle, folder)
    assert host_library.caches[-1].kernels >= {*kernel_words[1:]}
    monkeypatch.setattr(HostRuntimeCache, "version", "2")  # another driver: the stored kernels are not used
    generate_and_release(bundle, folder)
    assert json.loads(kernel_file.read_bytes())[0] == "2"
    kernel_file.write_bytes(b"")  # a damaged file
    generate_and_release(bundle, folder)


def test_verify_compares_device_graphs_and_engines(
    built_engines: tuple[Path, Path, HostTensorRT], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, folder, host_library = built_engines

    def verify() -> tuple[VerificationReport, str | None]:
        return verify_module.verify_engines(open_bundle(bundle), open_engine_folder(folder), lambda *progress: None)

    monkeypatch.setattr(verify_module, "find_gpu", lambda: None)
    result, skip_reason = verify()
    assert result.passed
    assert skip_reason == "they need a GPU of SM89, and here is none, or no driver"
    roles = ("target", "drafter")
    passes = ("prefill, 1", "chain, 1", "tree, 1", "prefill, 4", "chain, 4", "tree, 4")
    expected = {f"{role}.onnx: {name} rows" for role in roles for name in passes}
    assert {row["graph"] for row in result.distributions} == expected

    errors_by_output = {"logits": 1.0}

    class EngineRunner:
        def __init__(self, backend: str, path: Path) -> None:
            self.engine = _CudaEngine(json.loads(path.read_bytes()), host_library.Runtime(None))

        def set_profile(self, index: int) -> None:
            self.inputs = self.engine.profiles[index]

        def infer(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            for name, (low, _, high) in self.inputs.items():
                assert all(np.array(low) <= feeds[name].shape), name
                assert all(feeds[name].shape <= np.array(high)), name
            names = list(self.engine.outputs)
            outputs = zip(names, self.engine.session.run(names, feeds), strict=True)
            return {name: array + errors_by_output.get(name, 0) for name, array in outputs}

    monkeypatch.setattr(verify_module, "find_gpu", lambda: Gpu("13.0", "SM89", "L4"))
    monkeypatch.setattr(compare_module, "open_trt_engine", lambda *built: nullcontext(EngineRunner(*built)))
    result, skip_reason = verify()
    assert skip_reason is None
    failed = {(row["graph"].partition(":")[0], row["tensor"]) for row in result.tensors if not row["passed"]}
    assert failed == {("target.plan", "logits"), ("drafter.plan", "logits")}
    errors_by_output.clear()
    result, _ = verify()
    assert result.passed
    assert {"present_key_values.0.key", "hidden_states"} < {row["tensor"] for row in result.tensors}


def test_verify_detects_a_device_graph_that_differs(
    built_engines: tuple[Path, Path, HostTensorRT], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, folder, _ = built_engines
    graph = onnx.load(folder / "target.onnx", load_external_data=False)
    for node in graph.graph.node:
        for attribute in node.attribute:
            if attribute.name == "interleaved":
                attribute.i ^= 1  # the other rotary layout
    (folder / "target.onnx").write_bytes(graph.SerializeToString())
    monkeypatch.setattr(verify_module, "find_gpu", lambda: None)
    arguments = open_bundle(bundle), open_engine_folder(folder), lambda *progress: None
    with pytest.raises(EngineError, match="another graph"):
        verify_module.verify_engines(*arguments)
    arguments[1].manifest.graphs["target"].__dict__["onnx"] = compute_blake2b(folder / "target.onnx")
    result, _ = verify_module.verify_engines(*arguments)
    failed = {row["graph"] for row in result.tensors if not row["passed"]}
    assert failed == {f"target.onnx: {name} rows" for name in ("chain, 1", "tree, 1", "chain, 4", "tree, 4")}
