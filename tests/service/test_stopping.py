"""Test how a server starts and stops: requests while loading, draining on signals, and invalid options and keys."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from refusals import catch_error
from running_server import RunningServer, wait_until
from tiny_bundle import make_tiny_bundle

from lantern_rt import RequestError
from lantern_rt.bundle.manifest import FileEntry
from lantern_rt.cli.main import run_program
from lantern_rt.serve.state import read_api_keys

SLOW_REQUEST = {"prompt": "a red sphere on sand", "method": "ar", "n": 2}


def start_request(server: RunningServer, body: dict[str, Any]) -> tuple[threading.Thread, list[Any]]:
    """Start a request; return its thread, and a list for the status and parsed response, or an `OSError`."""
    responses: list[Any] = []

    def send_request() -> None:
        try:
            responses.append(server.post(body))
        except OSError as error:
            responses.append(error)

    thread = threading.Thread(target=send_request)
    thread.start()
    wait_until(lambda: server.read_metric("lantern_images_running", model="scenes") > 0)
    return thread, responses


def test_a_server_answers_while_loading_and_completes_running_requests_after_sigterm(
    start_server: Callable[..., RunningServer],
) -> None:
    server = start_server("scenes", "--threads", 1, ready=False)
    status, response = server.post(SLOW_REQUEST)
    assert (status, response["error"]["code"]) == (503, "loading")
    assert server.get("/livez")[0] == 200
    server.wait_until_ready()
    thread, responses = start_request(server, SLOW_REQUEST)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: server.get("/readyz")[1]["status"] == "draining")
    assert server.get("/livez")[0] == 200
    status, response = server.post(SLOW_REQUEST)
    assert (status, response["error"]["code"]) == (503, "draining")
    thread.join()
    assert responses[0][0] == 200
    assert len(responses[0][1]["data"]) == 2
    assert server.process.wait(30) == 0
    assert "Traceback" not in server.log


def test_the_first_sigint_drains_the_server_and_the_second_sigint_aborts_requests(
    start_server: Callable[..., RunningServer],
) -> None:
    server = start_server("scenes", "--threads", 1)
    thread, responses = start_request(server, {**SLOW_REQUEST, "n": 10})
    server.process.send_signal(signal.SIGINT)
    wait_until(lambda: server.get("/readyz")[0] == 503)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(60) == 0
    thread.join()
    status, response = responses[0]
    assert (status, response["error"]["code"]) == (503, "stopped")
    assert "Traceback" not in server.log


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no list of blocked signals here")
def test_sighup_during_start_or_shutdown_only_reloads_the_keys(tmp_path: Path) -> None:
    folder = make_tiny_bundle(tmp_path / "tiny")
    keys = tmp_path / "keys.txt"
    keys.write_text("first-key\n")
    command = [sys.executable, "-m", "lantern_rt", "serve", str(folder), "--port", "0", "--api-key-file", str(keys)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        status = Path(f"/proc/{process.pid}/status")
        try:
            wait_until(lambda: "SigBlk:\t0000000000000001" in status.read_text())
            process.send_signal(signal.SIGHUP)
            assert "keys reloaded" in next(line for line in process.stderr if "keys" in line)
            process.send_signal(signal.SIGTERM)
            while process.poll() is None:
                process.send_signal(signal.SIGHUP)
                time.sleep(0.002)
            assert process.returncode == 0
        finally:
            process.kill()


def test_a_model_that_cannot_be_loaded_stops_the_server_with_one_error_line(tmp_path: Path) -> None:
    folder = make_tiny_bundle(tmp_path / "tiny")
    (folder / "target.onnx").write_bytes((folder / "vq_decoder.onnx").read_bytes())
    manifest = json.loads((folder / "bundle.json").read_text())
    manifest["files"]["target"] = FileEntry.from_file(folder / "target.onnx").model_dump()
    (folder / "bundle.json").write_text(json.dumps(manifest))
    command = [sys.executable, "-m", "lantern_rt", "serve", str(folder), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("lantern-rt: ")
    assert "target.onnx" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_port_in_use_or_an_unknown_host_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other_socket:
        port = other_socket.getsockname()[1]
        assert run_program(["serve", "--port", str(port)]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("lantern-rt: --port: cannot listen on '127.0.0.1'")
    assert run_program(["serve", "--host", "no.such.host.invalid", "--port", "0"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message_start"),
    [
        (["--port", "70000"], "--port: found 70000"),
        (["--batch", "0", "--port", "0"], "--batch: found 0"),
        (["--deadline", "0"], "--deadline: found 0"),
        (["--deadline", "nan"], "--deadline: found nan"),
        (["--log-level", "all"], "--log-level: found 'all', expected info, warning, error"),
        (["--log-format", "xml"], "--log-format: found 'xml'"),
        (["--methods", "magic"], "--methods: found 'magic'"),
        (["--max-n", "11"], "--max-n: found 11"),
        (["--cors", "ui.example", "--port", "0"], "--cors: found 'ui.example'"),
        (["--alias", "other"], "--alias: found 'other'"),
        (["--alias", "scenes=scenes"], "--alias: found 'scenes=scenes'"),
        (["--map-size", "1024x1024"], "--map-size: found '1024x1024', expected SIZE=SIZE"),
        (["--map-size", "1024x1024=64x64"], "--map-size: found '1024x1024=64x64'"),
        (["--map-size", "256x256=auto"], "--map-size: found '256x256=auto'"),
        (["--map-size", "big=256x256"], "--map-size: found 'big=256x256'"),
        (["scenes", "scenes"], "bundles: found two bundles named scenes"),
        (["no/such/bundle"], "bundle 'no/such/bundle'"),
    ],
)
def test_invalid_serve_options_are_rejected_with_one_line(
    arguments: list[str], message_start: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_program(["serve", *arguments]) == 2
    assert capsys.readouterr().err.splitlines()[-1].removeprefix("lantern-rt: ").startswith(message_start)


@pytest.mark.parametrize("content", ["# nobody\n\n", "schl\u00fcssel\n"])
def test_a_key_file_without_keys_or_with_non_ascii_keys_is_rejected(tmp_path: Path, content: str) -> None:
    (tmp_path / "keys.txt").write_text(content, "utf-8")
    assert catch_error(RequestError, read_api_keys, tmp_path / "keys.txt").field == "api_key_file"


@pytest.mark.parametrize("content", ["", "schl\u00fcssel"])
def test_an_empty_or_non_ascii_key_in_the_environment_is_rejected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    monkeypatch.setenv("LANTERN_RT_API_KEY", content)
    assert run_program(["serve", "--port", "0"]) == 2
    assert capsys.readouterr().err.startswith("lantern-rt: LANTERN_RT_API_KEY: found ")


def test_a_byte_order_mark_in_a_key_file_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbfone\ntwo\n")
    (tmp_path / "plain.txt").write_text("one\ntwo\n")
    assert read_api_keys(tmp_path / "marked.txt") == read_api_keys(tmp_path / "plain.txt")
