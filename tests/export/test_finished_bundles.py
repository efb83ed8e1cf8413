"""Finished bundles of published models: used without PyTorch, checked by digest, resumed, and exported if asked for."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from published_host import Host
from stand_in_hub import COMMIT, REPOSITORIES, STALLED, run, serve_hub
from tiny_bundle import make_tiny_bundle

from lantern_rt.bundle.files import Bundle, open_bundle

REPOSITORY = "owner/finished"
NAME = "llamagen-c2i-l-256"


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    with serve_hub() as address:
        yield address


@pytest.fixture
def bundle(tmp_path: Path) -> Iterator[Bundle]:
    (tmp_path / "made").mkdir()  # a folder of the name in the current folder would be used
    bundle = open_bundle(make_tiny_bundle(tmp_path / "made" / NAME, "class"))
    REPOSITORIES[REPOSITORY] = {path.name: path.read_bytes() for path in bundle.folder.iterdir()}
    yield bundle
    del REPOSITORIES[REPOSITORY]


def finished(bundle: Bundle) -> dict[str, Any]:
    size = sum(map(len, REPOSITORIES[REPOSITORY].values()))
    return {"reference": f"hf:{REPOSITORY}@{COMMIT}", "digest": bundle.digest, "download_bytes": size}


@pytest.fixture
def host(hub: str, tmp_path: Path, bundle: Bundle) -> Host:
    """Make a host without PyTorch."""
    host = Host(hub, tmp_path, NAME, bundles={"int8": finished(bundle)})
    host.absent = ["torch", "onnx", "safetensors", "transformers"]
    return host


def test_a_name_becomes_an_image_without_pytorch_and_the_next_needs_no_hub(host: Host, bundle: Bundle) -> None:
    assert f"int8 {finished(bundle)['download_bytes'] / 1e9:.1f} GB" in host("models").stdout
    done = host("run", NAME, "--class-id", 3, "--seed", 1, "--yes", "--output", host.folder / "first.png")
    assert done.returncode == 0, done.stderr
    size = f"{finished(bundle)['download_bytes'] / 1e6:.1f} MB from {REPOSITORY} (licence: MIT) into the hub's cache\n"
    assert done.stderr.startswith(f"{NAME}: {size}")
    again = host("run", NAME, "--class-id", 3, "--seed", 1, "--output", host.folder / "b.png", hub="http://127.0.0.1:9")
    assert again.returncode == 0, again.stderr
    with Image.open(host.folder / "first.png") as first, Image.open(host.folder / "b.png") as second:
        assert first.tobytes() == second.tobytes()
        assert first.info["bundle_digest"] == bundle.digest
    assert "in the cache" in host("models").stdout
    assert host("models", "--remove", NAME).returncode == 0
    assert list(host.cache.iterdir()) == []


def test_a_download_that_was_killed_goes_on(host: Host) -> None:
    STALLED.add("vq_decoder.onnx")
    program = host.start("run", NAME, "--class-id", 3, "--yes", stderr=subprocess.DEVNULL, cwd=host.folder)
    try:
        end = time.monotonic() + 60
        while "vq_decoder.onnx" in STALLED:
            assert time.monotonic() < end
            time.sleep(0.02)
    finally:
        os.killpg(program.pid, signal.SIGKILL)
        program.wait()
    assert not host.cache.exists()
    STALLED.add("target.onnx")  # complete, so not downloaded again
    try:
        host.generate("image.png")
        assert "target.onnx" in STALLED
    finally:
        STALLED.clear()


@pytest.mark.parametrize("name", ["bundle.json", "target.onnx", "neighbors.npz"])
@pytest.mark.parametrize("change", ["tampered", "truncated"])
def test_a_changed_file_is_rejected_before_a_graph_is_opened(host: Host, name: str, change: str) -> None:
    right = REPOSITORIES[REPOSITORY][name]
    REPOSITORIES[REPOSITORY][name] = right[:-1] if change == "truncated" else right[:-1] + bytes([right[-1] ^ 1])
    done = host("run", NAME, "--class-id", 3, "--yes")
    assert (done.returncode, done.stderr.count("\n")) == (2, 2)
    assert f"{name}: found " in done.stderr
    assert done.stderr.endswith(f"; `lantern-rt run {NAME} --export` exports it from its checkpoint\n")
    assert not host.cache.exists()


def test_a_manifest_of_another_digest_ends_the_download(host: Host) -> None:
    REPOSITORIES[REPOSITORY]["bundle.json"] += b"\n"
    STALLED.add("target.onnx")
    try:
        assert host("run", NAME, "--class-id", 3, "--yes").returncode == 2
        assert "target.onnx" in STALLED  # not asked for
    finally:
        STALLED.clear()


@pytest.mark.parametrize("export", [False, True])
def test_a_bundle_that_was_removed_from_the_hubs_cache_is_made_again(host: Host, export: bool) -> None:
    host.generate("a.png")
    shutil.rmtree(host.folder / "home/hub/models--owner--finished")
    host.absent = []
    options = ["--export"] if export else []
    done = host("run", NAME, "--class-id", 3, "--yes", *options, "--output", host.folder / "b.png")
    assert done.returncode == 0, done.stderr
    assert (host.cache / f"{NAME}@int8").is_symlink() != export


def test_a_bundle_that_is_not_what_the_checkpoint_gives_is_found(host: Host) -> None:
    host.generate("a.png")
    host.absent = []
    done = host("verify", NAME, "--export")
    assert done.returncode == 2
    assert f"{NAME}: found other files: code_embeddings, " in done.stderr
    assert [path.name for path in host.cache.iterdir()] == [f"{NAME}@int8"]


def test_python_downloads_it_too(host: Host, bundle: Bundle) -> None:
    code = (
        "import sys; from pathlib import Path; from lantern_rt import Pipeline, published\n"
        f"sys.modules |= dict.fromkeys({host.absent})\n"
        "published.TABLE = Path(sys.argv[1])\n"
        f"with Pipeline.from_bundle({NAME!r}, download=True) as pipe:\n"
        "    print(pipe.bundle.digest, pipe(class_ids=3).seeds)\n"
    )
    done = run(
        host.hub, host.folder / "home", "-c", code, str(host.folder / "models.json"), LANTERN_RT_CACHE=str(host.cache)
    )
    assert (done.returncode, done.stdout) == (0, f"{bundle.digest} [0]\n"), done.stderr


def test_a_server_downloads_it_too(host: Host) -> None:
    server = host.start("serve", NAME, "--yes", "--port", 0, stderr=subprocess.PIPE, cwd=host.folder)
    try:
        assert server.stderr is not None
        lines = iter(server.stderr.readline, "")
        assert next((line for line in lines if f"ready: {NAME}" in line), "") != ""
    finally:
        server.terminate()
        server.communicate()
    assert (host.cache / f"{NAME}@int8").is_symlink()


def test_an_export_may_be_asked_for(host: Host, bundle: Bundle) -> None:
    asked = host("run", NAME, "--class-id", 3, "--yes", "--export")
    assert "torch is not installed" in asked.stderr
    host.absent = []
    done = host("run", NAME, "--class-id", 3, "--yes", "--export", "--output", host.folder / "a.png")
    assert done.returncode == 0, done.stderr
    with Image.open(host.folder / "a.png") as image:
        assert image.info["bundle"] == NAME
        assert image.info["bundle_digest"] != bundle.digest
