"""Helpers that run `lantern-rt serve` in a separate process and send HTTP requests to the server."""

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
JSON = {"content-type": "application/json"}


class RunningServer:
    """A `lantern-rt serve` process with these arguments, and a client for it; port 0 is any free port."""

    path_prefix = ""  # prepended to the path of every request

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
        """Text that the server has written to stdout and stderr so far."""
        return self._log.read_text("utf-8")

    def read_request_log(self) -> list[dict[str, Any]]:
        """Return the complete log lines about requests, parsed from JSON."""
        return [line for line in map(json.loads, self.log.split("\n")[:-1]) if line["message"] == "request"]

    def wait_for_log_line(self, request_id: str) -> dict[str, Any]:
        """Wait for the log line of a request, which the server may write after the response; return the line."""
        wait_until(lambda: any(line["request_id"] == request_id for line in self.read_request_log()))
        return next(line for line in self.read_request_log() if line["request_id"] == request_id)

    def _wait_for(self, pattern: str, seconds: float = 60.0) -> str:
        """Wait until the log matches a regular expression; return the first group of the match."""
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
        """Send a request; return the status, the headers with lower-case names, and the body."""
        connection = http.client.HTTPConnection(self.address, timeout=60)
        try:
            connection.request(method, self.path_prefix + path, body, headers or {})
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        """Send a GET request; return the status, and the body as parsed JSON or as text."""
        status, response_headers, body = self.request("GET", path, headers=headers)
        is_json = response_headers.get("content-type") == "application/json"
        return status, json.loads(body) if is_json else body.decode()

    def post(self, content: Any, path: str = GENERATIONS, **headers: str) -> tuple[int, Any]:
        """Send a request with a JSON body, given as bytes or an object; return the status and the parsed JSON."""
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        status, _, response = self.request("POST", path, body, JSON | headers)
        return status, json.loads(response)

    def stream(self, content: dict[str, Any], path: str = GENERATIONS) -> list[tuple[str, dict[str, Any]]]:
        """Send a request for a stream with steps; return its events, as `parse_events` does."""
        body = json.dumps({**content, "stream": True, "steps": True}).encode()
        return parse_events(self.request("POST", path, body, JSON)[2])

    @contextmanager
    def open_request(self, content: dict[str, Any]) -> Iterator[http.client.HTTPConnection]:
        """Send an image generation request without reading the response; disconnect at the end of the context."""
        connection = http.client.HTTPConnection(self.address, timeout=60)
        try:
            connection.request("POST", self.path_prefix + GENERATIONS, json.dumps(content).encode(), JSON)
            yield connection
        finally:
            connection.close()

    def connect(self, content: bytes = b"", address: str = "127.0.0.1") -> socket.socket:
        """Open a TCP connection from the client address `address` and send the raw bytes `content`."""
        host, _, port = self.address.rpartition(":")
        connection = socket.create_connection((host, int(port)), 30, source_address=(address, 0))
        connection.sendall(content)
        return connection

    def read_metric(self, name: str, **labels: str) -> float:
        """Return the value in /metrics of the sample with this name and these labels; 0 if the sample is missing."""
        text = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
        pattern = rf"^{re.escape(f'{name}{{{text}}}' if text else name)} (\S+)$"
        sample = re.search(pattern, self.get("/metrics")[1], re.MULTILINE)
        return float(sample[1]) if sample else 0.0

    def stop(self, *signals: signal.Signals) -> int:
        """Send the signals, by default SIGTERM, to the server process; return the exit code of the process."""
        for sent_signal in signals or (signal.SIGTERM,):
            self.process.send_signal(sent_signal)
            time.sleep(0.2)
        return self.process.wait(60)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def wait_until(condition: Any, seconds: float = 60.0) -> None:
    """Wait until the function `condition` returns a true value; fail after `seconds` seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition does not hold after {seconds} s"
        time.sleep(0.01)


def parse_events(body: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Return the type and the parsed JSON data of each server-sent event; an event without a type has an empty type."""
    lines = re.findall(rb"^(?:event: ([^\n]*)\n)?data: ([^\n]*)\n\n", body, re.MULTILINE)
    return [(event_type.decode(), json.loads(data)) for event_type, data in lines]


def format_head(path: str, content_type: str, length: int | str) -> bytes:
    """Return the request line and the headers of a POST request with a body of `length` bytes."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {content_type}\r\n"
    return f"{head}content-length: {length}\r\n\r\n".encode()


def format_form(fields: dict[str, bytes]) -> bytes:
    """Return the body of a multipart form with the content type `FORM`; images have a file name."""
    body = b""
    for name, value in fields.items():
        file_name = b'; filename="a.png"' if name.startswith("image") else b""
        body += b'--x\r\ncontent-disposition: form-data; name="%s"%s\r\n\r\n' % (name.encode(), file_name)
        body += value + b"\r\n"
    return body + b"--x--\r\n"
