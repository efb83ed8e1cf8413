"""docs/first-hour.md as a new user would follow it: every block runs, in order, in one empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/first-hour.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_install_line_names_extras_that_exist_and_the_pinned_versions() -> None:
    kind, line = BLOCKS[0]
    assert (kind, line.count("\n")) == ("sh", 1)
    found = re.fullmatch(r'pip install -c (\S+) -e "\.\[([\w,]+)\]"\n', line)
    assert found is not None
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert set(found[2].split(",")) <= extras.keys()
    assert (ROOT / found[1]).is_file()


def test_the_page_goes_the_whole_way() -> None:
    headings = ["Install", "Draw", "Stream", "Export", "Verify", "Tune and bench", "Eval", "Embed"]
    assert re.findall(r"^## (.*)$", PAGE, re.MULTILINE) == headings


@pytest.mark.slow
def test_every_block_runs_in_turn(tmp_path: Path) -> None:
    for needed in ("torch", "onnx", "onnxruntime", "scipy"):
        pytest.importorskip(needed)
    programs, place = tmp_path / "programs", tmp_path / "place"
    programs.mkdir()
    place.mkdir()
    (place / "examples").symlink_to(ROOT / "examples")
    for name, arguments in (("lantern-rt", "-m lantern_rt"), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (programs / name).chmod(0o755)
    surroundings = os.environ | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "LANTERN_RT_CACHE": str(tmp_path / "cache"),
    }
    outputs = []
    for kind, block in BLOCKS[1:]:
        command = ["bash", "-euc", block] if kind == "sh" else [sys.executable, "-c", block]
        done = subprocess.run(command, cwd=place, env=surroundings, capture_output=True, text=True)
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        outputs.append(done.stdout)
    with Image.open(place / "sphere.png") as first, Image.open(place / "sphere-again.png") as again:
        assert again.size == (4 * first.width, 4 * first.height)
    names = {path.name for path in place.iterdir()}
    assert names >= {"a-blue-cube-on-snow.png", "a-green-cone-on-grass.png", "half-a-torus.png", "class-3-seed0.png"}
    assert (place / "report/report.html").is_file()
    assert "\npassed\n" in "".join(outputs)
    sizes, refusal = outputs[-1].split(", 'class id: ")
    assert sizes == "[(96, 96), (96, 96)"
    assert refusal == "found 1000, expected a whole number 0 .. 9']\n"
