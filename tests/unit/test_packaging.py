"""Package metadata, commands that install the package, minimum versions of dependencies, and sessions of CI."""

from __future__ import annotations

import json
import re
import runpy
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lantern_rt.inputs import make_install_command

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def test_readme_links_on_the_package_index_are_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    setuptools = pytest.importorskip("setuptools")
    metadata: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", metadata.update)
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    links = re.findall(r"\]\(([^)]+)\)", metadata["long_description"])
    source = PROJECT["urls"]["Source"]
    assert len(links) > 20
    for link in links:
        match = re.fullmatch(rf"{re.escape(source)}/(?:blob|raw)/HEAD/([^#]+)(?:#.*)?", link)
        assert match, link
        assert (ROOT / match[1]).is_file(), link


def test_pip_commands_of_pytorch_name_the_index_of_cpu_wheels() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    lines = [line for page in pages for line in page.read_text("utf-8").splitlines() if "pip install" in line]
    torch_lines = [line for line in lines if re.search(r"\[cpu,(?:export|train)", line)]
    assert len(torch_lines) >= 4
    assert [line for line in torch_lines if "https://download.pytorch.org/whl/cpu" not in line] == []


CLONE = {"url": "file:///home/me/a%20clone", "dir_info": {"editable": True}}
WHEEL = {"url": "https://example.org/lantern_rt-0.1.0-py3-none-any.whl", "archive_info": {}}
REPOSITORY = {"url": "https://example.org/lantern-rt", "vcs_info": {"vcs": "git", "commit_id": "a" * 40}}


@pytest.mark.parametrize(
    ("origin", "expected_requirement"),
    [
        (CLONE, "-e '/home/me/a clone[serve]'"),
        (WHEEL, f"'lantern-rt[serve] @ {WHEEL['url']}'"),
        (REPOSITORY, f"'lantern-rt[serve] @ git+{REPOSITORY['url']}'"),
        (None, "'lantern-rt[serve]'"),
    ],
)
def test_install_commands_in_errors_name_the_installed_source(
    monkeypatch: pytest.MonkeyPatch, origin: dict[str, Any] | None, expected_requirement: str
) -> None:
    distribution = SimpleNamespace(read_text=lambda name: origin and json.dumps(origin))
    monkeypatch.setattr("importlib.metadata.distribution", lambda _: distribution)
    assert make_install_command("serve") == f"pip install {expected_requirement}"
    assert "--extra-index-url https://download.pytorch.org/whl/cpu " in make_install_command("cpu,export")
    assert make_install_command("cpu", reinstall=True).startswith("pip install --force-reinstall ")


def test_a_dependency_has_the_same_minimum_in_all_extras() -> None:
    minimum_versions: dict[str, set[str]] = {}
    extras = {**PROJECT["optional-dependencies"]}
    del extras["webgpu"]  # records CUDA graphs
    for requirements in (PROJECT["dependencies"], *extras.values()):
        for requirement in requirements:
            name, _, version = re.sub(r"\[.*\]", "", requirement).partition(">=")
            minimum_versions.setdefault(name, set()).add(version)
    assert {name: versions for name, versions in minimum_versions.items() if len(versions) > 1} == {}


def test_ci_runs_every_nox_session_once() -> None:
    sessions = re.findall(r"^@nox\.session.*\ndef (\w+)", (ROOT / "noxfile.py").read_text("utf-8"), re.MULTILINE)
    lists = dict(re.findall(r'^([A-Z]+)="([^"]*)"$', (ROOT / ".ci/run").read_text("utf-8"), re.MULTILINE))
    names = [item.partition(":")[0] for item in f"{lists['FIRST']} {lists['SECOND']}".split()]
    assert len(sessions) > 10
    assert sorted([*names, "weekly"]) == sorted(sessions)
    tested = re.findall(r"^(.+?):", lists["TESTED"], re.MULTILINE)
    assert all(name in names or (name.startswith("tests/") and (ROOT / name).is_dir()) for name in tested)
    documented_names = set(re.findall(r"`(\w+)`", (ROOT / "CONTRIBUTING.md").read_text("utf-8")))
    assert set(sessions) <= documented_names
