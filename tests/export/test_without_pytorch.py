"""Published bundles of all models with an open licence generate images on a host without PyTorch.

The Python of an environment without PyTorch is in the variable LANTERN_WITHOUT_PYTORCH, which the nox session `wheel`
sets. Without this variable, the current Python runs the programs, and imports of PyTorch and ONNX fail.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from published_host import SMALL_CHECKPOINTS
from stand_in_hub import COMMIT, COMPLETED_BYTES, REPOSITORIES, environment

from lantern_rt import published
from lantern_rt.export.graph.precision import parse_precisions
from lantern_rt.export.registry import read_family_checkpoints
from lantern_rt.export.writer import export_model

PYTHON_WITHOUT_PYTORCH = os.environ.get("LANTERN_WITHOUT_PYTORCH")
BLOCKED_MODULES = [] if PYTHON_WITHOUT_PYTORCH else ["torch", "onnx", "safetensors", "transformers"]
# Program that runs several commands in one process. Arguments: modules that cannot be imported, table, commands.
PROGRAM = """
import json, sys
from importlib.util import find_spec
from pathlib import Path
absent, table, commands = sys.argv[1:]
sys.modules |= dict.fromkeys(json.loads(absent))
for name in {"torch", "onnx"} - {*json.loads(absent)}:
    assert find_spec(name) is None
from lantern_rt import published
from lantern_rt.cli.main import run_program
published.TABLE = Path(table)
sys.exit(sum(run_program(command) != 0 for command in json.loads(commands)))
"""


@pytest.fixture
def table_rows(tmp_path: Path) -> dict[str, Any]:
    """Return table rows of all models with an open licence, and store their bundles on the fake hub."""
    rows: dict[str, Any] = {}
    exports: dict[str, dict[str, bytes]] = {}
    for name, model in published.load_published_models().items():
        if model.licence not in ("MIT", "Apache-2.0"):
            continue
        if model.family not in exports:
            folder = tmp_path / model.family
            folder.mkdir()
            sources, other_options = SMALL_CHECKPOINTS[model.family](folder)
            options = {role: str(path) for role, path in sources.items()} | other_options
            contents = read_family_checkpoints(model.family, options, lambda *_: None)
            output = export_model(contents, folder / "bundle", name="NAME", precisions=parse_precisions(target="int8"))
            exports[model.family] = {path.name: path.read_bytes() for path in output.iterdir()}
        files = dict(exports[model.family])
        files["bundle.json"] = files["bundle.json"].replace(b'"NAME"', json.dumps(name).encode())
        REPOSITORIES[f"owner/{name}"] = files | {"README.md": b"is not downloaded"}
        digest = hashlib.sha256(files["bundle.json"]).hexdigest()
        size = sum(map(len, files.values()))
        bundle = {"reference": f"hf:owner/{name}@{COMMIT}", "digest": digest, "download_bytes": size}
        rows[name] = model.model_dump() | {"memory_bytes": 1, "bundles": {"int8": bundle}}
    return rows


@pytest.mark.slow
def test_models_of_open_licence_generate_without_pytorch(hub: str, tmp_path: Path, table_rows: dict[str, Any]) -> None:
    assert {"llamagen", "emu3", "emu35"} <= {row["family"] for row in table_rows.values()}
    table = tmp_path / "models.json"
    table.write_text(json.dumps(table_rows))

    def start_program(output: Path, address: str, **options: Any) -> subprocess.Popen[str]:
        commands = []
        for name in table_rows:
            condition = json.loads(REPOSITORIES[f"owner/{name}"]["bundle.json"])["condition"]
            prompt = ["--class-id", "3"] if condition["kind"] == "class" else ["a fox"]
            commands.append(["run", name, *prompt, "--seed", "1", "--yes", "--output", str(output / f"{name}.png")])
        output.mkdir(exist_ok=True)
        variables = environment(address, tmp_path / "home", LANTERN_RT_CACHE=str(tmp_path / "bundles"))
        command = [
            PYTHON_WITHOUT_PYTORCH or sys.executable,
            "-c",
            PROGRAM,
            json.dumps(BLOCKED_MODULES),
            str(table),
            json.dumps(commands),
        ]
        return subprocess.Popen(command, env=variables, cwd=output, text=True, start_new_session=True, **options)

    first_folder = tmp_path / "first"
    second_folder = tmp_path / "again"
    for folder, address in ((first_folder, hub), (second_folder, "http://127.0.0.1:9")):  # no hub on port 9
        program = start_program(folder, address, stderr=subprocess.PIPE)
        _, errors = program.communicate(timeout=300)
        assert program.returncode == 0, errors
    # The hub sent each file of a bundle once, and no other file.
    bundles = {name: row["bundles"]["int8"] for name, row in table_rows.items()}
    assert {name: COMPLETED_BYTES[f"owner/{name}"] for name in table_rows} == {
        name: bundle["download_bytes"] for name, bundle in bundles.items()
    }
    for name, bundle in bundles.items():
        with (
            Image.open(first_folder / f"{name}.png") as first_image,
            Image.open(second_folder / f"{name}.png") as second_image,
        ):
            assert first_image.info["bundle_digest"] == bundle["digest"]
            assert first_image.tobytes() == second_image.tobytes()
