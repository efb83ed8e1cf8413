"""Read checkpoints and bundles by name from a stand-in for the hub on this machine; check messages without a hub."""

from __future__ import annotations

import errno
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import stand_in_hub
import torch
from goldens import DATA, read_manifest
from safetensors.torch import save
from stand_in_hub import COMMIT, HEADERS, OLD, PUBLIC, REPOSITORIES, Hub, environment, run, serve_hub
from tiny_bundle import make_tiny_bundle

from lantern_rt.bundle.files import open_bundle
from lantern_rt.bundle.hub import parse_hub_reference
from lantern_rt.errors import CheckpointError
from lantern_rt.export.checkpoints.hub import fetch_checkpoint, find_hub_reference

pytest.importorskip("huggingface_hub")
INDEX = {"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}}
LAYER = "base_model.model.model.layers.0.self_attn.o_proj"
ADAPTER = {f"{LAYER}.lora_A.weight": torch.ones(1, 64), f"{LAYER}.lora_B.weight": torch.ones(64, 1)}
OWNED: dict[str, dict[str, bytes]] = {
    "owner/style": {
        "adapter_config.json": b'{"peft_type": "LORA", "r": 1, "lora_alpha": 1}',
        "adapter_model.safetensors": save(ADAPTER),
    },
    "owner/target": {
        name: (DATA / "lantern-llamagen-hf/c2i" / name).read_bytes() for name in ("config.json", "model.safetensors")
    }
    | {"pytorch_model.bin": b"never fetched", "README.md": b"nor this"},
    "owner/files": {"vq/vq_tiny.pt": (DATA / "llamagen-vq/vq_tiny.pt").read_bytes(), "other.pt": b"not asked for"},
    "owner/shards": {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "model.safetensors.index.json": json.dumps(INDEX).encode(),
        "model-1.safetensors": b"one",
        "model-2.safetensors": b"two",
    },
}
FETCH = """
import json, sys
from lantern_rt.errors import LanternError
from lantern_rt.export.checkpoints.hub import find_hub_reference, fetch_checkpoint
for place in sys.argv[1:]:
    try:
        path = fetch_checkpoint(place)
        files = sorted(path.iterdir() if path.is_dir() else [path])
        print(json.dumps([str(path), [find_hub_reference(file) for file in files]]))
    except LanternError as error:
        print(json.dumps([error.field, str(error)]))
"""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    REPOSITORIES.update(OWNED)
    with serve_hub() as address:
        yield address


class Fetches:
    """Results of fetching with the hub, and then without it from the same cache, each in a fresh program."""

    known_references: ClassVar = [
        "hf:owner/target",
        "hf:owner/target@v1",
        "hf:owner/files/vq/vq_tiny.pt",
        "hf:owner/shards",
    ]
    missing_references: ClassVar = [
        "hf:owner/nothing",
        "hf:owner/target@v9",
        "hf:owner/files",
        "hf:owner/files/missing.pt",
    ]
    uncached_references: ClassVar = ["hf:owner/shards@v1", "hf:owner/files/other.pt"]

    def __init__(self, endpoint: str, home: Path) -> None:
        online = self._fetch(endpoint, home, *self.known_references, *self.missing_references)
        offline = self._fetch("http://127.0.0.1:9", home, *self.known_references, *self.uncached_references)
        split = len(self.known_references)
        self.online = online[:split]
        self.refused = online[split:]
        self.offline = offline[:split]
        self.refused_offline = offline[split:]

    def _fetch(self, endpoint: str, home: Path, *places: str) -> list[tuple[str, Any]]:
        done = run(endpoint, home, "-c", FETCH, *places)
        assert done.returncode == 0, done.stderr
        return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def fetches(endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Fetches:
    return Fetches(endpoint, tmp_path_factory.mktemp("hub"))


def test_what_an_exporter_reads_is_fetched_at_one_commit_and_nothing_else(fetches: Fetches) -> None:
    assert [origins for _, origins in fetches.online] == [
        [f"hf:owner/target/config.json@{COMMIT}", f"hf:owner/target/model.safetensors@{COMMIT}"],
        [f"hf:owner/target/config.json@{OLD}", f"hf:owner/target/model.safetensors@{OLD}"],
        [f"hf:owner/files/vq/vq_tiny.pt@{COMMIT}"],
        [f"hf:owner/shards/{name}@{COMMIT}" for name in sorted(REPOSITORIES["owner/shards"])],
    ]
    weights = Path(fetches.online[0][0], "model.safetensors")
    assert weights.read_bytes() == REPOSITORIES["owner/target"]["model.safetensors"]


def test_what_was_fetched_once_is_there_without_the_hub(fetches: Fetches) -> None:
    assert fetches.offline == fetches.online


def test_what_is_not_there_is_rejected(fetches: Fetches) -> None:
    expected = (
        "Repository Not Found",
        "Revision Not Found",
        "found other.pt, vq/vq_tiny.pt, expected model.safetensors or alike; name one: hf:owner/files/FILE",
        "no such file, found other.pt, vq/vq_tiny.pt; give one of these",
    )
    for place, text, (field, message) in zip(Fetches.missing_references, expected, fetches.refused, strict=True):
        assert field == place
        assert text in message


def test_what_is_in_no_cache_can_be_downloaded_by_hand(fetches: Fetches) -> None:
    for place, (field, text) in zip(Fetches.uncached_references, fetches.refused_offline, strict=True):
        assert field == place
        assert "the hub cannot be reached (" in text
        assert text.endswith(" by hand and give its path")


@pytest.mark.slow
def test_the_command_line_exports_from_the_hub_pins_the_commit_and_verifies_from_the_cache(
    endpoint: str, tmp_path: Path
) -> None:
    output = tmp_path / "bundle"
    arguments = ["--target", "hf:owner/target", "--vq", "hf:owner/files/vq/vq_tiny.pt@v1", "--output", str(output)]
    arguments += ["--lora", "hf:owner/style:0.5"]
    done = run(endpoint, tmp_path / "home", "-m", "lantern_rt", "export", *arguments)
    assert done.returncode == 0, done.stderr
    assert " from the hub; the bundle needs at least " in done.stderr
    assert [(source.role, source.name, source.origin) for source in read_manifest(output).provenance.sources] == [
        ("target_config", "config.json", f"hf:owner/target/config.json@{COMMIT}"),
        ("target", "model.safetensors", f"hf:owner/target/model.safetensors@{COMMIT}"),
        ("lora:0.5", "adapter_model.safetensors", f"hf:owner/style/adapter_model.safetensors@{COMMIT}"),
        ("lora_config", "adapter_config.json", f"hf:owner/style/adapter_config.json@{COMMIT}"),
        ("vq", "vq_tiny.pt", f"hf:owner/files/vq/vq_tiny.pt@{OLD}"),
    ]
    places = ["hf:owner/target", "hf:owner/files/vq/vq_tiny.pt@v1", "hf:owner/style"]
    verified = run("http://127.0.0.1:9", tmp_path / "home", "-m", "lantern_rt", "verify", str(output), *places)
    assert verified.returncode == 0, verified.stderr
    assert verified.stdout.startswith("bundle (fp32) against hf:owner/target\n")


@pytest.mark.parametrize("place", ["hf:owner/shards", "hf:owner/target"])
def test_a_checkpoint_for_which_the_disk_has_no_room_is_rejected_before_its_download(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    sizes = {name: 10**17 for name in REPOSITORIES[place[3:]] if name.endswith(".safetensors")}
    monkeypatch.setattr(stand_in_hub, "SIZES", sizes)
    arguments = ["--target", place, "--vq", str(DATA / "llamagen-vq/vq_tiny.pt"), "--output", str(tmp_path / "bundle")]
    arguments += ["--precision", "int4-weights"]
    done = run(endpoint, tmp_path / "home", "-m", "lantern_rt", "export", *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    whole = len(sizes) * 1e8 * (1 + 0.625 / 4)  # download and bundle of float32 numbers, GB
    assert f"GB free on the disk, expected {whole:.2f} GB; free some, choose" in done.stderr
    assert not [*(tmp_path / "home").rglob("*.safetensors")]


@pytest.mark.parametrize("bodies", [True, False])
def test_a_hub_that_lists_files_which_it_does_not_have_is_told_in_a_line(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bodies: bool
) -> None:
    answer_file = Hub.answer_file

    def refuse(hub: Hub, repository: str, revision: str, name: str, body: bool) -> None:
        if body or not bodies:
            hub.send({"error": "unknown"}, 404)
        else:
            answer_file(hub, repository, revision, name, body)

    monkeypatch.setattr(Hub, "answer_file", refuse)
    done = run(endpoint, tmp_path, "-c", FETCH, "hf:owner/target")
    field, text = json.loads(done.stdout)
    assert field == "hf:owner/target"
    assert "rejected by the hub (Client error '404 Not Found'" in text


@pytest.mark.parametrize("header", ["ETag", "X-Linked-Etag", "X-Repo-Commit"])
@pytest.mark.parametrize("reference", ["hf:owner/target", "hf:owner/files/other.pt", "hf:owner/shards"])
def test_a_hub_names_no_file_outside_the_cache(endpoint: str, tmp_path: Path, header: str, reference: str) -> None:
    repository = "/".join(reference.removeprefix("hf:").split("/")[:2])
    home = tmp_path / "cache" / "home"
    for target in (str(tmp_path / "outside"), "../../../../outside"):
        HEADERS[repository] = {header: f'W/"{target}"' if "tag" in header.lower() else target}
        try:
            done = run(endpoint, home, "-c", FETCH, reference)
        finally:
            HEADERS.pop(repository)
        assert done.returncode == 0, done.stderr
        files = [path for path in tmp_path.rglob("*") if not path.is_dir()]
        assert [path for path in files if "outside" in path.name or not path.resolve().is_relative_to(home)] == []


# Exports with a download that, like a library in Rust, returns to Python only when it is done: here, never.
BLOCKED = """
import ctypes, sys
from pathlib import Path
import huggingface_hub
mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
def block(*_, **__):
    Path(sys.argv[1]).touch()
    while True:
        libc.pthread_mutex_lock(mutex)  # the second time waits, and no signal ends the wait
huggingface_hub.hf_hub_download = block
from lantern_rt.cli.main import main
main(["export", "--target", "hf:owner/target", "--vq", "hf:owner/files/vq/vq_tiny.pt", "--output", sys.argv[2]])
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_download_at_once(endpoint: str, tmp_path: Path, number: signal.Signals, code: int) -> None:
    marker = tmp_path / "asked"
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED, str(marker), str(tmp_path / "bundle")],
        env=environment(endpoint, tmp_path / "home"), stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    while not marker.exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code
    assert "Traceback" not in errors
    assert not (tmp_path / "bundle").exists()


def test_a_silent_hub_is_told_in_a_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        limits = {"HF_HUB_ETAG_TIMEOUT": "1", "HF_HUB_DOWNLOAD_TIMEOUT": "1"}
        code = FETCH.replace("for place", "from lantern_rt.export.checkpoints import hub; hub._SECONDS = 1\nfor place")
        done = run(address, tmp_path, "-c", code, "hf:owner/target", **limits)
    field, text = json.loads(done.stdout)
    assert (field, "the hub cannot be reached (timed out)" in text) == ("hf:owner/target", True)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_cache_that_cannot_be_written_is_named_as_that(endpoint: str, tmp_path: Path, number: int) -> None:
    code = f"import os, huggingface_hub\ndef fail(*_, **__): raise OSError({number}, os.strerror({number}))\n"
    done = run(endpoint, tmp_path, "-c", f"{code}huggingface_hub.hf_hub_download = fail\n{FETCH}", "hf:owner/target")
    field, text = json.loads(done.stdout)
    assert (field, f"the hub's cache {tmp_path / 'hub'} cannot be written" in text) == ("hf:owner/target", True), text
    assert "HF_HOME" in text


MALFORMED = ["hf:", "hf:a", "hf:/a/b", "hf:a/b@", "hf:a/../b", "hf:a/b/../../c", "hf:a/b/ c"]
ELSEWHERE = [f"hf:owner/target{file}@{name}" for file in ("", "/x.pt") for name in ("../..", "v1/../..", "*", "v 1")]


@pytest.mark.parametrize("text", [*MALFORMED, *ELSEWHERE])
def test_a_malformed_reference_is_rejected(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"expected hf:owner/name, hf:owner/name/file"):
        fetch_checkpoint(text)


@pytest.mark.parametrize("revision", ["v1.0", "main", "refs/pr/7", COMMIT])
def test_a_revision_is_a_branch_a_tag_or_a_commit(revision: str) -> None:
    assert parse_hub_reference(f"hf:a/b/c.pt@{revision}", CheckpointError) == ("a/b", "c.pt", revision)


def test_a_plain_path_is_left_alone(tmp_path: Path) -> None:
    assert fetch_checkpoint(tmp_path / "x.pt") == tmp_path / "x.pt"
    assert find_hub_reference(fetch_checkpoint("models/x.pt")) is None


# ---------------------------------------------------------------- bundles


class Program:
    """The command line, in a folder, with the hub."""

    def __init__(self, endpoint: str, folder: Path) -> None:
        self.endpoint = endpoint
        self.folder = folder

    def __call__(self, *arguments: object, home: str = "home", **variables: str) -> tuple[int, str]:
        """Return the exit code, and stdout or, after a failure, the last line of stderr."""
        words = ["-m", "lantern_rt", *map(str, arguments)]
        done = run(variables.pop("endpoint", self.endpoint), self.folder / home, *words, **variables)
        return done.returncode, done.stderr.splitlines()[-1] if done.returncode else done.stdout.strip()


@pytest.fixture
def program(endpoint: str, tmp_path: Path) -> Iterator[Program]:
    yield Program(endpoint, tmp_path)
    REPOSITORIES.pop("owner/pushed", None)


@pytest.mark.slow
def test_a_pushed_bundle_draws_its_cards_images_elsewhere_and_without_the_hub(program: Program, tmp_path: Path) -> None:
    bundle = open_bundle(make_tiny_bundle(tmp_path / "tiny", "class"))
    assert program("push", bundle.folder, "owner/pushed", HF_TOKEN="hf_token") == (0, f"hf:owner/pushed@{COMMIT}")
    pushed_files = REPOSITORIES["owner/pushed"]
    assert "owner/pushed" not in PUBLIC
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
def test_a_bundle_of_codes_is_pushed_without_images(program: Program, glm_image_bundle: Path, tmp_path: Path) -> None:
    assert program("push", glm_image_bundle, "owner/pushed", HF_TOKEN="hf_token") == (0, f"hf:owner/pushed@{COMMIT}")
    pushed_files = REPOSITORIES["owner/pushed"]
    assert not [name for name in pushed_files if name.startswith("samples/")]
    card = pushed_files["README.md"].decode()
    assert "draws codes" in card
    assert ("--from" in card, 'lantern-rt run hf:owner/pushed "a prompt"' in card) == (False, True)
    code, out = program("run", "hf:owner/pushed@v1", "a fox", "--size", "64x64", "--output", tmp_path / "fox.npz")
    assert (code, out) == (0, str(tmp_path / "fox.npz"))


def test_what_somebody_changed_on_the_hub_is_rejected(program: Program, tmp_path: Path) -> None:
    folder = make_tiny_bundle(tmp_path / "tiny", "class")
    files = REPOSITORIES["owner/pushed"] = {path.name: path.read_bytes() for path in folder.iterdir()}
    original = files["target.onnx"]
    for changed_files, message in (
        ({"target.onnx": original[:-1] + bytes([original[-1] ^ 1])}, "target.onnx: found sha256"),
        ({"target.onnx": original + b" "}, "bytes, expected"),
        ({"bundle.json": files["bundle.json"].replace(b'"target.onnx"', b'"../target.onnx"')}, "path '../target.onnx'"),
        ({"bundle.json": b"{}"}, "format_version"),
    ):
        REPOSITORIES["owner/pushed"] = files | changed_files
        code, line = program("inspect", "hf:owner/pushed", home=message[:5])
        assert (code, message in line) == (2, True), line


@pytest.mark.slow
def test_rejections_of_the_hub_are_told_in_a_line(program: Program, tmp_path: Path) -> None:
    folder = make_tiny_bundle(tmp_path / "tiny", "class")
    stranger = tmp_path / "stranger.png"
    assert program(
        "run", make_tiny_bundle(tmp_path / "other", "class", damage=1), "--class-id", 1, "--output", stranger
    )
    for arguments, expected in (
        (("push", folder, "owner/pushed"), "owner/pushed: rejected by the hub (Client error '401"),
        (("push", folder, "pushed"), "repository: found 'pushed', expected owner/name"),
        (("push", folder, "owner/pushed", stranger), "stranger.png: found bundle"),
        (("inspect", "hf:owner/nothing"), "hf:owner/nothing: rejected by the hub ("),
        (("inspect", "hf:owner/target"), "hf:owner/target: rejected by the hub ("),
        (("inspect", "hf:owner/files/other.pt"), "expected a reference without a file"),
    ):
        code, line = program(*arguments)
        assert (code, expected in line) == (2, True), line
