"""Run a real server in a separate process, and talk bare HTTP to it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

GENERATIONS = "/v1/images/generations"
EDITS = "/v1/images/edits"
FORM = "multipart/form-data; boundary=x"


class RunningServer:
    """Runs `lantern-rt serve` with these arguments, on `port` or a free one; `log` is what it has written."""

    root = ""  # prefix of all paths

    def __init__(self, folder: Path, *arguments: object, port: int = 0) -> None:
        self._log = folder / f"serve-{time.monotonic_ns()}.log"
        command = [sys.executable, "-m", "lantern_rt", "serve", *map(str, arguments), "--port", str(port)]
        with self._log.open("wb") as log:
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            self.process = subprocess.Popen(command, stderr=log, stdout=log, env=environment)
        self.url = self._wait_for(r"(http://\S+)")
        self.address = urlsplit(self.url).netloc

    @property
    def log(self) -> str:
        return self._log.read_text("utf-8")

    def request_lines(self) -> list[dict[str, Any]]:
        """Return the lines logged about requests; a line that is still being written is left out."""
        return [line for line in map(json.loads, self.log.split("\n")[:-1]) if line["message"] == "request"]

    def _wait_for(self, pattern: str, seconds: float = 60.0) -> str:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            if match := re.search(pattern, self.log):
                return match[1]
            time.sleep(0.02)
        raise AssertionError(f"{pattern} is not in {self.log!r}")

    def wait_until_ready(self) -> RunningServer:
        wait_until(lambda: self.get("/readyz")[0] == 200)
        return self

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Return the status, the headers with lower-case names, and the body."""
        connection = http.client.HTTPConnection(self.address, timeout=60)
        try:
            connection.request(method, self.root + path, body, headers or {})
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        status, answer_headers, body = self.request("GET", path, headers=headers)
        return status, json.loads(body) if answer_headers.get("content-type") == "application/json" else body.decode()

    def post(self, content: Any, **headers: str) -> tuple[int, Any]:
        """Request images; return the status and the answer."""
        headers = {"content-type": "application/json", **headers}
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        status, _, response = self.request("POST", GENERATIONS, body, headers)
        return status, json.loads(response)

    @contextmanager
    def open(self, content: dict[str, Any]) -> Iterator[http.client.HTTPConnection]:
        """Open a connection and request images on it; leaving the context closes it."""
        connection = http.client.HTTPConnection(self.address, timeout=60)
        try:
            headers = {"content-type": "application/json"}
            connection.request("POST", self.root + GENERATIONS, json.dumps(content).encode(), headers)
            yield connection
        finally:
            connection.close()

    def connect(self, content: bytes = b"", address: str = "127.0.0.1") -> socket.socket:
        """Open a connection from `address` and send `content` on it."""
        host, _, port = self.address.rpartition(":")
        connection = socket.create_connection((host, int(port)), 30, source_address=(address, 0))
        connection.sendall(content)
        return connection

    def metric(self, name: str, **labels: str) -> float:
        """Return a sample of /metrics; 0 if it is missing."""
        text = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
        pattern = rf"^{re.escape(f'{name}{{{text}}}' if text else name)} (\S+)$"
        sample = re.search(pattern, self.get("/metrics")[1], re.MULTILINE)
        return float(sample[1]) if sample else 0.0

    def stop(self, *signals: signal.Signals) -> int:
        """Send these signals, by default SIGTERM, and return the exit code."""
        for sent_signal in signals or (signal.SIGTERM,):
            self.process.send_signal(sent_signal)
            time.sleep(0.2)
        return self.process.wait(60)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def wait_until(condition: Any, seconds: float = 60.0) -> None:
    """Wait until `condition` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition still does not hold"
        time.sleep(0.01)


def parse_events(body: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Return the kind and the data of each server-sent event."""
    lines = re.findall(rb"^(?:event: ([^\n]*)\n)?data: ([^\n]*)\n\n", body, re.MULTILINE)
    return [(kind.decode(), json.loads(data)) for kind, data in lines]


def format_head(path: str, kind: str, length: int | str) -> bytes:
    """Return the request line and the headers of a request with a body."""
    return (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n".encode()
    )


def format_form(fields: dict[str, bytes]) -> bytes:
    """Return a form with these fields, of type `FORM`."""
    parts = [
        b'--x\r\ncontent-disposition: form-data; name="%s"\r\n\r\n%s\r\n' % (name.encode(), fields[name])
        for name in fields
    ]
    return b"".join(parts) + b"--x--\r\n"
