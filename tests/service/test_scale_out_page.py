"""Test the shell commands of docs/scale-out.md: they run as written and serve an image."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from running_server import RunningServer, wait_until

pytest.importorskip("ray.serve", reason="needs the extra `ray`")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
(COMMANDS,) = re.findall(r"```sh\n(.*?)```", (ROOT / "docs/scale-out.md").read_text("utf-8"), re.DOTALL)


class ServedApplication(RunningServer):
    """A client of the application at port 8000, with the methods of `RunningServer`."""

    def __init__(self) -> None:
        self.address = "127.0.0.1:8000"


def is_ready() -> bool:
    try:
        return ServedApplication().get("/readyz")[0] == 200
    except OSError:
        return False


def has_home(process: psutil.Process, home: str) -> bool:
    try:
        return process.environ().get("HOME") == home
    except psutil.Error:
        return False


def test_the_documented_cluster_commands_serve_an_image(tmp_path: Path) -> None:
    home = str(tmp_path)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "HOME": home, "PATH": path, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("RAY_AUTH_MODE", None)
    try:
        subprocess.run(["bash", "-euc", COMMANDS], cwd=ROOT, env=environment, check=True, stdin=subprocess.DEVNULL)
        wait_until(is_ready)
        assert ServedApplication().post({"prompt": "a red cube on sand", "seed": 1})[0] == 200
    finally:  # `ray stop` would stop every Ray cluster of this host
        for process in [candidate for candidate in psutil.process_iter() if has_home(candidate, home)]:
            process.kill()
