"""The page `docs/published.md`: generated from the table of models, with commands that run on small weights."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from PIL import Image
from published_host import SMALL_CHECKPOINTS, EmptyCacheHost
from stand_in_hub import run

from lantern_rt import published

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/published.md").read_text("utf-8")
# Program that runs Python code with another table of models. Arguments: path of the table, code.
TABLE_PROGRAM = """
import sys
from pathlib import Path
from lantern_rt import published
published.TABLE = Path(sys.argv[1])
exec(sys.argv[2])
"""


def test_the_page_is_generated_from_the_table_of_models() -> None:
    assert runpy.run_path(str(ROOT / "docs/published.py"))["page"]() == PAGE


@pytest.mark.slow
@pytest.mark.parametrize("family", SMALL_CHECKPOINTS)
def test_a_models_commands_and_python_code_run(hub: str, tmp_path: Path, family: str) -> None:
    models = published.load_published_models()
    name_part = "t2i" if family == "text" else ""
    name = next(name for name, model in models.items() if name_part in name and family in (model.family, "text"))
    host = EmptyCacheHost(hub, tmp_path, name)
    # The small class-conditional model has no class 207.
    text = re.findall(rf"^## {name}\n(.*?)(?=^## |\Z)", PAGE.replace("207", "7"), re.MULTILINE | re.DOTALL)[0]
    command, *curl_commands = re.findall(r"^```sh\n(.*)\n```$", text, re.MULTILINE)
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    words = ["run", name, *re.findall(r'"(.*)"|(\S+)', command.partition(f"{name} ")[2])]
    arguments = [word if isinstance(word, str) else "".join(word) for word in words]
    process = host(*arguments, "--yes", "--output", tmp_path / "out")
    assert process.returncode == 0, process.stderr
    code = code.replace("image.png", str(tmp_path / "image.png"))
    python = run(hub, tmp_path / "home", "-c", TABLE_PROGRAM, str(tmp_path / "models.json"), code,
                 LANTERN_RT_CACHE=str(host.cache))  # fmt: skip
    assert python.returncode == 0, python.stderr
    if not models[name].makes_images:
        assert not curl_commands
        return
    with Image.open(tmp_path / "image.png") as image:
        assert image.info["bundle"] == name
    if not shutil.which("curl"):
        pytest.skip("no curl")
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        port = free_socket.getsockname()[1]
    server = host.start("serve", name, "--port", port, stderr=subprocess.DEVNULL, cwd=tmp_path)
    try:
        wait_until_ready(port)
        line = curl_commands[0].replace("localhost:8000", f"127.0.0.1:{port}")
        response = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout
        assert "b64_json" in json.loads(response)["data"][0], response
    finally:
        server.terminate()
        server.wait()


def wait_until_ready(port: int) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        try:
            urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5)
        except (URLError, ConnectionError):
            time.sleep(0.2)
        else:
            return
    sys.exit("the server does not become ready")
