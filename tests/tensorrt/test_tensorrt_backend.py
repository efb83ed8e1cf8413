"""TensorRT backends: what they refuse without a library or GPU, and TensorRT-RTX plans built without a GPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from plan_requests import ONE_ROW, RTX, bad_graph, silent
from refusals import refused

from lantern_rt.bundle.files import Bundle, open_bundle
from lantern_rt.bundle.onnx_scan import float_weights
from lantern_rt.engines.build import build_engines, plan_build
from lantern_rt.engines.engine_folder import EngineFolder, open_engine_folder
from lantern_rt.engines.gpu import Gpu, find_gpu
from lantern_rt.engines.loader import Engines
from lantern_rt.engines.profiles import BuildOptions, Profile
from lantern_rt.engines.trt import backend as tensorrt_backend
from lantern_rt.engines.trt.backend import TensorRTBackend, ranges
from lantern_rt.errors import EngineError, RequestError


@pytest.fixture
def library() -> Any:
    return pytest.importorskip("tensorrt_rtx", reason="needs tensorrt-rtx: pip install 'lantern-rt[tensorrt-rtx]'")


@pytest.fixture(scope="module")
def scenes() -> Bundle:
    return open_bundle("scenes")


@pytest.fixture(scope="module")
def plans(scenes: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scenes bundle for two GPUs."""
    pytest.importorskip("tensorrt_rtx", reason="needs tensorrt-rtx: pip install 'lantern-rt[tensorrt-rtx]'")
    folder = tmp_path_factory.mktemp("plans") / "scenes"
    build_engines(scenes, "scenes", RTX, folder, False, silent)
    return folder


NO_GPU = "{}: found no NVIDIA GPU and driver, expected a GPU of SM89, SM120; run without --engines"


def no_gpu() -> None:
    return None


# ---------------------------------------------------------------- without a library


@pytest.mark.parametrize(("name", "module"), [("tensorrt", "tensorrt"), ("tensorrt-rtx", "tensorrt_rtx")])
def test_a_missing_library_comes_with_the_command_that_installs_it(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with refused(EngineError, f"{module} cannot be imported", f"install it with `pip install 'lantern-rt[{name}]'`"):
        TensorRTBackend(name).version()


def test_a_folder_that_is_called_like_the_library_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", ModuleType("tensorrt"))
    with refused(EngineError, "tensorrt cannot be imported", "no attribute '__version__'", "lantern-rt[tensorrt]"):
        TensorRTBackend("tensorrt").version()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (replace(RTX, provider="cuda"), "--provider: goes with backend onnxruntime, found tensorrt-rtx"),
        (replace(RTX, backend="tensorrt"), "--compute-capability: goes with backend tensorrt-rtx"),
    ],
)
def test_an_option_of_the_other_library_is_refused(scenes: Bundle, options: BuildOptions, expected: str) -> None:
    with refused(RequestError, expected):
        plan_build(scenes, options)


def test_a_build_for_this_hosts_gpu_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt_backend, "find_gpu", no_gpu)
    for name, advice in (
        ("tensorrt-rtx", "give --compute-capability, such as SM89"),
        ("tensorrt", "build on the host that will run the engines, or with --backend tensorrt-rtx"),
    ):
        backend = TensorRTBackend(name)
        with refused(EngineError, f"{name}: found no NVIDIA GPU and driver to build for; {advice}"):
            backend.compute_capabilities(BuildOptions(name))
        assert backend.driver() is None


def test_the_gpu_of_the_host_is_built_for_unless_others_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt_backend, "find_gpu", lambda: Gpu("13.0", "SM90"))
    backend = TensorRTBackend("tensorrt")
    assert backend.compute_capabilities(BuildOptions("tensorrt")) == ("SM90",)
    assert backend.driver() == "13.0"
    assert TensorRTBackend("tensorrt-rtx").compute_capabilities(RTX) == ("SM89", "SM120")


def test_engines_run_only_on_the_gpus_they_were_built_for(monkeypatch: pytest.MonkeyPatch) -> None:
    record: Any = SimpleNamespace(compute_capabilities=("SM89", "SM120"), command=("again",))
    folder = EngineFolder(Path("plans"), record)
    backend = TensorRTBackend("tensorrt-rtx")
    monkeypatch.setattr(tensorrt_backend, "find_gpu", no_gpu)
    with refused(EngineError, NO_GPU.format("plans")):
        backend.check_host(folder)
    monkeypatch.setattr(tensorrt_backend, "find_gpu", lambda: Gpu("13.0", "SM86"))
    with refused(EngineError, "plans: found engines for SM89, SM120, expected SM86", "rebuild with `again --output"):
        backend.check_host(folder)
    monkeypatch.setattr(tensorrt_backend, "find_gpu", lambda: Gpu("13.0", "SM120"))
    backend.check_host(folder)


def test_shapes_of_graph_inputs_follow_the_profile() -> None:
    tree = Profile(name="tree", rows=(1, 2, 8), nodes=(2, 64, 64), columns=(64, 192, 384))
    for name in ("token_ids", "hidden_ids", "position_ids"):
        assert ranges(name, (-1, -1), tree, 512) == ((1, 2), (2, 64), (8, 64))
    assert ranges("embeddings", (-1, 256), tree, 512) == ((1, 256), (512, 256), (512, 256))
    assert ranges("hidden", (-1, -1, 256), tree, 512) == ((1, 1, 256), (2, 512, 256), (8, 512, 256))
    assert ranges("write", (-1,), tree, 512) == ((1,), (2,), (8,))
    assert ranges("seen", (-1, -1, -1), tree, 512) == ((1, 2, 4), (2, 64, 12), (8, 64, 24))
    past = ((1, 4, 384, 64), (2, 4, 384, 64), (8, 4, 384, 64))
    assert ranges("past_key_values.0.key", (-1, 4, 384, 64), tree, 512) == past
    assert ranges("codes", (-1, 256), ONE_ROW, 0) == ((1, 256),) * 3


