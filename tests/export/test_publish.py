"""`deploy/publish.py`, from a small checkpoint on a fake hub to an image on a host without PyTorch."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from published_host import NAME, SMALL_CHECKPOINTS, EmptyCacheHost
from stand_in_hub import COMMIT, PUBLIC_REPOSITORIES, REPOSITORIES, run

from lantern_rt import published

MISSING_MODULES = ["torch", "onnx", "safetensors", "transformers"]


@pytest.fixture(autouse=True)
def restore_repositories() -> Iterator[None]:
    repositories = dict(REPOSITORIES)
    yield
    REPOSITORIES.clear()
    REPOSITORIES.update(repositories)


def run_publish(host: EmptyCacheHost, *arguments: object) -> subprocess.CompletedProcess[str]:
    options = ("--table", host.folder / "models.json", "--work", host.folder / "work", *arguments)
    return run(host.hub, host.folder / "home", "deploy/publish.py", "owner", *map(str, options), HF_TOKEN="hf_token")


def read_table_row(host: EmptyCacheHost, name: str = NAME) -> dict[str, Any]:
    table: dict[str, dict[str, Any]] = json.loads((host.folder / "models.json").read_text("utf-8"))
    return table[name]


def test_publishing_a_bundle_again_changes_nothing(hub: str, tmp_path: Path) -> None:
    host = EmptyCacheHost(hub, tmp_path)
    assert run_publish(host, "--dry-run").stdout.startswith(f"{NAME} int8: downloads 1.0 MB, exports to ")
    assert "owner/llamagen-c2i-b-256-int8" not in REPOSITORIES
    process = run_publish(host)
    assert process.returncode == 0, process.stderr
    repository = f"owner/{NAME}-int8"
    files = REPOSITORIES[repository]
    digest = hashlib.sha256(files["bundle.json"]).hexdigest()
    names = [entry["path"] for entry in json.loads(files["bundle.json"])["files"].values()]
    size = sum(len(files[name]) for name in ["bundle.json", *names])
    expected = {"reference": f"hf:{repository}@{COMMIT}", "digest": digest, "download_bytes": size}
    assert (read_table_row(host)["bundles"], repository in PUBLIC_REPOSITORIES) == ({"int8": expected}, True)
    table = (tmp_path / "models.json").read_bytes()
    second_process = run_publish(host)
    assert (second_process.returncode, second_process.stderr) == (0, f"{NAME} int8: published already\n")
    assert (REPOSITORIES[repository], (tmp_path / "models.json").read_bytes()) == (files, table)
    host.missing_modules = MISSING_MODULES
    generated = host("run", NAME, "--class-id", 7, "--seed", 0, "--yes", "--output", tmp_path / "a.png", "--json")
    assert generated.returncode == 0, generated.stderr
    card = files["README.md"].decode()
    assert f"lantern-rt run {NAME}" in card
    assert "Licence of the weights: MIT. Memory for one image: " in card
    (image,) = json.loads(generated.stdout)["images"]
    codes = hashlib.sha256(np.asarray(image["codes"], "<i4").tobytes()).hexdigest()
    assert re.search(rf"class 7, seed 0, sjd, codes {codes}", card)
    assert "\nlicense: mit\n" in card
    host.missing_modules = []
    verified = host("verify", NAME, "--export")
    assert (verified.stdout, verified.returncode) == (f"{NAME} equals its export: {digest}\n", 0), verified.stderr
    (tmp_path / "1.png").write_bytes(files["samples/1.png"])
    with Image.open(tmp_path / "a.png") as first_image, Image.open(tmp_path / "1.png") as second_image:
        assert first_image.tobytes() == second_image.tobytes()


def test_after_a_model_that_fails_the_next_is_still_published(hub: str, tmp_path: Path) -> None:
    host = EmptyCacheHost(hub, tmp_path)
    missing_row = read_table_row(host) | {"files": read_table_row(host)["files"] | {"vq": "hf:owner/nothing/vq.pt"}}
    closed_row = read_table_row(host) | {"licence": "not stated"}
    (tmp_path / "models.json").write_text(json.dumps({"a": missing_row, "b": closed_row, NAME: read_table_row(host)}))
    process = run_publish(host, "a", "b", "c", NAME)
    lines = process.stderr.splitlines()
    assert process.returncode == 2
    assert "a int8: hf:owner/nothing/vq.pt: rejected by the hub" in process.stderr, lines
    assert "b int8: licence: found not stated, expected one that lets anyone publish the weights" in process.stderr
    assert "c int8: model: found 'c', expected the name of a published model" in process.stderr
    assert process.stdout == f"{NAME} int8: hf:owner/{NAME}-int8@{COMMIT}\n"
    assert (read_table_row(host, "a").get("bundles"), read_table_row(host, "b").get("bundles")) == ({}, {})


def test_a_bundle_unlike_its_checkpoint_is_not_published(hub: str, tmp_path: Path) -> None:
    host = EmptyCacheHost(hub, tmp_path)
    assert run_publish(host).returncode == 0
    del REPOSITORIES[f"owner/{NAME}-int8"]
    (tmp_path / "models.json").write_text(json.dumps({NAME: read_table_row(host) | {"bundles": {}}}))
    files = REPOSITORIES["FoundationVision/LlamaGen"]
    weights = torch.load(BytesIO(files["c2i_B_256.pt"]), weights_only=True)
    weights["model"]["output.weight"] *= -1
    torch.save(weights, changed_file := BytesIO())
    files["c2i_B_256.pt"] = changed_file.getvalue()
    shutil.rmtree(tmp_path / "home")
    process = run_publish(host)
    assert (process.returncode, "differs from its checkpoint" in process.stderr) == (2, True)
    assert REPOSITORIES.get(f"owner/{NAME}-int8") == {}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8", "fp16"])
@pytest.mark.parametrize("family", SMALL_CHECKPOINTS)
def test_published_bundles_of_every_family_need_no_pytorch(
    hub: str, tmp_path: Path, family: str, precision: str
) -> None:
    models = published.load_published_models()
    name_part = "t2i" if family == "text" else ""
    name = next(name for name, model in models.items() if name_part in name and family in (model.family, "text"))
    if (family, precision) == ("glm_image", "int8"):
        pytest.skip("rounding to int8 changes this small checkpoint by more than `verify` allows")
    host = EmptyCacheHost(hub, tmp_path, name, licence="MIT")
    process = run_publish(host, "--precision", precision)
    assert process.returncode == 0, process.stderr
    host.missing_modules = MISSING_MODULES
    if precision == "fp16":  # fp16 bundles are for GPUs
        return
    prompt = ["--class-id", "3"] if family == "llamagen" else ["a red cube"]
    generated = host("run", name, *prompt, "--yes", "--output", tmp_path / "out")
    assert generated.returncode == 0, generated.stderr
    assert f"MB from owner/{name}-int8 (licence: MIT)" in generated.stderr
