"""Engine folders: complete or absent after a build; invalid folders are rejected with a reason and a remedy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from plan_folder import BUILD_OPTIONS, BUILDER_VERSION, write_engine_folder
from refusals import catch_error
from tiny_bundle import make_tiny_bundle

from lantern_rt import EngineError, LanternError, OutputError, Pipeline, open_bundle
from lantern_rt.engines import build as build_module
from lantern_rt.engines import engine_folder
from lantern_rt.engines.build import build_engines
from lantern_rt.engines.engine_folder import ENGINE_FILE, open_engine_folder
from lantern_rt.engines.gpu import Gpu
from lantern_rt.engines.profiles import profiles
from lantern_rt.engines.trt import backend as tensorrt_backend
from lantern_rt.errors import BundleError

L4 = Gpu("13.0", "SM89", "NVIDIA L4")


def ignore_progress(stage: str, done: int, total: int) -> None:
    pass


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_bundle(tmp_path_factory.mktemp("bundle") / "tiny")


@pytest.fixture
def engines(bundle: Path, tmp_path: Path) -> Path:
    return write_engine_folder(bundle, tmp_path / "engines").folder


@pytest.fixture
def replace_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the TensorRT library by functions that write text, and the GPU by an L4."""

    def write_graph(bundle: object, role: str, shapes: object, folder: Path) -> list[object]:
        (folder / f"{role}.onnx").write_text(f"graph of {role}")
        return []

    def build_engine(name: str, graph: Path, inputs: object, gpus: object, progress: Any) -> Path:
        progress(f"building {graph.stem}", 1, 1)
        graph.with_suffix(".plan").write_text(graph.stem)
        return graph.with_suffix(".plan")

    monkeypatch.setattr(build_module, "write_device_graph", write_graph)
    monkeypatch.setattr(build_module, "build_engine_file", build_engine)
    monkeypatch.setattr(build_module, "import_library", lambda name: SimpleNamespace(__version__=BUILDER_VERSION))
    monkeypatch.setattr(build_module, "find_gpu", lambda: L4)


def change_manifest(engines: Path, **fields: Any) -> None:
    file = engines / ENGINE_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def get_open_error(bundle: Path, engines: Path) -> EngineError:
    with pytest.raises(EngineError) as caught:
        open_engine_folder(engines).check_compatibility(open_bundle(bundle), BUILDER_VERSION)
    return caught.value


# ---------------------------------------------------------------- building


@pytest.mark.usefixtures("replace_builder")
def test_a_build_is_recorded_and_printed_by_inspect(program: Any, bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "fast"
    options = ["--backend", "tensorrt-rtx", "--max-rows", 4, "--compute-capability", "SM89"]
    code, out, err = program("build-engine", bundle, "--output", folder, *options)
    assert (code, out) == (0, f"{folder}\n")
    assert "building target" in err
    loaded_bundle = open_bundle(bundle)
    manifest = open_engine_folder(folder).manifest
    assert manifest.graphs.keys() == {"target", "drafter", "vq_decoder"}
    assert {path.name for path in folder.iterdir()} == {
        *(graph.path for graph in manifest.graphs.values()),
        ENGINE_FILE,
        *(f"{role}.onnx" for role in manifest.graphs),
    }
    assert (manifest.backend, manifest.builder_version) == ("tensorrt-rtx", BUILDER_VERSION)
    assert (manifest.bundle, manifest.bundle_sha256, manifest.precision) == ("tiny", loaded_bundle.digest, "float32")
    assert manifest.graphs["target"].bytes == len("target")
    open_engine_folder(folder).check_compatibility(loaded_bundle, BUILDER_VERSION)
    rebuild = (
        f"lantern-rt build-engine {bundle} --backend tensorrt-rtx --max-rows 4 --max-nodes 64 "
        f"--compute-capability SM89 --output {folder} --force"
    )
    code, out, _ = program("inspect", folder)
    assert code == 0
    assert f"rebuild {rebuild}" in [" ".join(line.split()) for line in out.splitlines()]
    assert program(*rebuild.split()[1:], "--json")[0] == 0
    code, out, _ = program("inspect", folder, "--json")
    assert json.loads(out)["manifest"]["graphs"].keys() == manifest.graphs.keys()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--backend", "abacus"], "--backend: found 'abacus', expected one of tensorrt, tensorrt-rtx"),
        (["--max-rows", "0"], "--max-rows: found 0, expected 1 .. 4096"),
        (["--max-nodes", "1"], "--max-nodes: found 1, expected 2 .. 4096"),
        (["--compute-capability", "SM89"], "--compute-capability: found backend tensorrt, expected tensorrt-rtx"),
    ],
)
def test_an_invalid_option_of_build_engine_writes_no_file(
    program: Any, bundle: Path, tmp_path: Path, arguments: list[str], expected: str
) -> None:
    code, out, err = program("build-engine", bundle, "--output", tmp_path / "new", *arguments)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == f"lantern-rt: {expected}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--threads", "0"], "--threads: found 0"),
        (["--provider", "abacus"], "--provider: found 'abacus'"),
        (["--provider", "cpu", "--provider", "vq=cpu"], "--provider: found graph 'vq'"),
        (["--engines", "nowhere"], "nowhere: no engine.json in this folder"),
    ],
)
def test_an_invalid_engine_option_of_run_is_rejected(
    program: Any, bundle: Path, arguments: list[str], expected: str
) -> None:
    code, out, err = program("run", bundle, "red cube", *arguments)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"lantern-rt: {expected}")


