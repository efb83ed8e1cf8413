"""TensorRT backends: errors without a library or GPU, and TensorRT-RTX engines built without a GPU."""

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
from lantern_rt.inputs import install_command

RTX = BuildOptions("tensorrt-rtx", max_rows=2, max_nodes=8, compute_capabilities=("SM89", "SM120"))
KERNELS = 4 << 20  # bytes of a small engine that are not weights
ONE_ROW = ShapeProfile(name="rows", rows=(1, 1, 1), nodes=(0, 0, 0), columns=(0, 0, 0))


def silent(stage: str, done: int, total: int) -> None:
    pass


def error_of_call(call: Callable[[], object], kind: type[LanternError] = EngineError) -> LanternError:
    with pytest.raises(kind) as caught:
        call()
    return caught.value


@pytest.fixture
def library() -> Any:
    return pytest.importorskip("tensorrt_rtx", reason="needs lantern-rt[tensorrt-rtx]")


@pytest.fixture(scope="module")
def scenes(float_scenes_bundle: Path) -> Bundle:
    return open_bundle(float_scenes_bundle)


@pytest.fixture(scope="module")
def plans(scenes: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the scenes bundle for two GPUs."""
    pytest.importorskip("tensorrt_rtx", reason="needs lantern-rt[tensorrt-rtx]")
    folder = tmp_path_factory.mktemp("plans") / "scenes"
    build_engines(scenes, "scenes", RTX, folder, False, silent)
    return folder


# ---------------------------------------------------------------- without a library


@pytest.mark.parametrize(("name", "module"), [("tensorrt", "tensorrt"), ("tensorrt-rtx", "tensorrt_rtx")])
def test_the_error_of_a_missing_library_names_the_command_that_installs_it(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for imported_module in (None, ModuleType(module)):  # no module, or a folder of the same name
        monkeypatch.setitem(sys.modules, module, imported_module)
        error = error_of_call(lambda: import_library(name))
        assert error.remedy == f"install it with `{install_command(name)}`"


def test_engines_are_built_for_the_hosts_gpu_unless_others_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "find_gpu", lambda: None)
    for name in MODULES:
        error = error_of_call(lambda name=name: choose_compute_capabilities(BuildOptions(name)))
        assert error.found == "no NVIDIA GPU and driver"
    monkeypatch.setattr(build_module, "find_gpu", lambda: Gpu("13.0", "SM90", "NVIDIA H100"))
    assert choose_compute_capabilities(BuildOptions("tensorrt")) == ("SM90",)
    assert choose_compute_capabilities(RTX) == ("SM89", "SM120")


def test_shapes_of_graph_inputs_follow_the_profile() -> None:
    tree = ShapeProfile(name="tree", rows=(1, 2, 8), nodes=(2, 64, 64), columns=(64, 192, 384))
    for name in ("token_ids", "hidden_ids", "position_ids"):
        assert make_shape_bounds(name, (None, None), tree, 512) == ((1, 2), (2, 64), (8, 64))
    assert make_shape_bounds("embeddings", (None, 256), tree, 512) == ((1, 256), (512, 256), (512, 256))
    assert make_shape_bounds("hidden", (None, None, 256), tree, 512) == ((1, 1, 256), (2, 512, 256), (8, 512, 256))
    assert make_shape_bounds("write", (None,), tree, 512) == ((1,), (2,), (8,))
    assert make_shape_bounds("seen", (None, None, None), tree, 512) == ((1, 2, 4), (2, 64, 12), (8, 64, 24))
    past = ((1, 4, 384, 64), (2, 4, 384, 64), (8, 4, 384, 64))
    assert make_shape_bounds("past_key_values.0.key", (None, 4, 384, 64), tree, 512) == past
    assert make_shape_bounds("codes", (None, 256), ONE_ROW, 0) == ((1, 256),) * 3


# ---------------------------------------------------------------- ahead of time, without a GPU


def test_engines_for_two_gpus_are_built_and_recorded(plans: Path, scenes: Bundle, library: Any) -> None:
    manifest = open_engine_folder(plans).manifest
    assert (manifest.backend, manifest.builder_version) == ("tensorrt-rtx", library.__version__)
    assert manifest.compute_capabilities == ("SM89", "SM120")
    assert (manifest.precision, manifest.bundle_sha256) == ("float32", scenes.digest)
    assert manifest.command == (
        "lantern-rt", "build-engine", "scenes", "--backend", "tensorrt-rtx", "--max-rows", "2", "--max-nodes", "8",
        "--compute-capability", "SM89", "--compute-capability", "SM120",
    )  # fmt: skip
    assert manifest.graphs.keys() == {"target", "drafter", "vq_decoder"}
    for role, graph in manifest.graphs.items():
        assert graph.bytes == (plans / f"{role}.plan").stat().st_size
        assert graph.bytes > scenes.manifest.files[f"{role}.data"].bytes  # the engine contains the weights
    names = [(p.name, p.rows[2], p.nodes[2], p.columns[2]) for p in manifest.graphs["target"].profiles]
    assert names == [("ar", 2, 2, 320), ("tree", 2, 24, 320)]


@pytest.mark.skipif(find_gpu() is not None, reason="there is a GPU and driver here")
def test_the_error_of_running_engines_without_a_driver_says_so(plans: Path, scenes: Bundle) -> None:
    assert (
        error_of_call(lambda: BundleEngines(scenes, engine_folder=open_engine_folder(plans))).found
        == "no NVIDIA GPU and driver"
    )


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("change", "compute", "precision"),
    [
        ({}, "float16", None),
        ({}, "float32", "int4-weights"),
        ({"family": "emu3", "key_share": 2, "vocab_size": 1600}, "float16", None),
        ({"hidden_size": 400}, "float16", None),
    ],
    ids=["float16", "int4", "grouped heads", "heads of 100 numbers"],
)
def test_an_engine_stores_weights_as_small_as_in_the_bundle(
    tmp_path: Path, change: dict[str, Any], compute: str, precision: str | None
) -> None:
    torch = pytest.importorskip("torch")
    from random_bundle import ModelShape, random_bundle

    shape = replace(ModelShape(2, 4, 256, 768, codes=1024, grid=4, dtype=torch.float32, vq_width=32), **change)
    bundle = open_bundle(random_bundle(shape, tmp_path / "bundle", compute, precision))
    sizes = bundle.manifest.target
    assert sizes.dtype == compute
    assert sizes.num_kv_heads == 4 // shape.queries_per_key
    profiles = (ShapeProfile(name="tree", rows=(1, 2, 2), nodes=(2, 8, 8), columns=(64, 64, 64)),)
    for role in ("target", "drafter") if bundle.manifest.drafter else ("target",):
        inputs = write_device_graph(bundle, role, profiles, tmp_path)
        assert inputs is not None
        plan = build_engine_file("tensorrt-rtx", tmp_path / f"{role}.onnx", inputs, ("SM89",), silent)
        assert plan.stat().st_size < bundle.manifest.files[f"{role}.data"].bytes + KERNELS


@pytest.mark.usefixtures("library")
def test_an_unknown_gpu_is_rejected(scenes: Bundle, tmp_path: Path) -> None:
    options = replace(RTX, compute_capabilities=("SM31",))
    call = lambda: build_engines(scenes, "scenes", options, tmp_path / "new", False, silent)  # noqa: E731
    error = error_of_call(call, RequestError)
    assert (error.field, error.found) == ("compute_capability", "'SM31'")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("library")
def test_the_error_of_a_failed_build_names_the_node_or_shape(scenes: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "vq_decoder.onnx"
    node = helper.make_node("Bogus", ["codes"], ["images"], name="strange_2")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 4]) for name in ("codes", "images")]
    graph = helper.make_graph([node], "bad", values[:1], values[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    build = partial(build_engine_file, "tensorrt-rtx", path, [{"codes": ((1, 4),) * 3}], ("SM89",), silent)
    assert "strange_2 and operator: Bogus" in error_of_call(build).problem
    path.write_bytes(b"junk")
    assert "Failed to parse the ONNX model" in error_of_call(build).problem
    wrong = ShapeProfile(name="rows", rows=(1, 1, 1), nodes=(4, 2, 2), columns=(64, 64, 64))
    inputs = write_device_graph(scenes, "drafter", [wrong], tmp_path)
    assert inputs is not None
    error = error_of_call(
        lambda: build_engine_file("tensorrt-rtx", tmp_path / "drafter.onnx", inputs, ("SM89",), silent)
    )
    assert "token_ids" in error.problem


@pytest.mark.usefixtures("library")
def test_progress_comes_from_the_builder_and_ctrl_c_stops_it(scenes: Bundle, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []

    def interrupt(stage: str, done: int, total: int) -> None:
        calls.append((stage, done, total))
        if "optimization" in stage:
            raise KeyboardInterrupt

    inputs = write_device_graph(scenes, "vq_decoder", [ONE_ROW], tmp_path)
    assert inputs is not None
    with pytest.raises(KeyboardInterrupt):
        build_engine_file("tensorrt-rtx", tmp_path / "vq_decoder.onnx", inputs, ("SM89",), interrupt)
    assert all(stage.startswith("building vq_decoder: ") for stage, _, _ in calls)
    assert all(0 <= done <= total for _, done, total in calls)
    assert not list(tmp_path.glob("*.plan"))
