"""TensorRT backends on a host without a GPU: errors, and TensorRT-RTX engines that are built for other GPUs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from lantern_rt.bundle.files import Bundle, open_bundle
from lantern_rt.engines import build as build_module
from lantern_rt.engines.build import build_engines, choose_compute_capabilities
from lantern_rt.engines.engine_folder import open_engine_folder
from lantern_rt.engines.gpu import Gpu, find_gpu
from lantern_rt.engines.loader import BundleEngines
from lantern_rt.engines.profiles import BuildOptions, ShapeProfile
from lantern_rt.engines.trt.builder import (
    MODULES,
    build_engine_file,
    import_library,
    make_shape_bounds,
    write_device_graph,
)
from lantern_rt.errors import EngineError, LanternError, RequestError
from lantern_rt.inputs import make_install_command

RTX_OPTIONS = BuildOptions("tensorrt-rtx", max_rows=2, max_nodes=8, compute_capabilities=("SM89", "SM120"))
MAX_KERNEL_BYTES = 4 << 20  # bytes of a small engine that are not weights: 4 MiB
ONE_ROW_PROFILE = ShapeProfile(name="rows", rows=(1, 1, 1), nodes=(0, 0, 0), columns=(0, 0, 0))


def ignore_progress(stage: str, done: int, total: int) -> None:
    pass


def catch_error(call: Callable[[], object], error_type: type[LanternError] = EngineError) -> LanternError:
    with pytest.raises(error_type) as caught:
        call()
    return caught.value


@pytest.fixture
def tensorrt_rtx() -> Any:
    return pytest.importorskip("tensorrt_rtx", reason="needs lantern-rt[tensorrt-rtx]")


@pytest.fixture(scope="module")
def scenes_bundle(float_scenes_bundle: Path) -> Bundle:
    return open_bundle(float_scenes_bundle)


@pytest.fixture(scope="module")
def engine_folder(scenes_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("tensorrt_rtx", reason="needs lantern-rt[tensorrt-rtx]")
    folder = tmp_path_factory.mktemp("plans") / "scenes"
    build_engines(scenes_bundle, "scenes", RTX_OPTIONS, folder, False, ignore_progress)
    return folder


# ---------------------------------------------------------------- without a library


@pytest.mark.parametrize(("name", "module"), [("tensorrt", "tensorrt"), ("tensorrt-rtx", "tensorrt_rtx")])
def test_a_missing_tensorrt_names_the_installation_command(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for imported_module in (None, ModuleType(module)):  # no module, or an empty folder with the name of the module
        monkeypatch.setitem(sys.modules, module, imported_module)
        error = catch_error(lambda: import_library(name))
        assert error.remedy == f"install it with `{make_install_command(name)}`"


def test_engines_are_built_for_the_hosts_gpu_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "find_gpu", lambda: None)
    for name in MODULES:
        error = catch_error(lambda name=name: choose_compute_capabilities(BuildOptions(name)))
        assert error.found == "no NVIDIA GPU and driver"
    monkeypatch.setattr(build_module, "find_gpu", lambda: Gpu("13.0", "SM90", "NVIDIA H100"))
    assert choose_compute_capabilities(BuildOptions("tensorrt")) == ("SM90",)
    assert choose_compute_capabilities(RTX_OPTIONS) == ("SM89", "SM120")


def test_shape_bounds_of_inputs_follow_from_the_profile() -> None:
    tree_profile = ShapeProfile(name="tree", rows=(1, 2, 8), nodes=(2, 64, 64), columns=(64, 192, 384))
    for name in ("token_ids", "hidden_ids", "position_ids"):
        assert make_shape_bounds(name, (None, None), tree_profile, 512) == ((1, 2), (2, 64), (8, 64))
    assert make_shape_bounds("embeddings", (None, 256), tree_profile, 512) == ((1, 256), (512, 256), (512, 256))
    assert make_shape_bounds("hidden", (None, None, 256), tree_profile, 512) == (
        (1, 1, 256),
        (2, 512, 256),
        (8, 512, 256),
    )
    assert make_shape_bounds("write", (None,), tree_profile, 512) == ((1,), (2,), (8,))
    assert make_shape_bounds("seen", (None, None, None), tree_profile, 512) == ((1, 2, 4), (2, 64, 12), (8, 64, 24))
    cache_bounds = ((1, 4, 384, 64), (2, 4, 384, 64), (8, 4, 384, 64))
    assert make_shape_bounds("past_key_values.0.key", (None, 4, 384, 64), tree_profile, 512) == cache_bounds
    assert make_shape_bounds("codes", (None, 256), ONE_ROW_PROFILE, 0) == ((1, 256),) * 3


# ---------------------------------------------------------------- ahead of time, without a GPU


def test_the_manifest_records_how_engines_were_built(
    engine_folder: Path, scenes_bundle: Bundle, tensorrt_rtx: Any
) -> None:
    manifest = open_engine_folder(engine_folder).manifest
    assert (manifest.backend, manifest.builder_version) == ("tensorrt-rtx", tensorrt_rtx.__version__)
    assert manifest.compute_capabilities == ("SM89", "SM120")
    assert (manifest.precision, manifest.bundle_sha256) == ("float32", scenes_bundle.digest)
    assert manifest.command == (
        "lantern-rt", "build-engine", "scenes", "--backend", "tensorrt-rtx", "--max-rows", "2", "--max-nodes", "8",
        "--compute-capability", "SM89", "--compute-capability", "SM120",
    )  # fmt: skip
    assert manifest.graphs.keys() == {"target", "drafter", "vq_decoder"}
    for role, graph in manifest.graphs.items():
        assert graph.bytes == (engine_folder / f"{role}.plan").stat().st_size
        assert graph.bytes > scenes_bundle.manifest.files[f"{role}.data"].bytes  # the engine contains the weights
    profile_sizes = [(p.name, p.rows[2], p.nodes[2], p.columns[2]) for p in manifest.graphs["target"].profiles]
    assert profile_sizes == [("ar", 2, 2, 320), ("tree", 2, 24, 320)]


@pytest.mark.skipif(find_gpu() is not None, reason="there is a GPU and driver here")
def test_loading_without_an_nvidia_gpu_is_an_error(engine_folder: Path, scenes_bundle: Bundle) -> None:
    assert (
        catch_error(lambda: BundleEngines(scenes_bundle, engine_folder=open_engine_folder(engine_folder))).found
        == "no NVIDIA GPU and driver"
    )


@pytest.mark.usefixtures("tensorrt_rtx")
@pytest.mark.parametrize(
    ("shape_changes", "compute", "precision"),
    [
        ({}, "float16", None),
        ({}, "float32", "int4-weights"),
        ({"family": "emu3", "queries_per_key": 2, "vocab_size": 1600}, "float16", None),
        ({"hidden_size": 400}, "float16", None),
    ],
    ids=["float16", "int4", "grouped heads", "heads of 100 numbers"],
)
def test_an_engines_weights_need_no_more_bytes_than_the_bundles(
    tmp_path: Path, shape_changes: dict[str, Any], compute: str, precision: str | None
) -> None:
    torch = pytest.importorskip("torch")
    from random_bundle import ModelShape, random_bundle

    shape = replace(ModelShape(2, 4, 256, 768, codes=1024, grid=4, dtype=torch.float32, vq_width=32), **shape_changes)
    bundle = open_bundle(random_bundle(shape, tmp_path / "bundle", compute, precision))
    target_spec = bundle.manifest.target
    assert target_spec.dtype == compute
    assert target_spec.num_kv_heads == 4 // shape.queries_per_key
    profiles = (ShapeProfile(name="tree", rows=(1, 2, 2), nodes=(2, 8, 8), columns=(64, 64, 64)),)
    for role in ("target", "drafter") if bundle.manifest.drafter else ("target",):
        inputs = write_device_graph(bundle, role, profiles, tmp_path)
        assert inputs is not None
        plan = build_engine_file("tensorrt-rtx", tmp_path / f"{role}.onnx", inputs, ("SM89",), ignore_progress)
        assert plan.stat().st_size < bundle.manifest.files[f"{role}.data"].bytes + MAX_KERNEL_BYTES


@pytest.mark.usefixtures("tensorrt_rtx")
def test_an_unknown_compute_capability_is_rejected(scenes_bundle: Bundle, tmp_path: Path) -> None:
    options = replace(RTX_OPTIONS, compute_capabilities=("SM31",))
    build = partial(build_engines, scenes_bundle, "scenes", options, tmp_path / "new", False, ignore_progress)
    error = catch_error(build, RequestError)
    assert (error.field, error.found) == ("compute_capability", "'SM31'")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("tensorrt_rtx")
def test_a_failed_build_names_the_node_or_the_input(scenes_bundle: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "vq_decoder.onnx"
    node = helper.make_node("Bogus", ["codes"], ["images"], name="strange_2")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 4]) for name in ("codes", "images")]
    graph = helper.make_graph([node], "bad", values[:1], values[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    build = partial(build_engine_file, "tensorrt-rtx", path, [{"codes": ((1, 4),) * 3}], ("SM89",), ignore_progress)
    assert "strange_2 and operator: Bogus" in catch_error(build).problem
    path.write_bytes(b"junk")
    assert "Failed to parse the ONNX model" in catch_error(build).problem
    invalid_profile = ShapeProfile(name="rows", rows=(1, 1, 1), nodes=(4, 2, 2), columns=(64, 64, 64))
    inputs = write_device_graph(scenes_bundle, "drafter", [invalid_profile], tmp_path)
    assert inputs is not None
    error = catch_error(
        lambda: build_engine_file("tensorrt-rtx", tmp_path / "drafter.onnx", inputs, ("SM89",), ignore_progress)
    )
    assert "token_ids" in error.problem


@pytest.mark.usefixtures("tensorrt_rtx")
def test_a_build_reports_progress_and_stops_at_ctrl_c(scenes_bundle: Bundle, tmp_path: Path) -> None:
    progress_reports: list[tuple[str, int, int]] = []

    def interrupt_during_optimization(stage: str, done: int, total: int) -> None:
        progress_reports.append((stage, done, total))
        if "optimization" in stage:
            raise KeyboardInterrupt

    inputs = write_device_graph(scenes_bundle, "vq_decoder", [ONE_ROW_PROFILE], tmp_path)
    assert inputs is not None
    with pytest.raises(KeyboardInterrupt):
        build_engine_file(
            "tensorrt-rtx", tmp_path / "vq_decoder.onnx", inputs, ("SM89",), interrupt_during_optimization
        )
    assert all(stage.startswith("building vq_decoder: ") for stage, _, _ in progress_reports)
    assert all(0 <= done <= total for _, done, total in progress_reports)
    assert not list(tmp_path.glob("*.plan"))