@pytest.mark.usefixtures("replace_builder")
def test_a_build_replaces_engine_folders_only_with_force(bundle: Path, engines: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("chapter 1")
    mine = tmp_path / "mine"
    for output_path, force in ((engines, False), (mine, True), (mine / "thesis.txt" / "x", False)):
        with pytest.raises(OutputError):
            build_engines(open_bundle(bundle), "tiny", BUILD_OPTIONS, output_path, force, ignore_progress)


@pytest.mark.usefixtures("replace_builder")
def test_a_failed_build_leaves_the_existing_engines_unchanged(
    bundle: Path, engines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in engines.iterdir()}

    def fail(**fields: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(build_module, "EngineManifest", fail)  # after every graph was built
    with pytest.raises(KeyboardInterrupt):
        build_engines(open_bundle(bundle), "tiny", BUILD_OPTIONS, engines, True, ignore_progress)
    assert {path.name: path.read_bytes() for path in engines.iterdir()} == before
    assert [path.name for path in engines.parent.iterdir()] == ["engines"]


def test_profiles_cover_plain_decoding_and_draft_trees(bundle: Path) -> None:
    manifest = open_bundle(bundle).manifest
    shapes = {role: profiles(manifest, role, BUILD_OPTIONS) for role in ("target", "drafter", "vq_decoder")}
    assert [(p.name, p.rows, p.nodes, p.columns) for p in shapes["target"]] == [
        ("ar", (1, 2, 4), (2, 2, 2), (64, 64, 64)),
        ("tree", (1, 2, 4), (2, 8, 8), (64, 64, 64)),
    ]
    # Draft nodes are cached until they are verified.
    assert [p.columns for p in shapes["drafter"]] == [(64, 64, 128)] * 2
    assert [p.name for p in shapes["vq_decoder"]] == ["rows"]


# ---------------------------------------------------------------- rejected engine folders


def test_onnx_graphs_replaced_by_tensorrt_engines_are_not_read(bundle: Path, engines: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "tiny"))
    data = bytearray((copy / "target.onnx").read_bytes())
    data[-1] ^= 1
    (copy / "target.onnx").write_bytes(data)
    with pytest.raises(BundleError):
        open_bundle(copy)
    open_bundle(copy, skipped_roles=open_engine_folder(engines).list_replaced_files())


@pytest.mark.parametrize(
    ("fields", "expected_found"),
    [
        ({"bundle_sha256": "0" * 64, "bundle": "other"}, "engines of bundle other 000000000000..."),
        ({"builder_version": "1.0.0"}, "engines built by tensorrt-rtx 1.0.0"),
    ],
)
def test_engines_of_another_bundle_or_builder_are_rejected(
    bundle: Path, engines: Path, fields: dict[str, str], expected_found: str
) -> None:
    change_manifest(engines, **fields)
    error = get_open_error(bundle, engines)
    assert (error.field, error.found) == (str(engines), expected_found)
    command = f"lantern-rt build-engine {bundle} --backend tensorrt-rtx --output {engines} --force"
    assert error.remedy == f"rebuild with `{command}`"


def test_an_altered_or_missing_engine_file_is_rejected(
    bundle: Path, engines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = engines / "drafter.plan"
    elsewhere = tmp_path / "elsewhere"
    drafter.rename(elsewhere)
    assert get_open_error(bundle, engines).found == "no file"
    drafter.symlink_to(elsewhere)
    assert get_open_error(bundle, engines).found == "no file"
    drafter.unlink()
    drafter.write_bytes(b"anything")
    error = get_open_error(bundle, engines)
    assert (error.field, error.found[:5]) == (str(drafter), "hash ")

    def fail_to_read(path: Path) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(engine_folder, "compute_blake2b", fail_to_read)
    assert get_open_error(bundle, engines).problem == "cannot be read (Permission denied)"


@pytest.mark.parametrize("path", ["../target.plan", "/etc/passwd", ".hidden", "a/b", ""])
def test_an_engine_path_beside_a_plain_name_is_rejected(bundle: Path, engines: Path, path: str) -> None:
    graphs = json.loads((engines / ENGINE_FILE).read_text())["graphs"]
    graphs["target"]["path"] = path
    change_manifest(engines, graphs=graphs)
    assert get_open_error(bundle, engines).field.endswith("field `graphs.target.path`")


@pytest.mark.parametrize(
    "command",
    [
        ["sudo", "rm", "-rf", "/"],
        ["lantern-rt", "push", "tiny", "owner/name"],
        ["lantern-rt", "build-engine"],
        ["lantern-rt", "build-engine", "--help"],
        ["lantern-rt", "build-engine", "tiny", "--output", "/etc"],
        ["lantern-rt", "build-engine", "tiny", "--backend", "--force"],
        ["lantern-rt", "build-engine", "tiny", "--max-rows", "4; sudo rm -rf /"],
        ["lantern-rt build-engine tiny"],
    ],
)
def test_an_engine_folder_cannot_choose_a_recommended_command(bundle: Path, engines: Path, command: list[str]) -> None:
    change_manifest(engines, command=command, builder_version="1.0.0")
    error = get_open_error(bundle, engines)
    assert "field `command" in error.field
    assert error.remedy == "build the engines again"


def test_a_recommended_command_quotes_the_bundles_name(bundle: Path, engines: Path) -> None:
    change_manifest(engines, command=["lantern-rt", "build-engine", "my $(bundle); ls"], builder_version="1.0.0")
    assert "build-engine 'my $(bundle); ls' --output" in get_open_error(bundle, engines).remedy


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "expected JSON"),
        ("[]", "found engine format None, expected 5.0; build the engines again"),
        ('{"format_version": "2.0"}', "found engine format '2.0', expected 5.0; build the engines again"),
        ('{"format_version": "5.0"}', "field `backend`: found nothing, expected a value"),
        (" " * ((1 << 20) + 1), "cannot be read (a file of more than 1,048,576 bytes), expected a short JSON text"),
        (None, "no engine.json in this folder; an engine folder is written by `lantern-rt build-engine`"),
    ],
)
def test_a_damaged_engine_json_is_rejected(bundle: Path, engines: Path, text: str | None, expected: str) -> None:
    file = engines / ENGINE_FILE
    file.unlink() if text is None else file.write_text(text)
    assert expected in str(get_open_error(bundle, engines))


def test_engines_of_another_host_are_rejected_before_loading(
    bundle: Path, engines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get_load_error(gpu: Gpu | None, **options: Any) -> LanternError:
        monkeypatch.setattr(tensorrt_backend, "import_library", lambda name: None)
        monkeypatch.setattr(tensorrt_backend, "find_gpu", lambda: gpu)
        return catch_error(LanternError, Pipeline.from_bundle, bundle, threads=1, engines=engines, **options)

    assert get_load_error(None).expected == "a GPU of SM89"
    assert get_load_error(Gpu("13.0", "SM86", "A2")).expected == "SM86, the GPU of this host"
    assert get_load_error(L4, provider="cuda").field == "provider"
    # A GPU of the same compute capability, but TensorRT selects other kernels.
    change_manifest(engines, gpu="NVIDIA GeForce RTX 4090")
    assert get_load_error(L4).expected == "NVIDIA L4, the GPU of this host"
    change_manifest(engines, backend="abacus")
    assert get_load_error(L4).found == "'abacus'"
