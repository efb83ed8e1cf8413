"""Engine folders: built from a bundle, run instead of its graphs, and refused with a reason and a cure."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
from refusals import refused
from tiny_bundle import make_tiny_bundle

from lantern_rt import EngineError, OutputError, Pipeline, RequestError, open_bundle
from lantern_rt.cli.main import run_program
from lantern_rt.engines import build as build_module
from lantern_rt.engines import engine_folder
from lantern_rt.engines.build import build_engines, estimate, plan_build
from lantern_rt.engines.engine_folder import ENGINE_FILE, open_engine_folder
from lantern_rt.engines.host import processor
from lantern_rt.engines.ort import backend as onnxruntime_backend
from lantern_rt.engines.profiles import BuildOptions
from lantern_rt.errors import BundleError

PLAIN = BuildOptions("onnxruntime")
ROLES = ("target", "drafter", "condition", "vq_decoder")


def silent(what: str, done: int, total: int) -> None:
    pass


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_bundle(tmp_path_factory.mktemp("bundle") / "tiny")


@pytest.fixture(scope="module")
def built(bundle: Path) -> Path:
    folder = bundle.parent / "engines"
    build_engines(open_bundle(bundle), str(bundle), PLAIN, folder, False, silent)
    return folder


@pytest.fixture
def engines(built: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(built, tmp_path / "engines"))


@pytest.fixture
def program(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: object) -> tuple[int, str, str]:
        code = run_program([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


def change(engines: Path, **fields: Any) -> None:
    """Write other values into `engine.json`."""
    file = engines / ENGINE_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def rebuild(bundle: Path, engines: Path) -> str:
    return f"rebuild with `lantern-rt build-engine {bundle} --backend onnxruntime --output {engines} --force`"


def check_refused(bundle: Path, engines: Path, *words: str) -> None:
    with refused(EngineError, *words):
        Pipeline.from_bundle(bundle, threads=1, engines=engines)


# ---------------------------------------------------------------- building and running


@pytest.mark.parametrize("method", ["ar", "eagle", "lantern", "lantern++"])
def test_engines_give_bit_for_bit_the_images_of_the_bundle(bundle: Path, built: Path, method: str) -> None:
    raw = Pipeline.from_bundle(bundle, threads=1)("red cube", seed=3, method=method)
    run = Pipeline.from_bundle(bundle, threads=1, engines=built)("red cube", seed=3, method=method)
    assert run.codes[0].tolist() == raw.codes[0].tolist()
    assert run.images[0].tobytes() == raw.images[0].tobytes()


def test_weights_are_stored_as_products_want_them_so_that_processes_share_them(built: Path) -> None:
    model = onnx.load(built / "target.onnx", load_external_data=False)
    (weight,) = (tensor for tensor in model.graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT)
    assert "prepacked_0" in {entry.key for entry in weight.external_data}


def test_what_was_built_is_recorded(bundle: Path, built: Path) -> None:
    manifest, opened = open_engine_folder(built).manifest, open_bundle(bundle)
    listed = [file.path for graph in manifest.graphs.values() for file in graph.files]
    assert {f"{role}.onnx" for role in ROLES} <= set(listed)
    assert {path.name for path in built.iterdir()} == {*listed, ENGINE_FILE}
    assert (manifest.backend, manifest.provider, manifest.precision) == ("onnxruntime", "cpu", "float32")
    assert (manifest.builder_version, manifest.processor) == (onnxruntime.__version__, processor())
    assert (manifest.bundle, manifest.bundle_sha256) == ("tiny", opened.digest)
    assert (manifest.compute_capabilities, manifest.driver) == ((), None)
    assert manifest.graphs["target"].onnx_sha256 == {"target": opened.manifest.files["target"].sha256}
    assert manifest.graphs["target"].files[0].bytes == (built / "target.onnx").stat().st_size
    assert manifest.seconds >= sum(graph.seconds for graph in manifest.graphs.values()) > 0


def test_graphs_that_engines_stand_for_are_not_read(bundle: Path, built: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "tiny"))
    data = bytearray((copy / "target.onnx").read_bytes())
    data[-1] ^= 1
    (copy / "target.onnx").write_bytes(data)
    with pytest.raises(BundleError, match="found sha256"):
        Pipeline.from_bundle(copy, threads=1)
    Pipeline.from_bundle(copy, threads=1, engines=built)("red cube")


def test_build_run_and_inspect_from_the_command_line(
    program: Any, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = program("build-engine", bundle, "--output", "fast", "--max-rows", 4)
    assert (code, out) == (0, "fast\n")
    assert err.startswith("optimising target\noptimising drafter\n")
    code, out, _ = program("run", "--bundle", bundle, "--engines", "fast", "--prompt", "red cube", "--output", "a.png")
    assert (code, out) == (0, "a.png\n")
    code, out, _ = program("inspect", "fast")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert code == 0
    assert f"builder_version {onnxruntime.__version__}" in lines
    assert "compute_capabilities none" in lines
    assert (
        f"rebuild lantern-rt build-engine {bundle} --backend onnxruntime --max-rows 4 "
        f"--output {tmp_path / 'fast'} --force"
    ) in lines
    code, out, _ = program("inspect", "fast", "--json")
    assert json.loads(out)["manifest"]["graphs"].keys() == set(ROLES)
    assert program("build-engine", bundle, "--output", "fast", "--force", "--json")[0] == 0


def test_a_dry_run_prints_memory_and_writes_nothing(program: Any, bundle: Path, tmp_path: Path) -> None:
    code, out, _ = program("build-engine", bundle, "--dry-run", "--json", "--max-nodes", 8, "--max-rows", 4)
    plan = json.loads(out)
    parts = {part.pop("role"): part for part in plan["estimates"]}
    heads, width, past = 2, 4, 64  # 4 prefix rows, 36 codes and 8 nodes, rounded up
    assert code == 0
    assert parts["target"]["weights"] == 4 * 8 * 32  # the head is the only float weight
    assert parts["drafter"]["weights"] == 4 * 2 * 8 * 32  # head and table
    assert parts["target"]["cache"] == 2 * past * 4 * heads * width * 4
    assert plan["total"] == sum(sum(part.values()) for part in parts.values())
    code, out, err = program("build-engine", bundle, "--dry-run")
    assert out.startswith("memory for 8 rows and 64 nodes, estimated\n  target ")
    assert err == ""
    assert list(tmp_path.iterdir()) == []


def test_plans_of_a_bundle_that_computes_in_float32_come_with_a_word_on_float16(program: Any, bundle: Path) -> None:
    code, _, err = program("build-engine", bundle, "--dry-run", "--backend", "tensorrt-rtx")
    assert (code, err) == (
        0,
        "note: this bundle computes in float32, and so will its plans; exported with --compute float16, they take half "
        "the memory\n",
    )


def test_profiles_cover_plain_decoding_prefixes_and_trees(bundle: Path) -> None:
    options = BuildOptions("tensorrt-rtx", max_rows=6, max_nodes=32, compute_capabilities=("SM89",))
    shapes = plan_build(open_bundle(bundle), options)
    assert [(p.name, p.rows, p.nodes, p.columns) for p in shapes["target"]] == [
        ("ar", (1, 2, 6), (2, 2, 2), (64, 64, 128)),
        ("tree", (1, 2, 6), (2, 32, 32), (64, 64, 128)),
    ]
    columns = [(64, 128, 192)] * 2  # a draft's slots are cached until it has been verified
    assert [(p.rows, p.nodes) for p in shapes["drafter"]] == [(p.rows, p.nodes) for p in shapes["target"]]
    assert [p.columns for p in shapes["drafter"]] == columns
    assert [p.name for p in shapes["vq_decoder"]] == ["rows"]


# ---------------------------------------------------------------- refusals when run


def test_engines_of_another_bundle_are_refused(bundle: Path, engines: Path) -> None:
    change(engines, bundle_sha256="0" * 64, bundle="other")
    found, expected = "engines of bundle other 000000000000...", f"tiny {open_bundle(bundle).digest[:12]}..."
    check_refused(bundle, engines, f"{engines}: found {found}, expected {expected}; {rebuild(bundle, engines)}")


def test_engines_of_another_graph_are_refused(bundle: Path, engines: Path) -> None:
    graphs = json.loads((engines / ENGINE_FILE).read_text())["graphs"]
    graphs["target"]["onnx_sha256"]["target"] = "1" * 64
    change(engines, graphs=graphs)
    expected = open_bundle(bundle).manifest.files["target"].sha256[:12]
    found = "found engine `target` built from target 111111111111..."
    check_refused(bundle, engines, f"{engines}: {found}, expected {expected}...", rebuild(bundle, engines))


def test_engines_of_another_version_are_refused(bundle: Path, engines: Path) -> None:
    change(engines, builder_version="1.0.0")
    found = f"found engines built by onnxruntime 1.0.0, expected {onnxruntime.__version__}"
    check_refused(bundle, engines, f"{engines}: {found}", rebuild(bundle, engines))


def test_engines_for_another_processor_are_refused(bundle: Path, engines: Path) -> None:
    change(engines, processor="riscv64 v")
    found = f"found engines for the processor riscv64 v, expected {processor()}"
    check_refused(bundle, engines, f"{engines}: {found}", rebuild(bundle, engines))


def test_an_altered_engine_is_refused_before_it_is_loaded(
    bundle: Path, engines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = open_engine_folder(engines).manifest.graphs["target"].files[0].blake2b
    (engines / "target.onnx").write_bytes(b"anything")
    found = hashlib.blake2b(b"anything", digest_size=32).hexdigest()
    monkeypatch.setattr(onnxruntime_backend, "OrtEngine", None)  # loading would be a TypeError
    hashes = f"{engines / 'target.onnx'}: found hash {found[:12]}..., expected {expected[:12]}..."
    check_refused(bundle, engines, hashes, "an altered one is not run", rebuild(bundle, engines))


def test_a_missing_or_linked_engine_is_refused(bundle: Path, engines: Path, tmp_path: Path) -> None:
    expected = f"{engines / 'drafter.onnx'}: found no file, expected an engine"
    (engines / "drafter.onnx").rename(tmp_path / "elsewhere")
    check_refused(bundle, engines, expected, rebuild(bundle, engines))
    (engines / "drafter.onnx").symlink_to(tmp_path / "elsewhere")
    check_refused(bundle, engines, expected, rebuild(bundle, engines))


@pytest.mark.parametrize("path", ["../target.onnx", "/etc/passwd", ".hidden", "a/b", ""])
def test_a_file_outside_the_folder_cannot_be_named(bundle: Path, engines: Path, path: str) -> None:
    graphs = json.loads((engines / ENGINE_FILE).read_text())["graphs"]
    graphs["target"]["files"][0]["path"] = path
    change(engines, graphs=graphs)
    field = f"{ENGINE_FILE}: field `graphs.target.files.0.path`: found {path!r}, expected"
    check_refused(bundle, engines, field, "build the engines again")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "expected JSON, found "),
        ("[]", "found engine format None, this lantern-rt reads 2.0"),
        ('{"format_version": "3.0", "command": [7]}', "found engine format '3.0', this lantern-rt reads 2.0"),
        ('{"format_version": "2.0"}', "field `backend`: found nothing, expected a value"),
    ],
)
def test_a_damaged_record_is_one_line(bundle: Path, engines: Path, text: str, expected: str) -> None:
    (engines / ENGINE_FILE).write_text(text)
    check_refused(bundle, engines, f"{engines / ENGINE_FILE}: {expected}", "; build the engines again")


def test_engines_of_another_format_come_with_the_command_that_builds_them_again(bundle: Path, engines: Path) -> None:
    change(engines, format_version="1.0")
    found = f"{engines / ENGINE_FILE}: found engine format '1.0', this lantern-rt reads 2.0; rebuild with `lantern-rt"
    check_refused(
        bundle, engines, found, f"build-engine {bundle} --backend onnxruntime", f"--output {engines} --force`"
    )


def test_a_folder_without_engines_or_a_record_that_is_too_long_is_refused(bundle: Path, tmp_path: Path) -> None:
    check_refused(bundle, tmp_path, f"{tmp_path}: no engine.json in it", "written by `lantern-rt build-engine`")
    (tmp_path / ENGINE_FILE).write_text(" " * ((1 << 20) + 1))
    check_refused(bundle, tmp_path, f"{tmp_path / ENGINE_FILE}: cannot be read (more than 1,048,576 bytes); expected")
    (tmp_path / ENGINE_FILE).unlink()
    (tmp_path / ENGINE_FILE).mkdir()
    check_refused(bundle, tmp_path, f"{tmp_path / ENGINE_FILE}: cannot be read (")


def test_an_engine_that_cannot_be_read_is_named(bundle: Path, engines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = engine_folder._hash

    def read_or_refuse(path: Path) -> str:
        if path.name == "drafter.onnx":
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(engine_folder, "_hash", read_or_refuse)
    check_refused(bundle, engines, f"{engines / 'drafter.onnx'}: cannot be read (Permission denied)")


def test_a_graph_that_reads_a_file_which_is_not_listed_is_refused(bundle: Path, engines: Path) -> None:
    model = onnx.load(engines / "target.onnx", load_external_data=False)
    (weight,) = (tensor for tensor in model.graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT)
    (location,) = (entry for entry in weight.external_data if entry.key == "location")
    location.value = "elsewhere.bin"
    (engines / "target.onnx").write_bytes(model.SerializeToString())
    found = hashlib.blake2b((engines / "target.onnx").read_bytes(), digest_size=32).hexdigest()
    graphs = json.loads((engines / ENGINE_FILE).read_text())["graphs"]
    graphs["target"]["files"][0]["blake2b"] = found
    change(engines, graphs=graphs)
    graph = f"{engines / 'target.onnx'}: found a graph that reads the file 'elsewhere.bin', expected"
    check_refused(bundle, engines, graph, rebuild(bundle, engines))


def test_an_unknown_backend_in_the_record_is_refused(bundle: Path, engines: Path) -> None:
    change(engines, backend="abacus")
    with refused(RequestError, "backend: found 'abacus', expected one of onnxruntime, tensorrt, tensorrt-rtx"):
        Pipeline.from_bundle(bundle, engines=engines)


def test_another_provider_than_the_engines_own_is_refused(bundle: Path, built: Path) -> None:
    with refused(RequestError, f"provider: found cuda, but {built} was built for cpu; leave the provider out"):
        Pipeline.from_bundle(bundle, engines=built, provider="cuda")


# ---------------------------------------------------------------- refusals when built


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--backend", "abacus"], "--backend: found 'abacus', expected one of onnxruntime, tensorrt, tensorrt-rtx"),
        (["--max-rows", "0"], "--max-rows: found 0, expected 1 .. 4096"),
        (["--max-nodes", "1"], "--max-nodes: found 1, expected 2 .. 4096"),
        (["--dry-run", "--max-past", "39"], "--max-past: found 39, expected at least 40: "),
        (["--max-past", "0"], "--max-past: found 0, expected 1 .. 1048576"),
        (["--provider", "abacus"], "--provider: found 'abacus', expected one of cpu, cuda, webgpu, openvino, "),
        (
            ["--provider", "webgpu"],
            "--provider: found webgpu, which makes what it runs when it loads a bundle; run the",
        ),
        (["--compute-capability", "SM89"], "--compute-capability: goes with backend tensorrt-rtx, found onnxruntime"),
    ],
)
def test_an_option_that_does_not_fit_is_refused_and_nothing_is_written(
    program: Any, bundle: Path, tmp_path: Path, arguments: list[str], expected: str
) -> None:
    code, out, err = program("build-engine", bundle, "--output", tmp_path / "new", *arguments)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"lantern-rt: {expected}")
    assert list(tmp_path.iterdir()) == []


def test_a_graph_that_is_gone_or_spoilt_meanwhile_has_no_estimate(bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "tiny"))
    opened = open_bundle(copy)
    for content, expected in (
        (b"\xff\xff", "a number runs past the end"),
        (None, "No such file or directory"),
    ):
        (copy / "drafter.onnx").unlink() if content is None else (copy / "drafter.onnx").write_bytes(content)
        with refused(BundleError, f"{copy / 'drafter.onnx'}: expected an ONNX graph, found {expected}"):
            estimate(opened, PLAIN)


def test_a_build_needs_a_goal(program: Any, bundle: Path) -> None:
    code, out, err = program("build-engine", bundle)
    assert (code, out) == (2, "")
    assert err.startswith("lantern-rt: found no --output, expected a folder")


def test_only_engine_folders_are_replaced_and_only_with_force(bundle: Path, engines: Path, tmp_path: Path) -> None:
    opened = open_bundle(bundle)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("chapter 1")
    for goal, force, expected in (
        (engines, False, "is there already; choose another name, or --force"),
        (tmp_path / "mine", True, "is no engine folder, so --force does not replace it"),
        (tmp_path / "mine" / "thesis.txt" / "where", False, "cannot be written (Not a directory)"),
    ):
        with refused(OutputError, f"{goal}: {expected}"):
            build_engines(opened, "tiny", PLAIN, goal, force, silent)


def test_a_build_that_fails_leaves_nothing_and_keeps_what_was_there(
    bundle: Path, engines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in engines.iterdir()}

    def fail(**fields: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(build_module, "EngineManifest", fail)  # after every graph was built
    with pytest.raises(KeyboardInterrupt):
        build_engines(open_bundle(bundle), "tiny", PLAIN, engines, True, silent)
    assert {path.name: path.read_bytes() for path in engines.iterdir()} == before
    assert [path.name for path in engines.parent.iterdir()] == ["engines"]
