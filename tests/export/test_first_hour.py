"""docs/first-hour.md as a new user would follow it: every block runs, in order, in one empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/first-hour.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_every_block_runs_in_turn(tmp_path: Path) -> None:
    for needed in ("torch", "onnx", "onnxruntime", "scipy"):
        pytest.importorskip(needed)
    programs = tmp_path / "programs"
    place = tmp_path / "place"
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
    for kind, block in BLOCKS[1:]:  # behind the line that installs
        command = ["bash", "-euc", block] if kind == "sh" else [sys.executable, "-c", block]
        done = subprocess.run(command, cwd=place, env=surroundings, capture_output=True, text=True)
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        outputs.append(done.stdout)
    with Image.open(place / "sphere.png") as first, Image.open(place / "sphere-again.png") as again:
        assert again.size == (4 * first.width, 4 * first.height)
    names = {path.name for path in place.iterdir()}
    assert names >= {"a-blue-cube-on-snow.png", "a-green-cone-on-grass.png", "half-a-torus.png", "class-3-seed1.png"}
    assert (place / "report/report.html").is_file()
    assert "\npassed\n" in "".join(outputs)
