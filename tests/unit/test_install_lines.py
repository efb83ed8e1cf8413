"""Lines in the documentation that install something can be typed by those who have a clone, and those with a wheel."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
IN_A_CLONE = {"README.md", "CONTRIBUTING.md", "first-hour.md"}  # which also say so


def install_lines() -> Iterator[tuple[str, str]]:
    """Name of each page, and each of its lines that installs this package."""
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        for line in page.read_text("utf-8").splitlines():
            if "pip install" in line and re.search(r"lantern.rt|-e ", line):
                yield page.name, line


def test_extras_in_the_documentation_exist() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for page, line in install_lines():
        for extras in re.findall(r"\[([a-z,-]+)\]", line.partition("pip install")[2]):
            assert set(extras.split(",")) <= known.keys(), (page, line)


def test_only_pages_for_clones_install_from_the_current_folder() -> None:
    lines = list(install_lines())
    assert len(lines) > 5
    assert {page for page, line in lines if "-e ." in line or '-e "' in line} <= IN_A_CLONE


def test_readme_shows_how_to_install_from_a_wheel() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert f'pip install "./lantern_rt-{version}-py3-none-any.whl[cpu]"' in (ROOT / "README.md").read_text("utf-8")


def test_the_export_section_of_readme_avoids_cuda_before_it_installs_the_extra() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    torch, extra, command = (
        text.index(part)
        for part in (
            "pip install torch --index-url https://download.pytorch.org/whl/cpu",
            'pip install "lantern-rt[cpu,export]"',
            "lantern-rt export --family",
        )
    )
    assert torch < extra < command
