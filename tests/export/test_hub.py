"""Checkpoints by name, from a stand-in for the hub on this machine; and what is said when there is none."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from goldens import DATA, manifest

from lantern_rt.errors import CheckpointError, EngineError
from lantern_rt.export.checkpoints.hub import cached_origin, fetch

pytest.importorskip("huggingface_hub")
ROOT = Path(__file__).parent.parent.parent
COMMIT, OLD = "a" * 40, "b" * 40
INDEX = {"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}}
REPOSITORIES: dict[str, dict[str, bytes]] = {
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
from lantern_rt.export.checkpoints.hub import cached_origin, fetch
for place in sys.argv[1:]:
    try:
        path = fetch(place)
        files = sorted(path.iterdir() if path.is_dir() else [path])
        print(json.dumps([str(path), [cached_origin(file) for file in files]]))
    except LanternError as error:
        print(json.dumps([error.field, str(error)]))
"""


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's interface as fetching by name uses."""

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"] and parts[4:5] == ["tree"]:
            files = REPOSITORIES["/".join(parts[2:4])].items()
            self.send([{"type": "file", "path": name, "size": len(file), "oid": "0"} for name, file in files])
        elif parts[:2] == ["api", "models"]:
            self.answer_listing("/".join(parts[2:4]), parts[5] if parts[4:5] == ["revision"] else "main")
        elif parts[2:3] == ["resolve"]:
            self.answer_file("/".join(parts[:2]), parts[3], "/".join(parts[4:]), body)
        else:
            self.send({"error": "unknown"}, 404)

    def answer_listing(self, repository: str, revision: str) -> None:
        if repository not in REPOSITORIES:
            self.send({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", "v1", COMMIT, OLD):
            self.send({"error": "Revision not found"}, 404, {"X-Error-Code": "RevisionNotFound"})
        else:
            siblings = [{"rfilename": name, "size": len(file)} for name, file in REPOSITORIES[repository].items()]
            self.send({"id": repository, "sha": commit_of(revision), "siblings": siblings})

    def answer_file(self, repository: str, revision: str, name: str, body: bool) -> None:
        content = REPOSITORIES[repository].get(name)
        if content is None:
            self.send({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit_of(revision))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def send(self, answer: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        for name, value in (
            {"Content-Type": "application/json", "Content-Length": str(len(content))} | (headers or {})
        ).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


def commit_of(revision: str) -> str:
    return {"main": COMMIT, "v1": OLD}.get(revision, revision)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def run(endpoint: str, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A fresh program: `huggingface_hub` reads its settings when it is imported."""
    own = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_XET": "1",
    }
    unset = {"HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"}
    environment = {name: value for name, value in os.environ.items() if name not in unset} | own
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


class Fetches:
    """What fetching gave with the hub, and then without it from the same cache; a program of its own each."""

    there: ClassVar = ["hf:owner/target", "hf:owner/target@v1", "hf:owner/files/vq/vq_tiny.pt", "hf:owner/shards"]
    missing: ClassVar = ["hf:owner/nothing", "hf:owner/target@v9", "hf:owner/files", "hf:owner/files/missing.pt"]
    uncached: ClassVar = ["hf:owner/shards@v1", "hf:owner/files/other.pt"]

    def __init__(self, endpoint: str, home: Path) -> None:
        online = self._fetch(endpoint, home, *self.there, *self.missing)
        offline = self._fetch("http://127.0.0.1:9", home, *self.there, *self.uncached)
        split = len(self.there)
        self.online, self.refused = online[:split], online[split:]
        self.offline, self.refused_offline = offline[:split], offline[split:]

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


def test_what_is_not_there_is_refused(fetches: Fetches) -> None:
    expected = (
        "Repository Not Found",
        "Revision Not Found",
        "found other.pt, vq/vq_tiny.pt, expected model.safetensors or alike; name one: hf:owner/files/FILE",
        "no such file, found other.pt, vq/vq_tiny.pt; give one of these",
    )
    for place, text, (field, said) in zip(Fetches.missing, expected, fetches.refused, strict=True):
        assert field == place
        assert text in said


def test_what_is_in_no_cache_can_be_downloaded_by_hand(fetches: Fetches) -> None:
    for place, (field, text) in zip(Fetches.uncached, fetches.refused_offline, strict=True):
        assert field == place
        assert "the hub cannot be reached (" in text
        assert text.endswith(" by hand and give its path")


@pytest.mark.slow
def test_the_command_line_exports_from_the_hub_pins_the_commit_and_verifies_from_the_cache(
    endpoint: str, tmp_path: Path
) -> None:
    output = tmp_path / "bundle"
    arguments = ["--target", "hf:owner/target", "--vq", "hf:owner/files/vq/vq_tiny.pt@v1", "--output", str(output)]
    done = run(endpoint, tmp_path / "home", "-m", "lantern_rt", "export", *arguments)
    assert done.returncode == 0, done.stderr
    assert [(source.role, source.name, source.origin) for source in manifest(output).provenance.sources] == [
        ("target", "model.safetensors", f"hf:owner/target/model.safetensors@{COMMIT}"),
        ("target_config", "config.json", f"hf:owner/target/config.json@{COMMIT}"),
        ("vq", "vq_tiny.pt", f"hf:owner/files/vq/vq_tiny.pt@{OLD}"),
    ]
    places = ["hf:owner/target", "hf:owner/files/vq/vq_tiny.pt@v1"]
    verified = run("http://127.0.0.1:9", tmp_path / "home", "-m", "lantern_rt", "verify", str(output), *places)
    assert verified.returncode == 0, verified.stderr
    assert verified.stdout.startswith("bundle (fp32) against hf:owner/target\n")


@pytest.mark.parametrize("text", ["hf:", "hf:a", "hf:/a/b", "hf:a/b@", "hf:a/../b", "hf:a/b/../../c", "hf:a/b/ c"])
def test_a_malformed_reference_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"expected hf:owner/name, hf:owner/name/file"):
        fetch(text)


def test_a_plain_path_is_left_alone(tmp_path: Path) -> None:
    assert fetch(tmp_path / "x.pt") == tmp_path / "x.pt"
    assert cached_origin(fetch("models/x.pt")) is None


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EngineError, match=r"vq\.pt: huggingface_hub is not installed; run `pip install "):
        fetch("hf:owner/files/vq.pt")
