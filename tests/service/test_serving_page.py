"""docs/serving.md: its programs and requests run as written, and its tables are complete."""

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
from running_server import GENERATIONS, RunningServer, events, until

from lantern_rt.cli.app import app
from lantern_rt.serve.protocol import ImagesRequest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/serving.md").read_text("utf-8")
SECTIONS: dict[str, str] = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
ADDRESS = "localhost:8000"


def blocks(kind: str, text: str = PAGE) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)


def names(text: str) -> list[str]:
    """What stands between backquotes."""
    return re.findall(r"`([^`]*)`", text)


def column(section: str, number: int = 0) -> list[str]:
    """Cells of the tables of a section, without their headings."""
    rows = [line.split(" | ") for line in SECTIONS[section].splitlines() if " | " in line]
    lines = SECTIONS[section].splitlines()
    headings = [lines[i - 1].split(" | ") for i, line in enumerate(lines) if line.startswith("---")]
    return [row[number] for row in rows if row not in headings]


def shape(value: Any) -> Any:
    """Keys and kinds, all the way down; a list by its first element."""
    if isinstance(value, dict):
        return {key: shape(one) for key, one in value.items()}
    if isinstance(value, list):
        return [shape(value[0])]
    return type(None if value is None else value)


def curl(server: RunningServer, command: str) -> Any:
    """What curl would be answered."""
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
    program = blocks("python")[number]
    assert ADDRESS in program
    command = [sys.executable, "-c", program.replace(ADDRESS, scenes.address)]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    assert len(blocks("python")) == 2


def test_a_request_is_answered_as_the_page_shows(scenes: RunningServer) -> None:
    (command,) = blocks("sh", SECTIONS["Requests"])
    (shown,) = map(json.loads, blocks("json", SECTIONS["Requests"]))
    found = curl(scenes, command)
    assert shape(found) == shape(shown)
    for name in ("output_format", "quality", "background", "size", "usage"):
        assert found[name] == shown[name]
    for name in ("model", "method", "quality", "seeds", "target_passes"):
        assert found["lantern"][name] == shown["lantern"][name]


def test_an_error_is_what_the_page_shows(scenes: RunningServer) -> None:
    (shown,) = map(json.loads, blocks("json", SECTIONS["Errors"]))
    assert scenes.post({"prompt": "a red cube on sand", "size": "64x64"}) == (400, shown)


def test_a_stream_has_the_events_of_the_page(tiny: RunningServer) -> None:
    asked = {"prompt": "red cube", "method": "ar", "stream": True, "partial_images": 1, "steps": True}
    _, _, body = tiny.request("POST", GENERATIONS, json.dumps(asked).encode(), {"content-type": "application/json"})
    found = {kind: data.keys() for kind, data in events(body)}
    rows = zip(column("Streaming"), column("Streaming", 1), strict=True)
    shown = {names(kind)[0]: set(names(fields)) for kind, fields in rows}
    assert found.keys() == shown.keys()
    shown["lantern.step"] -= {"steps"}  # the field that asks for it
    assert found["lantern.step"] - {"type"} == shown["lantern.step"]
    answer = {"created_at", "size", "quality", "background", "output_format", "type"}
    assert found["image_generation.partial_image"] == answer | shown["image_generation.partial_image"]
    assert found["image_generation.completed"] == answer | {"b64_json", "usage", "lantern"}


def test_a_line_of_the_log_has_the_fields_of_the_page(tiny: RunningServer) -> None:
    (shown,) = map(json.loads, blocks("json", SECTIONS["Logs"]))
    before = len(tiny.lines())
    tiny.post({"prompt": "red cube"})
    until(lambda: len(tiny.lines()) > before)
    assert shape(tiny.lines()[-1]) == shape(shown)


def test_every_field_of_a_request_is_on_the_page_and_no_other() -> None:
    shown = [name for cell in column("Requests") for name in names(cell)]
    assert sorted(shown) == sorted(ImagesRequest.model_fields)


def test_every_metric_is_on_the_page_and_no_other(scenes: RunningServer) -> None:
    shown = {name for cell in column("Metrics") for name in names(cell)}
    assert shown == {*re.findall(r"^# TYPE (lantern_\w+) ", scenes.get("/metrics")[1], re.MULTILINE)}


def test_the_limits_of_the_page_are_those_of_the_command() -> None:
    group = typer.main.get_command(app)
    with group.make_context("lantern-rt", ["serve"]) as context:
        command = group.get_command(context, "serve")  # type: ignore[attr-defined]
    defaults = {parameter.opts[0]: parameter.default for parameter in command.params}
    for option, shown in zip(column("Limits and overload"), column("Limits and overload", 1), strict=True):
        default = defaults[names(option)[0]]
        assert shown == str(int(default)) if default is not None else not shown.isdecimal()
