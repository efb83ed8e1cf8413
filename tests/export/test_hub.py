"""Tests that read checkpoints and bundles from a local stand-in for the model hub, and that push bundles."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import stand_in_hub
import torch
from goldens import DATA, read_manifest
from safetensors.torch import save
from stand_in_hub import (
    COMMIT,
    OLD_COMMIT,
    PUBLIC_REPOSITORIES,
    REPLACED_HEADERS,
    REPOSITORIES,
    HubRequestHandler,
    environment,
    run,
    serve_hub,
)
from tiny_bundle import make_tiny_bundle

from lantern_rt.bundle.files import open_bundle
from lantern_rt.bundle.hub import parse_hub_reference
from lantern_rt.errors import CheckpointError
from lantern_rt.export.checkpoints.hub import fetch_checkpoint, find_hub_reference

pytest.importorskip("huggingface_hub")
INDEX = {"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}}
LAYER = "base_model.model.model.layers.0.self_attn.o_proj"
ADAPTER = {f"{LAYER}.lora_A.weight": torch.ones(1, 64), f"{LAYER}.lora_B.weight": torch.ones(64, 1)}
# By repository and file name.
INITIAL_REPOSITORIES: dict[str, dict[str, bytes]] = {
    "owner/style": {
        "adapter_config.json": b'{"peft_type": "LORA", "r": 1, "lora_alpha": 1}',
        "adapter_model.safetensors": save(ADAPTER),
    },
    "owner/target": {
        name: (DATA / "lantern-llamagen-hf/c2i" / name).read_bytes() for name in ("config.json", "model.safetensors")
    }
    | {"pytorch_model.bin": b"never fetched", "README.md": b"nor this"},
    "owner/files": {"vq/vq_tiny.pt": (DATA / "llamagen-vq/vq_tiny.pt").read_bytes(), "other.pt": b"not asked for"},
    "owner/folders": {
        f"tokenizer/{name}": b"weights" for name in ("model.safetensors", "model_1.safetensors", "optimizer.bin")
    },
    "owner/shards": {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "model.safetensors.index.json": json.dumps(INDEX).encode(),
        "model-1.safetensors": b"one",
        "model-2.safetensors": b"two",
    },
}
# Fetches checkpoints. Prints a line of JSON for each: the path and the references of the files, or the error.
FETCH = """
import json, sys
from lantern_rt.errors import LanternError
from lantern_rt.export.checkpoints.hub import find_hub_reference, fetch_checkpoint
for reference in sys.argv[1:]:
    try:
        path = fetch_checkpoint(reference)
        files = sorted(path.iterdir() if path.is_dir() else [path])
        print(json.dumps([str(path), [find_hub_reference(file) for file in files]]))
    except LanternError as error:
        print(json.dumps([error.field, str(error)]))
