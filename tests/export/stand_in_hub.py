"""A local HTTP server that stands in for the model hub, and functions that run programs with this server."""

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
COMMIT = "a" * 40  # commit of the branch `main`
OLD_COMMIT = "b" * 40  # commit of the tag `v1`
REPOSITORIES: dict[str, dict[str, bytes]] = {}  # file contents by repository and file name
UPLOADED_FILES: dict[str, bytes] = {}  # contents of files uploaded with Git LFS, by SHA-256
PUBLIC_REPOSITORIES: set[str] = set()  # repositories that were created as public
REPLACED_HEADERS: dict[str, dict[str, str]] = {}  # response headers to replace, by repository and header
LISTED_SIZES: dict[str, int] = {}  # sizes to report in the listing instead of the true sizes, by file name
COMPLETED_BYTES: Counter[str] = Counter()  # bytes of completely sent files, by repository
STALLING_FILES: set[str] = set()  # names of files whose next download stalls after half of the bytes


class HubRequestHandler(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.handle_read(has_body=False)

    def do_GET(self) -> None:
        self.handle_read(has_body=True)

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        UPLOADED_FILES[hashlib.sha256(content).hexdigest()] = content
        self.send_json({})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        path_parts = self.path.strip("/").split("/")
        repository = "/".join(path_parts[2:4])
        if self.headers["Authorization"] != "Bearer hf_token":
            self.send_json({"error": "Invalid username or password."}, 401)
        elif self.path == "/api/repos/create":
            request = json.loads(body)
            repository_name = f"{request['organization']}/{request['name']}"
            PUBLIC_REPOSITORIES.discard(repository_name)
            if not (request.get("private") or request.get("visibility") == "private"):
                PUBLIC_REPOSITORIES.add(repository_name)
            REPOSITORIES.setdefault(repository_name, {})
            self.send_json({"url": f"http://{self.headers['Host']}/owner/pushed"})
        elif self.path == "/api/validate-yaml":
            self.send_json({"errors": [], "warnings": []})
        elif path_parts[4:5] == ["preupload"]:
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = {name: "regular" if name.endswith((".json", ".md")) else "lfs" for name in names}
            self.send_json({"files": [{"path": n, "uploadMode": modes[n], "shouldIgnore": False} for n in names]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            upload = {"upload": {"href": f"http://{self.headers['Host']}/upload"}}
            self.send_json(
                {"objects": [lfs_object | {"actions": upload} for lfs_object in json.loads(body)["objects"]]}
            )
        elif path_parts[4:5] == ["commit"]:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    REPOSITORIES[repository][value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    REPOSITORIES[repository][value["path"]] = UPLOADED_FILES[value["oid"]]
            self.send_json(
                {"commitUrl": f"http://{self.headers['Host']}/{repository}/commit/{COMMIT}", "commitOid": COMMIT}
            )
        else:
            self.send_json({"error": "unknown"}, 404)

    def handle_read(self, has_body: bool) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"] and parts[4:5] == ["tree"]:
            files = REPOSITORIES["/".join(parts[2:4])].items()
            self.send_json([{"type": "file", "path": name, "size": len(file), "oid": "0"} for name, file in files])
        elif parts[:2] == ["api", "models"]:
            self.send_listing("/".join(parts[2:4]), parts[5] if parts[4:5] == ["revision"] else "main")
        elif parts[2:3] == ["resolve"]:
            self.send_file("/".join(parts[:2]), parts[3], "/".join(parts[4:]), has_body)
        else:
            self.send_json({"error": "unknown"}, 404)

    def send_listing(self, repository: str, revision: str) -> None:
        if repository not in REPOSITORIES:
            self.send_json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", "v1", COMMIT, OLD_COMMIT):
            self.send_json({"error": "Revision not found"}, 404, {"X-Error-Code": "RevisionNotFound"})
        else:
            files = REPOSITORIES[repository].items()
            siblings = [{"rfilename": name, "size": LISTED_SIZES.get(name, len(file))} for name, file in files]
            commit = REPLACED_HEADERS.get(repository, {}).get("X-Repo-Commit", get_commit(revision))
            self.send_json({"id": repository, "sha": commit, "siblings": siblings})

    def send_file(self, repository: str, revision: str, name: str, has_body: bool) -> None:
        files = REPOSITORIES.get(f"{repository}@{revision}", REPOSITORIES.get(repository, {}))
        content = files.get(name)
        if content is None:
            self.send_json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": get_commit(revision)}
        for header, value in (headers | REPLACED_HEADERS.get(repository, {})).items():
            self.send_header(header, value)
        self.end_headers()
        if has_body and name in STALLING_FILES:
            self.wfile.write(content[: len(content) // 2])
            STALLING_FILES.discard(name)
            time.sleep(600)  # longer than any test waits
        elif has_body:
            self.wfile.write(content)
            COMPLETED_BYTES[repository] += len(content)

    def send_json(self, content_object: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(content_object).encode()
        self.send_response(status)
        for name, value in (
            {"Content-Type": "application/json", "Content-Length": str(len(content))} | (headers or {})
        ).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


def get_commit(revision: str) -> str:
    """Return the commit of `main` or `v1`; other revisions are commits already."""
    return {"main": COMMIT, "v1": OLD_COMMIT}.get(revision, revision)


@contextmanager
def serve_hub() -> Iterator[str]:
    """Serve `REPOSITORIES` on a free port and yield the address, `http://127.0.0.1:PORT`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubRequestHandler)
    server.daemon_threads = True
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def environment(endpoint: str, home: Path, **further: str) -> dict[str, str]:
    settings = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_XET": "1",
    }
    omitted_variables = {
        "HF_HUB_OFFLINE",
        "HF_TOKEN",
        "HF_HUB_CACHE",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "http_proxy",
        "https_proxy",
    }
    return {name: value for name, value in os.environ.items() if name not in omitted_variables} | settings | further


def run(endpoint: str, home: Path, *arguments: str, **further: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a new process, since `huggingface_hub` reads its settings when it is imported."""
    variables = environment(endpoint, home, **further)
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
