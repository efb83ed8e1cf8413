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

REPOSITORY = f"owner/{NAME}-int8"
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


@pytest.fixture(scope="module")
def publication(hub: str, tmp_path_factory: pytest.TempPathFactory) -> EmptyCacheHost:
    """Publish a bundle once for all tests."""
    host = EmptyCacheHost(hub, tmp_path_factory.mktemp("publication"))
    assert run_publish(host, "--dry-run").stdout.startswith(f"{NAME} int8: downloads 1.0 MB, exports to ")
    assert REPOSITORY not in REPOSITORIES
    process = run_publish(host)
    assert process.returncode == 0, process.stderr
    return host


@pytest.fixture
def unpublished(publication: EmptyCacheHost, tmp_path: Path) -> EmptyCacheHost:
    """Return a host that has exported the bundle, but has not published it."""
    host = EmptyCacheHost(publication.hub, tmp_path)
    shutil.copytree(publication.folder / "work", tmp_path / "work")
    del REPOSITORIES[REPOSITORY]
    return host


def test_the_table_has_the_published_bundle_which_is_not_published_again(publication: EmptyCacheHost) -> None:
    files = dict(REPOSITORIES[REPOSITORY])
    digest = hashlib.sha256(files["bundle.json"]).hexdigest()
    names = [entry["path"] for entry in json.loads(files["bundle.json"])["files"].values()]
    size = sum(len(files[name]) for name in ["bundle.json", *names])
    expected = {"reference": f"hf:{REPOSITORY}@{COMMIT}", "digest": digest, "download_bytes": size}
    assert (read_table_row(publication)["bundles"], REPOSITORY in PUBLIC_REPOSITORIES) == ({"int8": expected}, True)
    table = (publication.folder / "models.json").read_bytes()
    process = run_publish(publication)
    assert (process.returncode, process.stderr) == (0, f"{NAME} int8: published already\n")
    assert (REPOSITORIES[REPOSITORY], (publication.folder / "models.json").read_bytes()) == (files, table)


def test_a_published_bundle_generates_its_samples_without_pytorch_and_equals_its_export(
    publication: EmptyCacheHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publication, "missing_modules", MISSING_MODULES)
    files = REPOSITORIES[REPOSITORY]
    arguments = ("--class-id", 7, "--seed", 0, "--yes", "--output", tmp_path / "a.png", "--json")
    generated = publication("run", NAME, *arguments)
    assert generated.returncode == 0, generated.stderr
    card = files["README.md"].decode()
    assert f"lantern-rt run {NAME}" in card
    assert "Licence of the weights: MIT. Memory for one image: " in card
    (image,) = json.loads(generated.stdout)["images"]
    codes = hashlib.sha256(np.asarray(image["codes"], "<i4").tobytes()).hexdigest()
    assert re.search(rf"class 7, seed 0, sjd, codes {codes}", card)
    assert "\nlicense: mit\n" in card
    with Image.open(tmp_path / "a.png") as first_image, Image.open(BytesIO(files["samples/1.png"])) as second_image:
        assert first_image.tobytes() == second_image.tobytes()
    monkeypatch.undo()
    verified = publication("verify", NAME, "--export")
    expected = f"{NAME} equals its export: {hashlib.sha256(files['bundle.json']).hexdigest()}\n"
    assert (verified.stdout, verified.returncode) == (expected, 0), verified.stderr


def test_after_a_model_that_fails_the_next_is_still_published(unpublished: EmptyCacheHost) -> None:
    row = read_table_row(unpublished)
    missing_row = row | {"files": row["files"] | {"vq": "hf:owner/nothing/vq.pt"}}
    rows = {"a": missing_row, "b": row | {"licence": "not stated"}, NAME: row}
    (unpublished.folder / "models.json").write_text(json.dumps(rows))
    process = run_publish(unpublished, "a", "b", "c", NAME)
    assert process.returncode == 2
    assert "a int8: hf:owner/nothing/vq.pt: rejected by the hub" in process.stderr
    assert "b int8: licence: found not stated, expected one that lets anyone publish the weights" in process.stderr
    assert "c int8: model: found 'c', expected the name of a published model" in process.stderr
    assert process.stdout == f"{NAME} int8: hf:owner/{NAME}-int8@{COMMIT}\n"
    assert [read_table_row(unpublished, name).get("bundles") for name in ("a", "b")] == [{}, {}]


def test_a_bundle_unlike_its_checkpoint_is_not_published(
    unpublished: EmptyCacheHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = REPOSITORIES["FoundationVision/LlamaGen"]
    weights = torch.load(BytesIO(files["c2i_B_256.pt"]), weights_only=True)
    weights["model"]["output.weight"] *= -1
    torch.save(weights, changed_file := BytesIO())
    monkeypatch.setitem(files, "c2i_B_256.pt", changed_file.getvalue())
    process = run_publish(unpublished)
    assert (process.returncode, "differs from its checkpoint" in process.stderr) == (2, True)
    assert REPOSITORIES[REPOSITORY] == {}


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