"""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    REPOSITORIES.update(INITIAL_REPOSITORIES)
    with serve_hub() as address:
        yield address


def fetch(endpoint: str, home: Path, *references: str, code: str = FETCH, **variables: str) -> list[tuple[str, Any]]:
    """Fetch checkpoints; return the path and the file references of each, or the wrong field and the error."""
    process = run(endpoint, home, "-c", code, *references, **variables)
    assert process.returncode == 0, process.stderr
    return [tuple(json.loads(line)) for line in process.stdout.splitlines()]


def test_needed_files_are_fetched_at_one_commit_and_read_without_the_hub(endpoint: str, tmp_path: Path) -> None:
    expected = {
        "hf:owner/target": [f"hf:owner/target/{name}@{COMMIT}" for name in ("config.json", "model.safetensors")],
        "hf:owner/target@v1": [f"hf:owner/target/{name}@{OLD_COMMIT}" for name in ("config.json", "model.safetensors")],
        "hf:owner/files/vq/vq_tiny.pt": [f"hf:owner/files/vq/vq_tiny.pt@{COMMIT}"],
        "hf:owner/folders/tokenizer": [
            f"hf:owner/folders/tokenizer/{name}@{COMMIT}" for name in ("model.safetensors", "model_1.safetensors")
        ],
        "hf:owner/shards": [f"hf:owner/shards/{name}@{COMMIT}" for name in sorted(REPOSITORIES["owner/shards"])],
    }
    fetched = fetch(endpoint, tmp_path, *expected)
    assert [references for _, references in fetched] == [*expected.values()]
    weights = Path(fetched[0][0], "model.safetensors")
    assert weights.read_bytes() == REPOSITORIES["owner/target"]["model.safetensors"]
    uncached = ["hf:owner/shards@v1", "hf:owner/files/other.pt"]
    *offline, shards_error, file_error = fetch("http://127.0.0.1:9", tmp_path, *expected, *uncached)
    assert offline == fetched
    for reference, (field, message) in zip(uncached, (shards_error, file_error), strict=True):
        assert field == reference
        assert "the hub cannot be reached (" in message
        assert message.endswith(" by hand and give its path")


def test_a_missing_repository_revision_or_file_is_rejected(endpoint: str, tmp_path: Path) -> None:
    expected = {
        "hf:owner/nothing": "Repository Not Found",
        "hf:owner/target@v9": "Revision Not Found",
        "hf:owner/files": "expected model.safetensors or alike; name one: hf:owner/files/FILE",
        "hf:owner/files/missing.pt": "no such file, found other.pt, vq/vq_tiny.pt; give one of these",
    }
    for reference, (field, message) in zip(expected, fetch(endpoint, tmp_path, *expected), strict=True):
        assert field == reference
        assert expected[reference] in message


@pytest.mark.slow
def test_an_export_from_the_hub_is_verified_from_the_cache(endpoint: str, tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    arguments = ["--target", "hf:owner/target", "--vq", "hf:owner/files/vq/vq_tiny.pt@v1", "--output", str(output)]
    arguments += ["--lora", "hf:owner/style:0.5"]
    process = run(endpoint, tmp_path / "home", "-m", "lantern_rt", "export", *arguments)
    assert process.returncode == 0, process.stderr
    assert " from the hub; the bundle needs at least " in process.stderr
    assert [(source.role, source.name, source.origin) for source in read_manifest(output).provenance.sources] == [
        ("target_config", "config.json", f"hf:owner/target/config.json@{COMMIT}"),
        ("target", "model.safetensors", f"hf:owner/target/model.safetensors@{COMMIT}"),
        ("lora:0.5", "adapter_model.safetensors", f"hf:owner/style/adapter_model.safetensors@{COMMIT}"),
        ("lora_config", "adapter_config.json", f"hf:owner/style/adapter_config.json@{COMMIT}"),
        ("vq", "vq_tiny.pt", f"hf:owner/files/vq/vq_tiny.pt@{OLD_COMMIT}"),
    ]
    references = ["hf:owner/target", "hf:owner/files/vq/vq_tiny.pt@v1", "hf:owner/style"]
    process = run("http://127.0.0.1:9", tmp_path / "home", "-m", "lantern_rt", "verify", str(output), *references)
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("bundle (fp32) against hf:owner/target\n")


@pytest.mark.parametrize("reference", ["hf:owner/shards", "hf:owner/target"])
def test_a_checkpoint_beyond_the_free_disk_space_is_rejected(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str
) -> None:
    sizes = {name: 10**17 for name in REPOSITORIES[reference.removeprefix("hf:")] if name.endswith(".safetensors")}
    monkeypatch.setattr(stand_in_hub, "LISTED_SIZES", sizes)
    files = ["--target", reference, "--vq", str(DATA / "llamagen-vq/vq_tiny.pt"), "--output", str(tmp_path / "bundle")]
    options = [*files, "--precision", "int4-weights"]
    process = run(endpoint, tmp_path / "home", "-m", "lantern_rt", "export", *options)
    assert (process.returncode, process.stderr.count("\n")) == (2, 1), process.stderr
    # The download has 4 bytes per weight. The bundle, with int4 weights, has 0.625 bytes.
    needed_gigabytes = len(sizes) * 1e8 * (1 + 0.625 / 4)
    assert f"GB free on the disk, expected {needed_gigabytes:.2f} GB; free some, or use another disk" in process.stderr
    assert not [*(tmp_path / "home").rglob("*.safetensors")]


SIZE_PROGRAM = """
from lantern_rt.export.checkpoints.hub import measure_download_size
print(*measure_download_size("hf:owner/target"))
"""


@pytest.mark.parametrize("size", [10**400, "x", -1, True, 0.5, None, [1]])
def test_a_size_of_the_hub_that_is_no_size_counts_as_zero(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: object
) -> None:
    monkeypatch.setattr(stand_in_hub, "LISTED_SIZES", {"model.safetensors": size})
    process = run(endpoint, tmp_path, "-c", SIZE_PROGRAM)
    config_bytes = len(REPOSITORIES["owner/target"]["config.json"])
    assert process.stdout == f"{config_bytes} {config_bytes}\n", process.stderr


@pytest.mark.parametrize("heads_also_fail", [True, False])
def test_a_file_that_the_hub_lacks_is_named_with_the_status(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heads_also_fail: bool
) -> None:
    send_file = HubRequestHandler.send_file

    def send_error(handler: HubRequestHandler, repository: str, revision: str, name: str, has_body: bool) -> None:
        if has_body or heads_also_fail:
            handler.send_json({"error": "unknown"}, 404)
        else:
            send_file(handler, repository, revision, name, has_body)

    monkeypatch.setattr(HubRequestHandler, "send_file", send_error)
    ((field, text),) = fetch(endpoint, tmp_path, "hf:owner/target")
    assert field == "hf:owner/target"
    assert "rejected by the hub (Client error '404 Not Found'" in text


@pytest.mark.parametrize("header", ["ETag", "X-Linked-Etag", "X-Repo-Commit"])
@pytest.mark.parametrize("reference", ["hf:owner/target", "hf:owner/files/other.pt"])  # a folder and a file
def test_headers_of_the_hub_cannot_write_files_outside_the_cache(
    endpoint: str, tmp_path: Path, header: str, reference: str
) -> None:
    repository = "/".join(reference.removeprefix("hf:").split("/")[:2])
    home = tmp_path / "cache" / "home"
    for outside_path in (str(tmp_path / "outside"), "../../../../outside"):
        REPLACED_HEADERS[repository] = {header: f'W/"{outside_path}"' if "tag" in header.lower() else outside_path}
        try:
            fetch(endpoint, home, reference)
        finally:
            REPLACED_HEADERS.pop(repository)
        files = [path for path in tmp_path.rglob("*") if not path.is_dir()]
        assert [path for path in files if "outside" in path.name or not path.resolve().is_relative_to(home)] == []


# Exports a checkpoint whose download blocks forever without returning to Python, as a library in Rust can.
BLOCKED_EXPORT = """
import ctypes, sys
from pathlib import Path
import huggingface_hub
mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
def block(*_, **__):
    Path(sys.argv[1]).touch()
    while True:
        libc.pthread_mutex_lock(mutex)  # the second call waits, and no signal ends the wait
