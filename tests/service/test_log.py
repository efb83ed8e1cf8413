"""Test the format and the levels of the server's log, and that environment variables of libraries have no effect."""

from __future__ import annotations

import json
import logging
import os
import pty
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running_server import RunningServer, wait_until
from starlette.testclient import TestClient

from lantern_rt.serve.app import make_app
from lantern_rt.serve.log import LogFormatter, RequestRecord, log_to_stderr
from lantern_rt.serve.state import ServerLimits, ServerState


def parse_log(server: RunningServer) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.log.splitlines()]


def test_every_log_line_of_the_server_and_of_its_libraries_is_json(
    start_server: Callable[..., RunningServer], tiny_folder: Path
) -> None:
    server = start_server(tiny_folder, "--threads", 1)
    with server.connect(b"nonsense\r\n\r\n") as connection:
        assert connection.recv(12) == b"HTTP/1.1 400"
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "no keys to reload" in server.log)
    assert server.stop() == 0
    messages = [(line["level"], line["message"].partition(":")[0]) for line in parse_log(server)]
    assert messages == [
        ("info", "open http"),
        ("info", "ready"),
        ("warning", "Invalid HTTP request received."),
        ("warning", "no keys to reload"),
        ("info", "draining"),
    ]


def test_a_terminal_gets_text_and_a_public_address_without_keys_a_warning(tiny_folder: Path) -> None:
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "lantern_rt", "serve", str(tiny_folder), "--threads=1", "--port=0"]
    with subprocess.Popen([*command, "--host=0.0.0.0"], stderr=follower, stdout=follower) as process:
        written = b""
        while b"info ready" not in written:
            written += os.read(leader, 1 << 16)
        process.terminate()
    os.close(leader)
    os.close(follower)
    assert b"info open http://0.0.0.0:" in written
    assert b"warning everyone who reaches this address" in written


def test_an_api_key_from_the_environment_is_not_reloaded_and_status_401_names_the_scheme(
    start_server: Callable[..., RunningServer], tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANTERN_RT_API_KEY", "one")
    server = start_server(tiny_folder, "--threads", 1)
    status, headers, _ = server.request("GET", "/v1/models")
    assert (status, headers["www-authenticate"]) == (401, "Bearer")
    wait_until(lambda: [line["status"] for line in server.read_request_log()] == [401])
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "no keys to reload" in server.log)
    assert server.request("GET", "/v1/models", headers={"authorization": "Bearer one"})[0] == 200
    assert "keys reloaded" not in server.log


def test_environment_variables_of_prometheus_and_uvicorn_are_ignored(
    start_server: Callable[..., RunningServer], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "missing"))
    monkeypatch.setenv("WEB_CONCURRENCY", "auto")
    server = start_server(tiny_folder, "--threads", 1)
    assert server.post({"prompt": "red cube"})[0] == 200
    wait_until(lambda: server.read_metric("lantern_requests_total", model="tiny", code="200") == 1)
    assert [line["status"] for line in server.read_request_log()] == [200]
    assert not (tmp_path / "missing").exists()


def make_record(message: str, facts: dict[str, Any], error: BaseException | None = None) -> logging.LogRecord:
    trace = (type(error), error, None) if error else None
    record = logging.LogRecord("lantern_rt.serve", logging.WARNING, "file", 1, message, (), trace)  # type: ignore[arg-type]
    record.facts = facts
    return record


def test_control_characters_in_a_path_are_escaped_in_text_logs() -> None:
    facts = {"path": "/a\n2026-01-01 info forged\r\x1b[2J", "status": 404, "key": ""}
    line = LogFormatter("text").format(make_record("request", facts))
    assert line.isprintable()
    assert line.endswith(r'warning request path="/a\n2026-01-01 info forged\r\u001b[2J" status=404')
    assert json.loads(LogFormatter("json").format(make_record("request", facts))).items() >= facts.items()


def test_a_traceback_is_a_field_in_json_logs_and_follows_the_line_in_text_logs() -> None:
    record = make_record("a request failed", {}, KeyError("x"))
    assert json.loads(LogFormatter("json").format(record))["traceback"] == "KeyError: 'x'"
    assert LogFormatter("text").format(record).endswith("warning a request failed\nKeyError: 'x'")


@pytest.mark.parametrize(("level", "num_lines"), [("info", 4), ("warning", 3), ("error", 1)])
def test_the_log_level_omits_messages_of_lower_severity(
    level: str, num_lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    package = logging.getLogger("lantern_rt")
    previous_handler = logging.StreamHandler(sys.stderr)
    package.addHandler(previous_handler)
    try:
        with log_to_stderr(level, "json"):
            RequestRecord("1", "", "/").write_to_log()
            logging.getLogger("lantern_rt.serve.server").warning("a warning")
            logging.getLogger("another").error("an error")
            logging.getLogger("another").info("not of the server")
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.warn("of a library", stacklevel=1)
        assert package.handlers == [previous_handler]
    finally:
        package.removeHandler(previous_handler)
    assert len([json.loads(line) for line in capsys.readouterr().err.splitlines()]) == num_lines


def test_an_internal_error_gets_status_500_and_a_traceback_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    class FailingBackend:
        name = "faulty"

        async def generate(self, request: Any, caller: str) -> Any:
            raise KeyError("of the test")
            yield

    state = ServerState(ServerLimits())
    state.backends = {"faulty": FailingBackend()}  # type: ignore[dict-item]
    with log_to_stderr("info", "json"):
        response = TestClient(make_app(state)).post("/v1/images/generations", json={"prompt": "red cube"})
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "internal server error; see the server's log"
    error_line, request_line = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert error_line["traceback"].endswith("KeyError: 'of the test'")
    assert (request_line["status"], request_line["model"]) == (500, "faulty")
