"""Telemetry of ONNX Runtime, which lantern_rt turns off."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_bundle import make_tiny_bundle

GENERATE = (
    "import sys; from lantern_rt import Pipeline; Pipeline.from_bundle(sys.argv[1], threads=1)('red cube', method='ar')"
)


@pytest.mark.parametrize("code", [GENERATE, "import lantern_rt.export.verify"])
def test_no_telemetry_files_are_written_to_the_home_folder(tmp_path: Path, code: str) -> None:
    if "export" in code:
        pytest.importorskip("torch")
    bundle = make_tiny_bundle(tmp_path / "tiny")
    home = tmp_path / "home"
    home.mkdir()
    removed_variables = ("ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in removed_variables}
    command = [sys.executable, "-c", code, str(bundle)]
    subprocess.run(command, env=environment | {"HOME": str(home)}, check=True)
    assert list(home.rglob("*")) == []
