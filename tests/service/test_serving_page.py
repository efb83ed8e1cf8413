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

PAGE = (Path(__file__).parents[2] / "docs/serving.md").read_text("utf-8")
SECTIONS: dict[str, str] = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
ADDRESS = "localhost:8000"


def blocks(kind: str, text: str = PAGE) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)


def names(text: str) -> list[str]:
    """What stands between backquotes."""
    return re.findall(r"`([^`]*)`", text)


def rows(section: str) -> list[list[str]]:
    """Cells of the tables of a section, line by line, without their headings."""
    lines = SECTIONS[section].splitlines()
    headings = [lines[i - 1] for i, line in enumerate(lines) if line.startswith("---")]
    return [line.split(" | ") for line in lines if " | " in line and line not in headings]


def shape(value: Any) -> Any:
    """Keys and kinds, all the way down; a list by its first element."""
    if isinstance(value, dict):
        return {key: shape(one) for key, one in value.items()}
    if isinstance(value, list):
        return [shape(value[0])]
    return type(None if value is None else value)


@pytest.mark.parametrize(("number", "files"), [(0, ["cube.png"]), (1, ["final.png", "partial-0.png", "partial-1.png"])])
def test_the_programs_of_the_page_run_as_written(
    scenes: RunningServer, tmp_path: Path, number: int, files: list[str]
) -> None:
    program = blocks("python")[number]
    assert ADDRESS in program
    command = [sys.executable, "-c", program.replace(ADDRESS, scenes.address)]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == files


def test_a_request_is_answered_as_the_page_shows(scenes: RunningServer) -> None:
    (command,) = blocks("sh", SECTIONS["Asking"])
    (shown,) = map(json.loads, blocks("json", SECTIONS["Asking"]))
    body = shlex.split(command.replace("\\\n", " "))[-1]
    status, answer = scenes.post(body.encode())
    assert status == 200
    assert shape(answer) == shape(shown)
    for name in ("output_format", "quality", "background", "size", "usage"):
        assert answer[name] == shown[name]
    for name in ("model", "method", "choice", "seeds", "target_passes"):
        assert answer["lantern"][name] == shown["lantern"][name]


def test_an_error_is_what_the_page_shows(scenes: RunningServer) -> None:
    (shown,) = map(json.loads, blocks("json", SECTIONS["Errors"]))
    assert scenes.post({"prompt": "a red cube on sand", "size": "64x64"}) == (400, shown)


def test_a_stream_has_the_events_of_the_page(scenes: RunningServer) -> None:
    request = {"prompt": "a red cube on sand", "stream": True, "partial_images": 1, "steps": True}
    _, _, body = scenes.request("POST", GENERATIONS, json.dumps(request).encode(), {"content-type": "application/json"})
    sent = {kind: data.keys() - {"type"} for kind, data in events(body)}
    listed = {names(kind)[0]: set(names(fields)) for kind, fields in rows("Streaming")}
    assert sent.keys() == listed.keys()
    assert sent["lantern.step"] == listed["lantern.step"] - {"steps"}  # the field that asks for it
    common = {"created_at", "size", "quality", "background", "output_format"}
    assert sent["image_generation.partial_image"] == common | listed["image_generation.partial_image"]
    assert sent["image_generation.completed"] == common | {"b64_json", "usage", "lantern"}


def test_a_line_of_the_log_has_the_fields_of_the_page(scenes: RunningServer) -> None:
    (shown,) = map(json.loads, blocks("json", SECTIONS["Logs"]))
    before = len(scenes.lines())
    scenes.post({"prompt": "a red cube on sand"})
    until(lambda: len(scenes.lines()) > before)
    assert shape(scenes.lines()[-1]) == shape(shown)


def test_health_is_what_the_page_says(scenes: RunningServer) -> None:
    for paths, ready, *_ in rows("Health"):
        for path in names(paths):
            status, answer = scenes.get(path)
            assert status == 200
            assert path == "/livez" or answer == json.loads(names(ready)[0])


def test_the_page_lists_every_field_and_every_metric_and_no_other(scenes: RunningServer) -> None:
    assert sorted(name for row in rows("Asking") for name in names(row[0])) == sorted(ImagesRequest.model_fields)
    counted = re.findall(r"^# TYPE (lantern_\w+) ", scenes.get("/metrics")[1], re.MULTILINE)
    listed = {name for row in rows("Metrics") for name in names(row[0])}
    assert listed == {name for name in counted if not name.endswith("_created")}


def test_options_of_the_page_exist_with_their_defaults() -> None:
    group: Any = typer.main.get_command(app)
    with group.make_context("lantern-rt", ["serve"]) as context:
        command = group.get_command(context, "serve")
    defaults = {parameter.opts[0]: parameter.default for parameter in command.params}
    for option, stated, _ in rows("Limits and overload"):
        default = defaults[names(option)[0]]
        assert stated.isdecimal() == (default is not None)
        assert default is None or int(stated) == default
    assert set(re.findall(r"`(--[a-z-]+)", PAGE)) <= {*defaults, "--cpus", "--cpuset-cpus"}  # these of Docker
