"""Run the programs and requests of docs/serving.md as written, and check that its tables are complete."""

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
from running_server import GENERATIONS, RunningServer, parse_events, wait_until

from lantern_rt.cli.app import app
from lantern_rt.serve.protocol import ImagesRequest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/serving.md").read_text("utf-8")
SECTIONS: dict[str, str] = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
ADDRESS = "localhost:8000"


def read_blocks(kind: str, text: str = PAGE) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)


def read_names(text: str) -> list[str]:
    """Return the strings in backquotes."""
    return re.findall(r"`([^`]*)`", text)


def read_column(section: str, number: int = 0) -> list[str]:
    """Return the cells of a column of the section's tables, without headings."""
    rows = [line.split(" | ") for line in SECTIONS[section].splitlines() if " | " in line]
    lines = SECTIONS[section].splitlines()
    headings = [lines[i - 1].split(" | ") for i, line in enumerate(lines) if line.startswith("---")]
    return [row[number] for row in rows if row not in headings]


def describe_types(value: Any) -> Any:
    """Replace every value by its type; a list by the type of its first element."""
    if isinstance(value, dict):
        return {key: describe_types(element) for key, element in value.items()}
    if isinstance(value, list):
        return [describe_types(value[0])]
    return type(None if value is None else value)


def run_curl(server: RunningServer, command: str) -> Any:
    """Return the answer that the curl command would get."""
    program, url, *rest = shlex.split(command.replace("\\\n", " "))
    assert (program, url.startswith(ADDRESS)) == ("curl", True)
    options = dict(zip(rest[::2], rest[1::2], strict=True))
    assert options.keys() == {"-H", "-d"}
    name, _, value = options["-H"].partition(": ")
    status, _, body = server.request("POST", url.removeprefix(ADDRESS), options["-d"].encode(), {name: value})
    assert status == 200
    return json.loads(body)


@pytest.mark.parametrize(("number", "files"), [(0, ["cube.png"]), (1, ["final.png", "partial-0.png", "partial-1.png"])])
def test_the_programs_of_the_page_run_as_written(
    scenes: RunningServer, tmp_path: Path, number: int, files: list[str]
) -> None:
    program = read_blocks("python")[number]
    assert ADDRESS in program
    command = [sys.executable, "-c", program.replace(ADDRESS, scenes.address)]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    assert len(read_blocks("python")) == 2


def test_a_request_is_answered_as_the_page_shows(scenes: RunningServer) -> None:
    (command,) = read_blocks("sh", SECTIONS["Requests"])
    (shown_answer,) = map(json.loads, read_blocks("json", SECTIONS["Requests"]))
    response = run_curl(scenes, command)
    assert describe_types(response) == describe_types(shown_answer)
    for name in ("output_format", "quality", "background", "size", "usage"):
        assert response[name] == shown_answer[name]
    for name in ("model", "method", "quality", "seeds", "target_passes"):
        assert response["lantern"][name] == shown_answer["lantern"][name]


def test_an_error_is_what_the_page_shows(scenes: RunningServer) -> None:
    (shown_error,) = map(json.loads, read_blocks("json", SECTIONS["Errors"]))
    assert scenes.post({"prompt": "a red cube on sand", "size": "64x64"}) == (400, shown_error)


def test_a_stream_has_the_events_of_the_page(tiny: RunningServer) -> None:
    request_fields = {"prompt": "red cube", "method": "ar", "stream": True, "partial_images": 1, "steps": True}
    _, _, body = tiny.request(
        "POST", GENERATIONS, json.dumps(request_fields).encode(), {"content-type": "application/json"}
    )
    sent_fields = {kind: data.keys() for kind, data in parse_events(body)}
    rows = zip(read_column("Streaming"), read_column("Streaming", 1), strict=True)
    shown_fields = {read_names(kind)[0]: set(read_names(fields)) for kind, fields in rows}
    assert sent_fields.keys() == shown_fields.keys()
    shown_fields["lantern.step"] -= {"steps"}  # the field that asks for it
    assert sent_fields["lantern.step"] - {"type"} == shown_fields["lantern.step"]
    response = {"created_at", "size", "quality", "background", "output_format", "type"}
    assert sent_fields["image_generation.partial_image"] == response | shown_fields["image_generation.partial_image"]
    assert sent_fields["image_generation.completed"] == response | {"b64_json", "usage", "lantern"}


def test_a_line_of_the_log_has_the_fields_of_the_page(tiny: RunningServer) -> None:
    (shown_line,) = map(json.loads, read_blocks("json", SECTIONS["Logs"]))
    lines_before = len(tiny.request_lines())
    tiny.post({"prompt": "red cube"})
    wait_until(lambda: len(tiny.request_lines()) > lines_before)
    assert describe_types(tiny.request_lines()[-1]) == describe_types(shown_line)


def test_every_field_of_a_request_is_on_the_page_and_no_other() -> None:
    shown_fields = [name for cell in read_column("Requests") for name in read_names(cell)]
    assert sorted(shown_fields) == sorted(ImagesRequest.model_fields)


def test_every_metric_is_on_the_page_and_no_other(scenes: RunningServer) -> None:
    shown_metrics = {name for cell in read_column("Metrics") for name in read_names(cell)}
    assert shown_metrics == {*re.findall(r"^# TYPE (lantern_\w+) ", scenes.get("/metrics")[1], re.MULTILINE)}


def test_the_limits_of_the_page_are_those_of_the_command() -> None:
    group = typer.main.get_command(app)
    with group.make_context("lantern-rt", ["serve"]) as context:
        command = group.get_command(context, "serve")  # type: ignore[attr-defined]
    defaults = {parameter.opts[0]: parameter.default for parameter in command.params}
    for option, shown_default in zip(
        read_column("Limits and overload"), read_column("Limits and overload", 1), strict=True
    ):
        default = defaults[read_names(option)[0]]
        assert shown_default == str(int(default)) if default is not None else not shown_default.isdecimal()
