"""Published models by name: downloaded from a fake hub, exported to the bundle cache, and used."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from published_host import NAME, SMALL_CHECKPOINTS, EmptyCacheHost
from stand_in_hub import COMMIT, OLD_COMMIT, REPOSITORIES, STALLING_FILES, run

from lantern_rt import published
from lantern_rt.bundle.files import open_bundle
from lantern_rt.bundle.hub import parse_hub_reference
from lantern_rt.errors import CheckpointError


@pytest.fixture
def host(hub: str, tmp_path: Path) -> EmptyCacheHost:
    return EmptyCacheHost(hub, tmp_path)


def test_a_published_model_is_downloaded_once(host: EmptyCacheHost) -> None:
    unconfirmed = host("run", NAME, "--class-id", 3, "--output", host.folder / "first.png")
    assert (unconfirmed.returncode, unconfirmed.stderr.count("\n")) == (2, 2)
    assert "1.0 MB from FoundationVision/LlamaGen (licence: MIT)" in unconfirmed.stderr
    assert "--yes: found no terminal to ask in, expected --yes, to download it" in unconfirmed.stderr
    assert not host.cache.exists()
    first_path = host.generate("first.png")
    assert host.bundles == [f"{NAME}@int8"]
    second_path = host.generate("second.png", hub="http://127.0.0.1:9")  # nothing listens on this port
    with Image.open(first_path) as first_image, Image.open(second_path) as second_image:
        assert first_image.tobytes() == second_image.tobytes()
    replayed = host("run", "--from", first_path, "--output", host.folder / "third.png")
    assert replayed.returncode == 0, replayed.stderr
    (listed,) = json.loads(host("models", "--json").stdout)["models"]
    assert (listed["name"], listed["cached"]) == (NAME, [str(host.cache / f"{NAME}@int8")])
    assert "in the cache" in host("models").stdout
    folder = host.cache / f"{NAME}@int8"
    graph = folder / "target.onnx"
    graph.write_bytes(graph.read_bytes()[:-1] + b"\x00")
    damaged = host("run", NAME, "--class-id", 3, "--output", host.folder / "fourth.png")
    assert damaged.stderr.endswith(f"; delete {folder}; `lantern-rt run {NAME}` then exports it again\n")
    manifest = (folder / "bundle.json").read_text()
    (folder / "bundle.json").write_text(re.sub('"format_version": *"[^"]*"', '"format_version":"2.9"', manifest))
    inspected = host("inspect", NAME)
    assert (inspected.returncode, inspected.stderr.count("\n")) == (2, 1)
    assert f"published model {NAME}: {folder} is incomplete, damaged or of another release; " in inspected.stderr
    replaced = host("run", NAME, "--class-id", 3, "--seed", 0, "--yes", "--output", host.folder / "fourth.png")
    assert f"{folder} is incomplete, damaged or of another release, and is replaced\n" in replaced.stderr
    assert (host.folder / "fourth.png").read_bytes() == first_path.read_bytes()
    shutil.rmtree(folder)
    assert f"published model {NAME}: not in the cache; " in host("inspect", NAME).stderr


def test_in_a_terminal_the_program_asks_before_the_download(host: EmptyCacheHost) -> None:
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
def test_from_bundle_downloads_only_with_download_true(host: EmptyCacheHost) -> None:
    code = (
        "import sys; from pathlib import Path; from lantern_rt import Pipeline, BundleError, published\n"
        "published.TABLE = Path(sys.argv[1])\n"
        f"try: Pipeline.from_bundle({NAME!r})\n"
        "except BundleError as error: print(error.remedy)\n"
        f"with Pipeline.from_bundle({NAME!r}, download=True) as pipe: print(pipe(class_ids=3).settings.method)\n"
    )
    variables = {"LANTERN_RT_CACHE": str(host.cache)}
    process = run(host.hub, host.folder / "home", "-c", code, str(host.folder / "models.json"), **variables)
    assert process.returncode == 0, process.stderr
    remedy, method = process.stdout.splitlines()
    assert (remedy, method != "") == (f"`lantern-rt run {NAME}` downloads it; in Python, download=True", True)


@pytest.mark.slow
def test_export_accepts_a_published_name_and_other_options(host: EmptyCacheHost) -> None:
    folder = host.folder / "bundle"
    process = host("export", NAME, "--precision", "fp16", "--output", folder)
    assert process.returncode == 0, process.stderr
    manifest = json.loads((folder / "bundle.json").read_text())
    assert (manifest["family"], manifest["target"]["precision"]) == ("llamagen", "fp16")
    origins = {source["role"]: source["origin"] for source in manifest["provenance"]["sources"]}
    assert origins["target"] == f"hf:FoundationVision/LlamaGen/c2i_B_256.pt@{COMMIT}"


def test_a_killed_download_continues_with_the_missing_files(host: EmptyCacheHost) -> None:
    STALLING_FILES.add("vq_ds16_c2i.pt")
    host.kill_when(lambda: "vq_ds16_c2i.pt" not in STALLING_FILES)  # the file is requested
    assert host.bundles == []
    STALLING_FILES.add("c2i_B_256.pt")  # a request for this file would stall, but the file is complete already
    try:
        host.generate("image.png")
        assert "c2i_B_256.pt" in STALLING_FILES
    finally:
        STALLING_FILES.clear()


def test_programs_that_need_a_model_at_once_export_it_once(host: EmptyCacheHost) -> None:
    (host.cache / f".{NAME}@int8.lock").mkdir(parents=True)  # a lock is no file, which could be another user's
    commands = [("run", NAME, "--class-id", 3, "--yes", "--output", host.folder / f"{i}.png") for i in range(3)]
    programs = [host.start(*command, stderr=subprocess.PIPE) for command in commands]
    errors = [program.communicate(timeout=240)[1] for program in programs]
    assert [program.returncode for program in programs] == [0] * 3, errors
    assert sum("comparing" in text or "verif" in text for text in errors) == 1, errors
    assert sum("waiting for another program" in text for text in errors) == 2, errors


@pytest.mark.slow
def test_files_of_a_killed_export_are_not_used_again(host: EmptyCacheHost) -> None:
    host.kill_when(lambda: [*host.cache.glob(".*.partial/new/*.onnx")])
    host.generate("image.png")
    assert host.bundles == [f"{NAME}@int8"]


@pytest.mark.slow
def test_a_model_with_a_pinned_revision_ignores_later_uploads(hub: str, tmp_path: Path) -> None:
    host = EmptyCacheHost(hub, tmp_path, revision=f"@{OLD_COMMIT}")
    repository = "FoundationVision/LlamaGen"
    REPOSITORIES[f"{repository}@{OLD_COMMIT}"] = dict(REPOSITORIES[repository])
    REPOSITORIES[repository] = dict.fromkeys(REPOSITORIES[repository], b"changed")
    try:
        host.generate("image.png")
        manifest = json.loads((host.cache / f"{NAME}@int8" / "bundle.json").read_text())
        assert all(source["origin"].endswith(f"@{OLD_COMMIT}") for source in manifest["provenance"]["sources"])
        missing_revision = EmptyCacheHost(hub, tmp_path, revision="@v9")
        missing_revision.generate("again.png")  # the cache still has the bundle
        shutil.rmtree(host.cache)
        rejected = missing_revision("run", NAME, "--class-id", 3, "--yes")
        assert (rejected.returncode, "rejected by the hub" in rejected.stderr) == (2, True)
    finally:
        REPOSITORIES[repository] = REPOSITORIES.pop(f"{repository}@{OLD_COMMIT}")


@pytest.mark.slow
def test_without_a_network_the_last_line_names_the_hub(host: EmptyCacheHost) -> None:
    process = host("run", NAME, "--class-id", 3, "--yes", hub="http://127.0.0.1:9")
    assert process.returncode == 2
    assert "the hub cannot be reached" in process.stderr.splitlines()[-1]
    assert "Traceback" not in process.stderr


def list_names() -> Iterator[Any]:
    """Yield the published models; all but the first with the same family and kinds of files are for every week."""
    kinds = set()
    for name, model in published.load_published_models().items():
        kind = (model.family, *model.files)
        yield pytest.param(name, marks=pytest.mark.weekly if kind in kinds else ())
        kinds.add(kind)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*list_names()])
def test_every_published_model_generates_an_image_by_name(hub: str, tmp_path: Path, name: str) -> None:
    host = EmptyCacheHost(hub, tmp_path, name)
    model = published.find_published_model(name)
    prompt = ["--class-id", "3"] if model.classes else ["a red cube"]
    suffix = ".npz" if model.family == "glm_image" else ".png"
    process = host("run", name, *prompt, "--yes", "--output", tmp_path / f"image{suffix}")
    assert process.returncode == 0, process.stderr
    if suffix == ".npz":
        with np.load(tmp_path / "image.npz") as file:
            assert json.loads(str(file["recipe"]))["bundle"] == name
        # Without a network, the export reads the downloaded files.
        shutil.rmtree(host.cache)
        process = host("run", name, *prompt, "--yes", "--output", tmp_path / "again.npz", hub="http://127.0.0.1:9")
        assert process.returncode == 0, process.stderr
        return
    with Image.open(tmp_path / "image.png") as image:
        assert image.width > 0
        assert image.info["bundle"] == name
    manifest = open_bundle(host.cache / f"{name}@int8").manifest
    assert manifest.sampling.cfg_scale == (model.cfg_scale or manifest.sampling.cfg_scale)
    for reference in model.files.values():
        REPOSITORIES.pop(parse_hub_reference(reference, CheckpointError)[0], None)


# Program that runs Python code with another table of models. Arguments: path of the table, code.
TABLE_PROGRAM = """
import sys
from pathlib import Path
from lantern_rt import published
published.TABLE = Path(sys.argv[1])
exec(sys.argv[2])
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", SMALL_CHECKPOINTS)
def test_the_commands_that_models_name_prints_run_on_small_weights(hub: str, tmp_path: Path, family: str) -> None:
    models = published.load_published_models()
    name_part = "t2i" if family == "text" else ""
    name = next(name for name, model in models.items() if name_part in name and family in (model.family, "text"))
    host = EmptyCacheHost(hub, tmp_path, name)
    # The small class-conditional model has no class 207.
    command, code, *server = host("models", name).stdout.replace("207", "7").split("\n\n")[1:]
    process = host(*shlex.split(command)[1:], "--yes", "--output", tmp_path / "out")
    assert process.returncode == 0, process.stderr
    code = code.replace("image.png", str(tmp_path / "image.png"))
    variables = {"LANTERN_RT_CACHE": str(host.cache)}
    process = run(hub, tmp_path / "home", "-c", TABLE_PROGRAM, str(tmp_path / "models.json"), code, **variables)
    assert process.returncode == 0, process.stderr
    assert bool(server) == models[name].makes_images
    if not server:
        return
    with Image.open(tmp_path / "image.png") as image:
        assert image.info["bundle"] == name
    if not shutil.which("curl"):
        pytest.skip("no curl")
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        port = free_socket.getsockname()[1]
    command, request = server[0].splitlines()
    program = host.start(*shlex.split(command)[1:], "--port", port, stderr=subprocess.DEVNULL, cwd=tmp_path)
    try:
        request = request.replace("localhost:8000", f"127.0.0.1:{port}").replace("curl", "curl --retry-connrefused", 1)
        command = f"{request} --fail --retry 60 --retry-delay 1"
        response = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
        assert "b64_json" in json.loads(response)["data"][0], response
    finally:
        program.terminate()
        program.wait()
