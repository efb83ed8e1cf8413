"""Test that the code blocks of docs/first-hour.md run in order in one empty folder, as a new user runs them."""

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
def test_the_code_blocks_of_the_page_run_in_order(tmp_path: Path) -> None:
    for module in ("torch", "onnx", "onnxruntime", "scipy"):
        pytest.importorskip(module)
    programs = tmp_path / "programs"
    folder = tmp_path / "folder"
    programs.mkdir()
    folder.mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    for name, arguments in (("lantern-rt", "-m lantern_rt"), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (programs / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "LANTERN_RT_CACHE": str(tmp_path / "cache"),
    }
    outputs = []
    for language, block in BLOCKS[1:]:  # without the first block, which installs the package
        command = ["bash", "-euc", block] if language == "sh" else [sys.executable, "-c", block]
        process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert process.returncode == 0, f"{block}\n{process.stdout}\n{process.stderr}"
        assert "Traceback" not in process.stderr
        outputs.append(process.stdout)
    with Image.open(folder / "sphere.png") as image, Image.open(folder / "sphere-again.png") as scaled_image:
        assert scaled_image.size == (4 * image.width, 4 * image.height)
    names = {path.name for path in folder.iterdir()}
    assert names >= {"a-blue-cube-on-snow.png", "a-green-cone-on-grass.png", "half-a-torus.png", "class-3-seed1.png"}
    assert (folder / "report/report.html").is_file()
    assert "\npassed\n" in "".join(outputs)
