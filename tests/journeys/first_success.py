"""Seconds until five kinds of users have their first success, each in a fresh clone and a fresh environment.

    python tests/journeys/first_success.py [ROLE]...

The seconds include `git clone` and `pip install`, and depend on the network and pip's cache.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
INSTALL = "pip install -q -c constraints.txt -e"
TORCH = "export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu;"  # without the CUDA libraries
# Shell commands of each role. The last command is the success.
ROLES = {
    "for fun": f"""
        {INSTALL} ".[cpu,serve]"
        lantern-rt run "a large red sphere left of a small blue cube on grass at sunset" --output first.png
    """,
    "own checkpoint": f"""
        {TORCH} {INSTALL} ".[cpu,export]"
        python examples/small_checkpoint.py
        lantern-rt export small/c2i.pt --config small/config.json --vq small/vq.pt --output small-bundle
        lantern-rt verify small-bundle small/c2i.pt small/vq.pt small/config.json
        lantern-rt run small-bundle --class-id 3 --output first.png
    """,
    "production": f"""
        {INSTALL} ".[cpu,serve]"
        echo "secret" > keys.txt
        lantern-rt serve --port 8765 --api-key-file keys.txt & server=$!; trap "kill $server" EXIT
        until curl -sf localhost:8765/readyz; do sleep 0.2; done
        curl -sf localhost:8765/v1/images/generations -H "Authorization: Bearer secret" \\
            -H "content-type: application/json" -d '{{"prompt": "a red cube on sand"}}'
    """,
    "research": f"""
        {INSTALL} ".[cpu]"
        lantern-rt bench --method sjd --method lantern++ --count 3
    """,
    "contributing": f"""
        {TORCH} {INSTALL} ".[cpu,export,dev]"
        pytest -q -m quick -n 2
    """,
}


def measure_role(role: str, folder: Path) -> float:
    began = time.perf_counter()
    clone = folder / "clone"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    script = f'set -e; export PATH="{folder}/venv/bin:$PATH" HOME="{folder}"; {ROLES[role]}'
    with (folder / "log").open("w") as log:
        subprocess.run(["bash", "-c", script], cwd=clone, check=True, stdout=log, stderr=log)
    return time.perf_counter() - began


def main() -> None:
    for role in sys.argv[1:] or ROLES:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{role:16}{measure_role(role, Path(folder)):7.0f} s", flush=True)


if __name__ == "__main__":
    main()