# ---------------------------------------------------------------- ahead of time, without a GPU


def test_plans_for_two_gpus_are_built_and_recorded(plans: Path, scenes: Bundle, library: Any) -> None:
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
        assert graph.onnx_sha256[role] == scenes.manifest.files[role].sha256
        assert graph.onnx_sha256[f"{role}.data"] == scenes.manifest.files[f"{role}.data"].sha256
        (file,) = graph.files
        assert file.bytes == (plans / f"{role}.plan").stat().st_size
        assert file.bytes > scenes.manifest.files[f"{role}.data"].bytes  # the weights are in it
    names = [(p.name, p.rows[2], p.nodes[2], p.columns[2]) for p in manifest.graphs["target"].profiles]
    assert names == [("ar", 2, 2, 320), ("tree", 2, 24, 320)]


@pytest.mark.skipif(find_gpu() is not None, reason="there is a GPU and driver here")
def test_plans_cannot_be_run_without_a_driver_and_say_so(plans: Path, scenes: Bundle) -> None:
    with refused(EngineError, NO_GPU.format(plans)):
        Engines(scenes, folder=open_engine_folder(plans))


@pytest.mark.usefixtures("library")
def test_graphs_that_compute_in_float16_make_smaller_plans(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from random_bundle import Shape, random_bundle

    shape = Shape(4, 4, 256, 768, codes=1024, grid=4, dtype=torch.float32, vq_width=32)
    sizes: dict[str, list[int]] = {"target": [], "drafter": []}
    for compute in ("float32", "float16"):
        bundle = open_bundle(random_bundle(shape, tmp_path / compute, compute))
        for role, found in sizes.items():
            profiles = (Profile(name="tree", rows=(1, 2, 2), nodes=(2, 8, 8), columns=(64, 64, 64)),)
            (folder := tmp_path / f"{compute}-{role}").mkdir()
            built = TensorRTBackend("tensorrt-rtx").build(bundle, role, profiles, RTX, folder, silent)
            found.append(built[0].stat().st_size)
    bytes_saved = {role: 2 * float_weights(bundle.path(role)) for role in sizes}
    for role, (full, half) in sizes.items():
        assert full - half > 0.7 * bytes_saved[role]  # kernels, which plans also hold, differ too


@pytest.mark.usefixtures("library")
def test_an_unknown_gpu_is_answered_with_the_known_ones(scenes: Bundle, tmp_path: Path) -> None:
    options = replace(RTX, compute_capabilities=("SM31",))
    with refused(RequestError, "compute-capability: found 'SM31', expected one of SM75, SM80, SM86, SM89, SM120"):
        build_engines(scenes, "scenes", options, tmp_path / "new", False, silent)
    assert list(tmp_path.iterdir()) == []


def test_a_graph_that_cannot_be_parsed_names_its_node_and_module(tmp_path: Path, library: Any) -> None:
    path = tmp_path / "vq_decoder.onnx"
    for op in ("Bogus", "Det"):
        bundle, node = bad_graph(path, op), f"node `strange_2` ({op}) near `layers.3.ffn.up.weight`: "
        start = f"{path}: tensorrt-rtx {library.__version__} cannot parse {node}"
        with refused(EngineError, start, "; update tensorrt-rtx, or build with another --backend"):
            TensorRTBackend("tensorrt-rtx").build(bundle, "vq_decoder", [ONE_ROW], RTX, tmp_path, silent)


def test_a_file_that_is_no_graph_is_refused(tmp_path: Path, library: Any) -> None:
    (tmp_path / "junk.onnx").write_bytes(b"junk")
    specs = SimpleNamespace(target=None, drafter=None, sizes=())
    bundle: Any = SimpleNamespace(path=lambda _: tmp_path / "junk.onnx", manifest=specs)
    with refused(EngineError, f"{tmp_path / 'junk.onnx'}: tensorrt-rtx {library.__version__} cannot parse "):
        TensorRTBackend("tensorrt-rtx").build(bundle, "vq_decoder", [ONE_ROW], RTX, tmp_path, silent)


def test_shapes_that_contradict_the_graph_fail_the_build_in_one_line(
    scenes: Bundle, tmp_path: Path, library: Any
) -> None:
    wrong = Profile(name="rows", rows=(1, 1, 1), nodes=(4, 2, 2), columns=(64, 64, 64))
    start = f"{scenes.path('drafter')}: tensorrt-rtx {library.__version__} does not build this graph: "
    with refused(EngineError, start, "; try smaller --max-rows, --max-nodes or --max-past, or another --backend"):
        TensorRTBackend("tensorrt-rtx").build(scenes, "drafter", [wrong], RTX, tmp_path, silent)


@pytest.mark.usefixtures("library")
def test_progress_comes_from_the_builder_and_ctrl_c_stops_it(scenes: Bundle, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []

    def interrupt(what: str, done: int, total: int) -> None:
        calls.append((what, done, total))
        if "optimization" in what:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        TensorRTBackend("tensorrt-rtx").build(scenes, "vq_decoder", [ONE_ROW], RTX, tmp_path, interrupt)
    assert calls[0][0] == "building vq_decoder: building engine"
    assert all(0 <= done <= total for _, done, total in calls)
    assert not list(tmp_path.iterdir())
