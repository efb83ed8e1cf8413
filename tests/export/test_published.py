"""Published models by name: downloaded from a stand-in for the hub, exported to the cache, and used."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from published_host import NAME, Host
from stand_in_hub import COMMIT, OLD, REPOSITORIES, STALLED, run, serve_hub

from lantern_rt import published
from lantern_rt.bundle.files import open_bundle
from lantern_rt.bundle.hub import parse_hub_reference
from lantern_rt.errors import CheckpointError


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    with serve_hub() as address:
        yield address


@pytest.fixture
def host(hub: str, tmp_path: Path) -> Host:
    return Host(hub, tmp_path)


def test_a_name_becomes_an_image_and_the_next_needs_no_hub(host: Host) -> None:
    first = host("run", NAME, "--class-id", 3, "--output", host.folder / "first.png")
    assert (first.returncode, first.stderr.count("\n")) == (2, 2)
    assert "1.0 MB from FoundationVision/LlamaGen (licence: MIT)" in first.stderr
    assert "--yes: found no terminal to ask in, expected --yes, to download it" in first.stderr
    assert not host.cache.exists()
    image = host.generate("first.png")
    assert host.bundles == [f"{NAME}@int8"]
    again = host.generate("second.png", hub="http://127.0.0.1:9")
    with Image.open(image) as first_image, Image.open(again) as second_image:
        assert first_image.tobytes() == second_image.tobytes()
    replayed = host("run", "--from", image, "--output", host.folder / "third.png")
    assert replayed.returncode == 0, replayed.stderr
    (listed,) = json.loads(host("models", "--json").stdout)["models"]
    assert (listed["name"], listed["cached"]) == (NAME, [str(host.cache / f"{NAME}@int8")])
    assert "in the cache" in host("models").stdout
    assert host("models", "--remove", NAME).returncode == 0
    assert host.bundles == []
    missing = host("inspect", NAME)
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)
    assert "a published model that is not in the cache" in missing.stderr


def test_in_a_terminal_it_asks(host: Host) -> None:
    leader, follower = pty.openpty()
    program = host.start("run", NAME, "--class-id", 3, stdin=follower, stderr=subprocess.PIPE, cwd=host.folder)
    os.write(leader, b"n\n")
    _, errors = program.communicate(timeout=60)
    os.close(leader)
    os.close(follower)
    assert program.returncode == 2
    assert "Download it?" in errors
    assert not (host.folder / "home").exists()


@pytest.mark.slow
def test_python_downloads_only_if_told_to(host: Host) -> None:
    code = (
        "import sys; from pathlib import Path; from lantern_rt import Pipeline, BundleError, published\n"
        "published.TABLE = Path(sys.argv[1])\n"
        f"try: Pipeline.from_bundle({NAME!r})\n"
        "except BundleError as error: print(error.remedy)\n"
        f"with Pipeline.from_bundle({NAME!r}, download=True) as pipe: print(pipe(class_ids=3).settings.method)\n"
    )
    further = {"LANTERN_RT_CACHE": str(host.cache)}
    done = run(host.hub, host.folder / "home", "-c", code, str(host.folder / "models.json"), **further)
    assert done.returncode == 0, done.stderr
    remedy, method = done.stdout.splitlines()
    assert (remedy, method != "") == (f"`lantern-rt run {NAME}` downloads it; in Python, download=True", True)


@pytest.mark.slow
def test_export_takes_a_name_and_options_replace_its_settings(host: Host) -> None:
    folder = host.folder / "bundle"
    done = host("export", NAME, "--precision", "fp16", "--output", folder)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((folder / "bundle.json").read_text())
    assert (manifest["family"], manifest["target"]["precision"]) == ("llamagen", "fp16")
    origins = {source["role"]: source["origin"] for source in manifest["provenance"]["sources"]}
    assert origins["target"] == f"hf:FoundationVision/LlamaGen/c2i_B_256.pt@{COMMIT}"


def test_a_download_that_was_killed_goes_on(host: Host) -> None:
    STALLED.add("vq_ds16_c2i.pt")
    program = host.start("run", NAME, "--class-id", 3, "--yes", stderr=subprocess.DEVNULL, cwd=host.folder)
    try:
        _wait_for(lambda: "vq_ds16_c2i.pt" not in STALLED)  # requested
    finally:
        os.killpg(program.pid, signal.SIGKILL)
        program.wait()
    assert host.bundles == []
    STALLED.add("c2i_B_256.pt")  # complete, so not downloaded again
    try:
        host.generate("image.png")
        assert "c2i_B_256.pt" in STALLED
    finally:
        STALLED.clear()


def test_programs_that_need_the_same_model_export_it_once(host: Host) -> None:
    commands = [("run", NAME, "--class-id", 3, "--yes", "--output", host.folder / f"{i}.png") for i in range(3)]
    programs = [host.start(*command, stderr=subprocess.PIPE) for command in commands]
    errors = [program.communicate(timeout=240)[1] for program in programs]
    assert [program.returncode for program in programs] == [0] * 3, errors
    assert sum("comparing" in text or "verif" in text for text in errors) == 1, errors
    assert sum("waiting for another program" in text for text in errors) == 2, errors


@pytest.mark.slow
def test_an_export_that_was_killed_leaves_nothing_that_is_used(host: Host) -> None:
    program = host.start("run", NAME, "--class-id", 3, "--yes", stderr=subprocess.DEVNULL, cwd=host.folder)
    try:
        _wait_for(lambda: [*host.cache.glob(".*.partial/new/*.onnx")])
    finally:
        os.killpg(program.pid, signal.SIGKILL)
        program.wait()
    host.generate("image.png")
    assert host.bundles == [f"{NAME}@int8"]


@pytest.mark.slow
def test_a_pinned_revision_is_what_is_used_whatever_was_uploaded_since(hub: str, tmp_path: Path) -> None:
    host = Host(hub, tmp_path, revision=f"@{OLD}")
    repository = "FoundationVision/LlamaGen"
    REPOSITORIES[f"{repository}@{OLD}"] = dict(REPOSITORIES[repository])
    REPOSITORIES[repository] = dict.fromkeys(REPOSITORIES[repository], b"changed")
    try:
        host.generate("image.png")
        manifest = json.loads((host.cache / f"{NAME}@int8" / "bundle.json").read_text())
        assert all(source["origin"].endswith(f"@{OLD}") for source in manifest["provenance"]["sources"])
        missing_revision = Host(hub, tmp_path, revision="@v9")
        missing_revision.generate("again.png")  # the cache still has it
        missing_revision("models", "--remove", NAME)
        rejected = missing_revision("run", NAME, "--class-id", 3, "--yes")
        assert (rejected.returncode, "rejected by the hub" in rejected.stderr) == (2, True)
    finally:
        REPOSITORIES[repository] = REPOSITORIES.pop(f"{repository}@{OLD}")


@pytest.mark.slow
def test_without_a_network_one_line_says_what_to_do(host: Host) -> None:
    done = host("run", NAME, "--class-id", 3, "--yes", hub="http://127.0.0.1:9")
    assert done.returncode == 2
    assert "the hub cannot be reached" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", published.load_published_models())
def test_every_published_model_goes_from_its_name_to_an_image(hub: str, tmp_path: Path, name: str) -> None:
    host = Host(hub, tmp_path, name)
    model = published.find_published_model(name)
    subject = ["a red cube"] if model.family != "llamagen" or "t2i" in name else ["--class-id", "3"]
    suffix = ".npz" if model.family == "glm_image" else ".png"
    done = host("run", name, *subject, "--yes", "--output", tmp_path / f"image{suffix}")
    assert done.returncode == 0, done.stderr
    if suffix == ".npz":
        with np.load(tmp_path / "image.npz") as file:
            assert json.loads(str(file["recipe"]))["bundle"] == name
        # Without a network, the export reads the downloaded files.
        shutil.rmtree(host.cache)
        done = host("run", name, *subject, "--yes", "--output", tmp_path / "again.npz", hub="http://127.0.0.1:9")
        assert done.returncode == 0, done.stderr
        return
    with Image.open(tmp_path / "image.png") as image:
        assert image.width > 0
        assert image.info["bundle"] == name
    manifest = open_bundle(host.cache / f"{name}@int8").manifest
    assert manifest.sampling.cfg_scale == (model.cfg_scale or manifest.sampling.cfg_scale)
    for reference in model.files.values():
        REPOSITORIES.pop(parse_hub_reference(reference, CheckpointError)[0], None)


def _wait_for(condition: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
