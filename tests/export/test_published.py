"""Published models by name: downloaded from a stand-in for the hub, exported to the cache, and used."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_copies import EMU35, EMU35_VQ, copied
from checkpoint_copies import published as save_published
from PIL import Image
from random_drafter import save_random_drafter
from small_janus import random_janus, write_janus
from small_models import save_t5
from stand_in_hub import COMMIT, OLD, REPOSITORIES, STALLED, environment, run, serve_hub

from lantern_rt import published
from lantern_rt.bundle.files import open_bundle
from lantern_rt.bundle.hub import parse_reference
from lantern_rt.errors import CheckpointError

DATA = Path(__file__).parent.parent / "data"
NAME = "llamagen-c2i-b-256"
Sources = tuple[dict[str, Path], dict[str, int]]  # checkpoints and other options, as `export` takes them
# The command line with another table of models.
PROGRAM = """
import sys
from pathlib import Path
from lantern_rt import published
published.TABLE = Path(sys.argv.pop(1))
from lantern_rt.cli.main import main
main(sys.argv[1:])
"""


def small_llamagen(_: Path) -> Sources:
    folder = DATA / "llamagen-c2i"
    vq = DATA / "llamagen-vq/vq_tiny.pt"
    return {"target": folder / "c2i_tiny.pt", "vq": vq, "config": folder / "config.json"}, {}


def small_text(folder: Path) -> Sources:
    save_t5(folder / "t5")
    model = DATA / "llamagen-t2i"
    files = {"target": model / "t2i_tiny.pt", "config": model / "config.json", "vq": DATA / "llamagen-vq/vq_tiny.pt"}
    return files | {"drafter": DATA / "lantern-drafter-llamagen", "text_encoder": folder / "t5"}, {}


def small_anole(_: Path) -> Sources:
    vq = DATA / "chameleon-vqgan/vqgan.ckpt"
    return {"target": DATA / "anole/target", "vq": vq, "drafter": DATA / "anole/drafter"}, {"grid": 8}


def small_lumina(folder: Path) -> Sources:
    save_random_drafter(folder / "drafter")
    vq = DATA / "chameleon-vqgan/vqgan.ckpt"
    return {"target": DATA / "lumina-mgpt/model", "vq": vq, "drafter": folder / "drafter"}, {"grid": 6}


def small_lumina2(_: Path) -> Sources:
    folder = DATA / "lumina-mgpt-2"
    return {"target": folder / "model", "vq": folder / "movqgan/270M/movqgan_270M.ckpt"}, {"grid": 8}


def small_glm_image(_: Path) -> Sources:
    return {"target": DATA / "glm-image"}, {"grid": 2}


def small_janus(folder: Path) -> Sources:
    write_janus(random_janus(), folder / "janus")
    return {"target": folder / "janus"}, {}


def small_emu3(folder: Path) -> Sources:
    target, vq = save_published(folder)
    return {"target": target, "vq": vq}, {"grid": 4}


def small_emu35(folder: Path) -> Sources:
    copied(EMU35, folder / "emu35", config=lambda config: config.pop("max_position_embeddings"))
    return {"target": folder / "emu35", "vq": EMU35_VQ}, {}


def small_simplear(_: Path) -> Sources:
    return {"target": DATA / "simplear/model", "vq": DATA / "simplear/cosmos"}, {"grid": 5}


SMALL: dict[str, Callable[[Path], Sources]] = {
    "llamagen": small_llamagen,
    "text": small_text,
    "anole": small_anole,
    "lumina": small_lumina,
    "lumina2": small_lumina2,
    "glm_image": small_glm_image,
    "janus": small_janus,
    "emu3": small_emu3,
    "emu35": small_emu35,
    "simplear": small_simplear,
}


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    with serve_hub() as address:
        yield address


class Host:
    """A host with empty caches, and the hub with a small model under a published name."""

    def __init__(self, hub: str, folder: Path, name: str = NAME, revision: str = "") -> None:
        self.hub = hub
        self.folder = folder
        self.cache = folder / "bundles"
        model = published.published_models()[name]
        sources, options = SMALL["text" if name.startswith("llamagen-t2i") else model.family](folder)
        files = dict(model.files)
        if "config" in sources:
            files["config"] = f"hf:{model.repositories[0]}/config.json"
        for role, reference in files.items():
            repository, file, _ = parse_reference(reference, CheckpointError)
            content = REPOSITORIES.setdefault(repository, {})
            source = sources[role]
            if file is None:
                paths = [path for path in source.rglob("*") if path.is_file() and path.suffix != ".npz"]
                content |= {path.relative_to(source).as_posix(): path.read_bytes() for path in paths}
            else:
                content[file] = source.read_bytes()
        files = {role: f"{reference.partition('@')[0]}{revision}" for role, reference in files.items()}
        row = model.model_copy(
            update={"files": files, "options": options, "download_bytes": 1_000_000, "memory_bytes": 1}
        )
        (folder / "models.json").write_text(json.dumps({name: row.model_dump()}))

    def command(self, *arguments: object) -> list[str]:
        return ["-c", PROGRAM, str(self.folder / "models.json"), *map(str, arguments)]

    def __call__(self, *arguments: object, hub: str | None = None) -> subprocess.CompletedProcess[str]:
        further = {"LANTERN_RT_CACHE": str(self.cache)}
        return run(hub or self.hub, self.folder / "home", *self.command(*arguments), **further)

    def start(self, *arguments: object, **options: Any) -> subprocess.Popen[str]:
        variables = environment(self.hub, self.folder / "home", LANTERN_RT_CACHE=str(self.cache))
        command = [sys.executable, *self.command(*arguments)]
        return subprocess.Popen(command, env=variables, text=True, start_new_session=True, **options)

    def generate(self, name: str, hub: str | None = None) -> Path:
        image = self.folder / name
        done = self("run", NAME, "--class-id", 3, "--yes", "--output", image, hub=hub)
        assert done.returncode == 0, done.stderr
        return image


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
    assert [path.name for path in host.cache.iterdir()] == [f"{NAME}@int8"]
    again = host.generate("second.png", hub="http://127.0.0.1:9")
    with Image.open(image) as one, Image.open(again) as other:
        assert one.tobytes() == other.tobytes()
    replayed = host("run", "--from", image, "--output", host.folder / "third.png")
    assert replayed.returncode == 0, replayed.stderr
    (listed,) = json.loads(host("models", "--json").stdout)["models"]
    assert (listed["name"], listed["cached"]) == (NAME, [str(host.cache / f"{NAME}@int8")])
    assert "in the cache" in host("models").stdout
    assert host("models", "--remove", NAME).returncode == 0
    assert list(host.cache.iterdir()) == []
    missing = host("inspect", NAME)
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)
    assert "a published model that is not in the cache" in missing.stderr


def test_in_a_terminal_it_asks(host: Host) -> None:
    leader, follower = pty.openpty()
    program = host.start("run", NAME, "--class-id", 3, stdin=follower, stderr=subprocess.PIPE, cwd=host.folder)
    os.write(leader, b"n\n")
    _, said = program.communicate(timeout=60)
    os.close(leader)
    os.close(follower)
    assert program.returncode == 2
    assert "Download it?" in said
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
        _wait_for(lambda: "vq_ds16_c2i.pt" not in STALLED)  # asked for
    finally:
        os.killpg(program.pid, signal.SIGKILL)
        program.wait()
    assert not host.cache.exists()
    STALLED.add("c2i_B_256.pt")  # complete, so not downloaded again
    try:
        host.generate("image.png")
        assert "c2i_B_256.pt" in STALLED
    finally:
        STALLED.clear()


@pytest.mark.slow
def test_an_export_that_was_killed_leaves_nothing_that_is_used(host: Host) -> None:
    program = host.start("run", NAME, "--class-id", 3, "--yes", stderr=subprocess.DEVNULL, cwd=host.folder)
    try:
        _wait_for(lambda: [*host.cache.glob(".*.partial/new/*.onnx")])
    finally:
        os.killpg(program.pid, signal.SIGKILL)
        program.wait()
    host.generate("image.png")
    assert [path.name for path in host.cache.iterdir()] == [f"{NAME}@int8"]


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
        gone = Host(hub, tmp_path, revision="@v9")
        gone.generate("again.png")  # from the cache
        gone("models", "--remove", NAME)
        refused = gone("run", NAME, "--class-id", 3, "--yes")
        assert (refused.returncode, "rejected by the hub" in refused.stderr) == (2, True)
    finally:
        REPOSITORIES[repository] = REPOSITORIES.pop(f"{repository}@{OLD}")


@pytest.mark.slow
def test_without_a_network_one_line_says_what_to_do(host: Host) -> None:
    done = host("run", NAME, "--class-id", 3, "--yes", hub="http://127.0.0.1:9")
    assert done.returncode == 2
    assert "the hub cannot be reached" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", published.published_models())
def test_every_published_model_goes_from_its_name_to_an_image(hub: str, tmp_path: Path, name: str) -> None:
    host = Host(hub, tmp_path, name)
    model = published.find_model(name)
    subject = ["a red cube"] if model.family != "llamagen" or "t2i" in name else ["--class-id", "3"]
    suffix = ".npz" if model.family == "glm_image" else ".png"
    done = host("run", name, *subject, "--yes", "--output", tmp_path / f"image{suffix}")
    assert done.returncode == 0, done.stderr
    if suffix == ".npz":
        with np.load(tmp_path / "image.npz") as file:
            assert json.loads(str(file["recipe"]))["bundle"] == name
        # Without a network the export reads what was downloaded.
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
        REPOSITORIES.pop(parse_reference(reference, CheckpointError)[0], None)


def _wait_for(condition: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