huggingface_hub.hf_hub_download = block
from lantern_rt.cli.main import main
main(["export", "--target", "hf:owner/target", "--vq", "hf:owner/files/vq/vq_tiny.pt", "--output", sys.argv[2]])
"""


@pytest.mark.parametrize(("signal_number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_blocked_download_at_once(
    endpoint: str, tmp_path: Path, signal_number: signal.Signals, exit_code: int
) -> None:
    marker = tmp_path / "download-started"
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED_EXPORT, str(marker), str(tmp_path / "bundle")],
        env=environment(endpoint, tmp_path / "home"), stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    while not marker.exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal_number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == exit_code
    assert "Traceback" not in errors
    assert not (tmp_path / "bundle").exists()


def test_a_hub_that_does_not_respond_is_an_error_after_a_timeout(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent_server:
        address = f"http://127.0.0.1:{silent_server.getsockname()[1]}"
        timeouts = {"HF_HUB_ETAG_TIMEOUT": "1", "HF_HUB_DOWNLOAD_TIMEOUT": "1"}
        code = FETCH.replace(
            "for reference", "from lantern_rt.export.checkpoints import hub; hub._SECONDS = 1\nfor reference"
        )
        ((field, text),) = fetch(address, tmp_path, "hf:owner/target", code=code, **timeouts)
    assert (field, "the hub cannot be reached (timed out)" in text) == ("hf:owner/target", True)


@pytest.mark.parametrize("error_number", [errno.EROFS, errno.ENOSPC])
def test_a_cache_that_cannot_be_written_is_named(endpoint: str, tmp_path: Path, error_number: int) -> None:
    code = (
        f"import os, huggingface_hub\ndef fail(*_, **__): raise OSError({error_number}, os.strerror({error_number}))\n"
    )
    code += f"huggingface_hub.hf_hub_download = fail\n{FETCH}"
    ((field, text),) = fetch(endpoint, tmp_path, "hf:owner/target", code=code)
    assert (field, f"the hub's cache {tmp_path / 'hub'} cannot be written" in text) == ("hf:owner/target", True), text
    assert "HF_HOME" in text


MALFORMED_NAMES = ["hf:", "hf:a", "hf:/a/b", "hf:a/b@", "hf:a/../b", "hf:a/b/../../c", "hf:a/b/ c"]
MALFORMED_REVISIONS = [
    f"hf:owner/target{file}@{name}" for file in ("", "/x.pt") for name in ("../..", "v1/../..", "*", "v 1")
]


@pytest.mark.parametrize("reference", [*MALFORMED_NAMES, *MALFORMED_REVISIONS])
def test_a_malformed_reference_is_rejected(reference: str) -> None:
    with pytest.raises(CheckpointError, match=r"expected hf:owner/name, hf:owner/name/file"):
        fetch_checkpoint(reference)


@pytest.mark.parametrize("revision", ["v1.0", "main", "refs/pr/7", COMMIT])
def test_branches_tags_and_commits_are_valid_revisions(revision: str) -> None:
    assert parse_hub_reference(f"hf:a/b/c.pt@{revision}", CheckpointError) == ("a/b", "c.pt", revision)


def test_fetching_a_local_path_returns_the_path_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.touch()
    assert fetch_checkpoint(path) == path
    assert find_hub_reference(path) is None


# ---------------------------------------------------------------- bundles


class HubCommandLine:
    def __init__(self, endpoint: str, folder: Path) -> None:
        self.endpoint = endpoint
        self.folder = folder

    def __call__(self, *arguments: object, home: str = "home", **variables: str) -> tuple[int, str]:
        """Run a command; return the exit code, and stdout or, after a failure, the last line of stderr."""
        words = ["-m", "lantern_rt", *map(str, arguments)]
        process = run(variables.pop("endpoint", self.endpoint), self.folder / home, *words, **variables)
        return process.returncode, process.stderr.splitlines()[-1] if process.returncode else process.stdout.strip()


@pytest.fixture
def program(endpoint: str, tmp_path: Path) -> Iterator[HubCommandLine]:
    yield HubCommandLine(endpoint, tmp_path)
    REPOSITORIES.pop("owner/pushed", None)


@pytest.mark.slow
def test_a_pushed_bundle_reproduces_a_sample_image(program: HubCommandLine, tmp_path: Path) -> None:
    bundle = open_bundle(make_tiny_bundle(tmp_path / "tiny", "class"))
    assert program("push", bundle.folder, "owner/pushed", HF_TOKEN="hf_token") == (0, f"hf:owner/pushed@{COMMIT}")
    pushed_files = REPOSITORIES["owner/pushed"]
    assert "owner/pushed" not in PUBLIC_REPOSITORIES
    assert {entry.path for entry in bundle.manifest.files.values()} < pushed_files.keys()
    card = pushed_files["README.md"].decode()
    sample = tmp_path / "sample.png"
    assert "lantern-rt run hf:owner/pushed --class-id 0\n" in card
    assert f"digest | {bundle.digest}" in card
    assert "pip install" not in card  # the card does not know the package index
    sample.write_bytes(pushed_files["samples/4.png"])
    arguments = ("run", "hf:owner/pushed@v1", "--from", sample, "--output", tmp_path / "again.png", "--force")
    for variables in ({}, {"endpoint": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}):
        assert program(*arguments, **variables) == (0, str(tmp_path / "again.png"))
        assert (tmp_path / "again.png").read_bytes() == sample.read_bytes()
    code, line = program("eval", "hf:owner/pushed@v1", "--write-presets")
    assert (code, line.endswith("copy the bundle to another folder")) == (2, True)
    code, line = program("run", "hf:owner/pushed@v1", "--class-id", 1, home="other", HF_HUB_OFFLINE="1")
    assert (code, "the hub cannot be reached" in line) == (2, True)


@pytest.mark.slow
def test_a_bundle_of_codes_is_pushed_without_sample_images(
    program: HubCommandLine, glm_image_bundle: Path, tmp_path: Path
) -> None:
    assert program("push", glm_image_bundle, "owner/pushed", HF_TOKEN="hf_token") == (0, f"hf:owner/pushed@{COMMIT}")
    pushed_files = REPOSITORIES["owner/pushed"]
    assert not [name for name in pushed_files if name.startswith("samples/")]
    card = pushed_files["README.md"].decode()
    assert "generates codes" in card
    assert ("--from" in card, 'lantern-rt run hf:owner/pushed "a prompt"' in card) == (False, True)
    code, out = program("run", "hf:owner/pushed@v1", "a fox", "--size", "64x64", "--output", tmp_path / "fox.npz")
    assert (code, out) == (0, str(tmp_path / "fox.npz"))


def test_a_bundle_that_was_changed_on_the_hub_is_rejected(program: HubCommandLine, tmp_path: Path) -> None:
    folder = make_tiny_bundle(tmp_path / "tiny", "class")
    files = REPOSITORIES["owner/pushed"] = {path.name: path.read_bytes() for path in folder.iterdir()}
    graph = files["target.onnx"]
    for changed_files, message in (
        ({"target.onnx": graph[:-1] + bytes([graph[-1] ^ 1])}, "target.onnx: found sha256"),
        ({"target.onnx": graph + b" "}, "bytes, expected"),
        ({"bundle.json": files["bundle.json"].replace(b'"target.onnx"', b'"../target.onnx"')}, "path '../target.onnx'"),
        ({"bundle.json": b"{}"}, "format_version"),
    ):
        REPOSITORIES["owner/pushed"] = files | changed_files
        code, line = program("inspect", "hf:owner/pushed", home=message[:5])
        assert (code, message in line) == (2, True), line


@pytest.mark.slow
def test_errors_of_push_and_of_wrong_references_are_one_line(program: HubCommandLine, tmp_path: Path) -> None:
    folder = make_tiny_bundle(tmp_path / "tiny", "class")
    for path in ("README.md", "samples/1.png", ".git/config", "a b"):
        copied = tmp_path / path.replace("/", "-")
        shutil.copytree(folder, copied)
        (copied / path).parent.mkdir(exist_ok=True)
        (copied / "neighbors.npz").rename(copied / path)
        (copied / "bundle.json").write_text((copied / "bundle.json").read_text().replace("neighbors.npz", path))
        code, line = program("push", copied, "owner/pushed", HF_TOKEN="hf_token")
        assert (code, f"file: found {path!r}, expected a name of letters" in line) == (2, True), line
    foreign_image = tmp_path / "foreign.png"  # an image of another bundle
    other_bundle = make_tiny_bundle(tmp_path / "other", "class", weight_offset=1)
    assert program("run", other_bundle, "--class-id", 1, "--output", foreign_image)
    for arguments, expected in (
        (("push", folder, "owner/pushed"), "owner/pushed: rejected by the hub (Client error '401"),
        (("push", folder, "pushed"), "repository: found 'pushed', expected owner/name"),
        (("push", folder, "owner/pushed", foreign_image), "foreign.png: found bundle"),
        (("inspect", "hf:owner/nothing"), "hf:owner/nothing: rejected by the hub ("),
        (("inspect", "hf:owner/target"), "hf:owner/target: rejected by the hub ("),
        (("inspect", "hf:owner/files/other.pt"), "expected a reference without a file"),
    ):
        code, line = program(*arguments)
        assert (code, expected in line) == (2, True), line
