"""ONNX Runtime reports nothing to its makers when this package loads it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_bundle import make_tiny_bundle

DRAW = (
    "import sys; from lantern_rt import Pipeline; Pipeline.from_bundle(sys.argv[1], threads=1)('red cube', method='ar')"
)


@pytest.mark.parametrize("code", [DRAW, "import lantern_rt.export.verify"])
def test_drawing_and_exporting_leave_no_identity_and_no_events_in_the_home_folder(tmp_path: Path, code: str) -> None:
    if "export" in code:
        pytest.importorskip("torch")
    bundle = make_tiny_bundle(tmp_path / "tiny")
    home = tmp_path / "home"
    home.mkdir()
    unset = ("ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    command = [sys.executable, "-c", code, str(bundle)]
    subprocess.run(command, env=environment | {"HOME": str(home)}, check=True)
    assert list(home.rglob("*")) == []
