"""Test docs/serving.md: its programs and requests run as written, and its tables are complete."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from running_server import RunningServer

from lantern_rt.cli.app import app
from lantern_rt.serve.protocol import ImagesRequest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/serving.md").read_text("utf-8")
SECTIONS: dict[str, str] = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
ADDRESS = "localhost:8000"


def read_blocks(language: str, text: str = PAGE) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def read_names(text: str) -> list[str]:
    return re.findall(r"`([^`]*)`", text)


def read_column(section: str, number: int = 0) -> list[str]:
    """Return the cells of column `number` of all tables in a section, without the column headings."""
    rows = [line.split(" | ") for line in SECTIONS[section].splitlines() if " | " in line]
    lines = SECTIONS[section].splitlines()
    headings = [lines[i - 1].split(" | ") for i, line in enumerate(lines) if line.startswith("---")]
    return [row[number] for row in rows if row not in headings]


def describe_types(value: Any) -> Any:
    """Replace every value in JSON data by the value's type, and every list by the type of the first element."""
    if isinstance(value, dict):
        return {key: describe_types(element) for key, element in value.items()}
    if isinstance(value, list):
        return [describe_types(value[0])]
    return type(None if value is None else value)


def send_curl_request(server: RunningServer, command: str) -> Any:
    """Send the request of a documented curl command, with the options -H and -d only; return the parsed JSON."""
    program, url, *rest = shlex.split(command.replace("\\\n", " "))
    assert (program, url.startswith(ADDRESS)) == ("curl", True)
    options = dict(zip(rest[::2], rest[1::2], strict=True))
    assert options.keys() == {"-H", "-d"}
    name, _, value = options["-H"].partition(": ")
    status, _, body = server.request("POST", url.removeprefix(ADDRESS), options["-d"].encode(), {name: value})
    assert status == 200
    return json.loads(body)


@pytest.mark.parametrize(("number", "files"), [(0, ["cube.png"]), (1, ["final.png", "partial-0.png", "partial-1.png"])])
def test_the_documented_programs_run_as_written(
    scenes_server: RunningServer, tmp_path: Path, number: int, files: list[str]
) -> None:
    program = read_blocks("python")[number]
    assert ADDRESS in program
    command = [sys.executable, "-c", program.replace(ADDRESS, scenes_server.address)]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    assert len(read_blocks("python")) == 2


def test_the_documented_request_gets_the_documented_response(scenes_server: RunningServer) -> None:
    (command,) = read_blocks("sh", SECTIONS["Requests"])
    (shown_response,) = map(json.loads, read_blocks("json", SECTIONS["Requests"]))
    response = send_curl_request(scenes_server, command)
    assert describe_types(response) == describe_types(shown_response)
    for name in ("output_format", "quality", "background", "size", "usage"):
        assert response[name] == shown_response[name]
    for name in ("model", "method", "quality", "seeds", "target_passes"):
        assert response["lantern"][name] == shown_response["lantern"][name]


def test_an_unsupported_size_gets_the_documented_error(scenes_server: RunningServer) -> None:
    (shown_error,) = map(json.loads, read_blocks("json", SECTIONS["Errors"]))
    assert scenes_server.post({"prompt": "a red cube on sand", "size": "64x64"}) == (400, shown_error)


def test_a_stream_has_the_documented_events_and_fields(tiny_server: RunningServer) -> None:
    events = tiny_server.stream({"prompt": "red cube", "method": "ar", "partial_images": 1})
    sent_fields = {kind: data.keys() for kind, data in events}
    rows = zip(read_column("Streaming"), read_column("Streaming", 1), strict=True)
    shown_fields = {read_names(kind)[0]: set(read_names(fields)) for kind, fields in rows}
    assert sent_fields.keys() == shown_fields.keys()
    shown_fields["lantern.step"] -= {"steps"}  # the request field that enables these events
    assert sent_fields["lantern.step"] - {"type"} == shown_fields["lantern.step"]
    common_fields = {"created_at", "size", "quality", "background", "output_format", "type"}
    partial = "image_generation.partial_image"
    assert sent_fields[partial] == common_fields | shown_fields[partial]
    assert sent_fields["image_generation.completed"] == common_fields | {"b64_json", "usage", "lantern"}


def test_a_request_log_line_has_the_documented_fields(tiny_server: RunningServer) -> None:
    (shown_line,) = map(json.loads, read_blocks("json", SECTIONS["Logs"]))
    tiny_server.post({"prompt": "red cube"}, **{"x-request-id": "documented"})
    assert describe_types(tiny_server.wait_for_log_line("documented")) == describe_types(shown_line)


def test_the_documented_request_fields_are_exactly_the_accepted_fields() -> None:
    shown_fields = [name for cell in read_column("Requests") for name in read_names(cell)]
    assert sorted(shown_fields) == sorted(ImagesRequest.model_fields)


def test_the_documented_metrics_are_exactly_the_exported_metrics(scenes_server: RunningServer) -> None:
    shown_metrics = {name for cell in read_column("Metrics") for name in read_names(cell)}
    assert shown_metrics == {*re.findall(r"^# TYPE (lantern_\w+) ", scenes_server.get("/metrics")[1], re.MULTILINE)}


def test_the_documented_limits_are_the_defaults_of_the_command() -> None:
    group = typer.main.get_command(app)
    with group.make_context("lantern-rt", ["serve"]) as context:
        command = group.get_command(context, "serve")  # type: ignore[attr-defined]
    defaults = {parameter.opts[0]: parameter.default for parameter in command.params}
    shown_limits = zip(read_column("Limits and overload"), read_column("Limits and overload", 1), strict=True)
    for option, shown_default in shown_limits:
        default = defaults[read_names(option)[0]]
        assert shown_default == str(int(default)) if default is not None else not shown_default.isdecimal()
