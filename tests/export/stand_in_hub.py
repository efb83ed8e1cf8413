"""A stand-in for the model hub on this machine, and programs that use it."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
COMMIT = "a" * 40
OLD = "b" * 40
REPOSITORIES: dict[str, dict[str, bytes]] = {}
UPLOADED: dict[str, bytes] = {}
PUBLIC: set[str] = set()  # repositories that were created for all to read
HEADERS: dict[str, dict[str, str]] = {}  # replaced headers of a repository's files
SIZES: dict[str, int] = {}  # replaced sizes in the hub's list, by file name
COMPLETED: Counter[str] = Counter()  # bytes of files that were sent whole, by repository
STALLED: set[str] = set()  # names of files that are sent by half, once, before the hub falls silent


class Hub(BaseHTTPRequestHandler):
    """Answers the hub's requests that fetching and pushing need."""

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        UPLOADED[hashlib.sha256(content).hexdigest()] = content
        self.send({})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        path_parts = self.path.strip("/").split("/")
        repository = "/".join(path_parts[2:4])
        if self.headers["Authorization"] != "Bearer hf_token":
            self.send({"error": "Invalid username or password."}, 401)
        elif self.path == "/api/repos/create":
            request = json.loads(body)
            repository_name = f"{request['organization']}/{request['name']}"
            PUBLIC.discard(repository_name)
            if not (request.get("private") or request.get("visibility") == "private"):
                PUBLIC.add(repository_name)
            REPOSITORIES.setdefault(repository_name, {})
            self.send({"url": f"http://{self.headers['Host']}/owner/pushed"})
        elif self.path == "/api/validate-yaml":
            self.send({"errors": [], "warnings": []})
        elif path_parts[4:5] == ["preupload"]:
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = {name: "regular" if name.endswith((".json", ".md")) else "lfs" for name in names}
            self.send({"files": [{"path": n, "uploadMode": modes[n], "shouldIgnore": False} for n in names]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            upload = {"upload": {"href": f"http://{self.headers['Host']}/upload"}}
            self.send({"objects": [lfs_object | {"actions": upload} for lfs_object in json.loads(body)["objects"]]})
        elif path_parts[4:5] == ["commit"]:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    REPOSITORIES[repository][value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    REPOSITORIES[repository][value["path"]] = UPLOADED[value["oid"]]
            self.send({"commitUrl": f"http://{self.headers['Host']}/{repository}/commit/{COMMIT}", "commitOid": COMMIT})
        else:
            self.send({"error": "unknown"}, 404)

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
            files = REPOSITORIES[repository].items()
            siblings = [{"rfilename": name, "size": SIZES.get(name, len(file))} for name, file in files]
            commit = HEADERS.get(repository, {}).get("X-Repo-Commit", commit_of(revision))
            self.send({"id": repository, "sha": commit, "siblings": siblings})

    def answer_file(self, repository: str, revision: str, name: str, body: bool) -> None:
        files = REPOSITORIES.get(f"{repository}@{revision}", REPOSITORIES.get(repository, {}))
        content = files.get(name)
        if content is None:
            self.send({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": commit_of(revision)}
        for header, value in (headers | HEADERS.get(repository, {})).items():
            self.send_header(header, value)
        self.end_headers()
        if body and name in STALLED:
            self.wfile.write(content[: len(content) // 2])
            STALLED.discard(name)
            time.sleep(600)
        elif body:
            self.wfile.write(content)
            COMPLETED[repository] += len(content)

    def send(self, content_object: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(content_object).encode()
        self.send_response(status)
        for name, value in (
            {"Content-Type": "application/json", "Content-Length": str(len(content))} | (headers or {})
        ).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


def commit_of(revision: str) -> str:
    return {"main": COMMIT, "v1": OLD}.get(revision, revision)


@contextmanager
def serve_hub() -> Iterator[str]:
    """Serve `REPOSITORIES`. Yields: the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def environment(endpoint: str, home: Path, **further: str) -> dict[str, str]:
    """Return the environment of a program that uses the hub at `endpoint`, and the cache in `home`."""
    settings = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_XET": "1",
    }
    unset = {"HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"}
    return {name: value for name, value in os.environ.items() if name not in unset} | settings | further


def run(endpoint: str, home: Path, *arguments: str, **further: str) -> subprocess.CompletedProcess[str]:
    """Run a fresh program: `huggingface_hub` reads its settings when it is imported."""
    variables = environment(endpoint, home, **further)
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
