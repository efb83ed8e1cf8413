"""Tests of published models with a finished bundle on the hub, which needs no export and no PyTorch."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from published_host import EmptyCacheHost
from stand_in_hub import COMMIT, COMPLETED_BYTES, OLD_COMMIT, REPOSITORIES, STALLING_FILES, run
from tiny_bundle import make_tiny_bundle

from lantern_rt.bundle.files import Bundle, open_bundle

REPOSITORY = "owner/finished"
NAME = "llamagen-c2i-l-256"


@pytest.fixture
def bundle(tmp_path: Path) -> Iterator[Bundle]:
    """Make a small bundle and publish the files on the hub."""
    (tmp_path / "made").mkdir()  # a folder with the model's name in the current folder would be used as the bundle
    bundle = open_bundle(make_tiny_bundle(tmp_path / "made" / NAME, "class"))
    REPOSITORIES[REPOSITORY] = {path.name: path.read_bytes() for path in bundle.folder.iterdir()}
    yield bundle
    del REPOSITORIES[REPOSITORY]


def make_bundle_fields(bundle: Bundle) -> dict[str, Any]:
    size = sum(map(len, REPOSITORIES[REPOSITORY].values()))
    return {"reference": f"hf:{REPOSITORY}@{COMMIT}", "digest": bundle.digest, "download_bytes": size}


@pytest.fixture
def host(hub: str, tmp_path: Path, bundle: Bundle) -> EmptyCacheHost:
    """Make a host without PyTorch and other modules of exports."""
    host = EmptyCacheHost(hub, tmp_path, NAME, bundles={"int8": make_bundle_fields(bundle)})
    host.missing_modules = ["torch", "onnx", "safetensors", "transformers"]
    return host


def test_images_need_no_pytorch_and_then_no_hub(host: EmptyCacheHost, bundle: Bundle) -> None:
    assert f"int8 {make_bundle_fields(bundle)['download_bytes'] / 1e9:.1f} GB" in host("models", NAME).stdout
    process = host("run", NAME, "--class-id", 3, "--seed", 1, "--yes", "--output", host.folder / "a.png")
    assert process.returncode == 0, process.stderr
    megabytes = f"{make_bundle_fields(bundle)['download_bytes'] / 1e6:.1f} MB"
    message = f"{NAME}: {megabytes} from {REPOSITORY} (licence: MIT) into the hub's cache\n"
    assert process.stderr.startswith(message)
    arguments = ("run", NAME, "--class-id", 3, "--seed", 1, "--output", host.folder / "b.png")
    process = host(*arguments, hub="http://127.0.0.1:9")  # nothing listens on this port
    assert process.returncode == 0, process.stderr
    with Image.open(host.folder / "a.png") as image, Image.open(host.folder / "b.png") as image_without_hub:
        assert image.tobytes() == image_without_hub.tobytes()
        assert image.info["bundle_digest"] == bundle.digest
    assert "in the cache" in host("models").stdout
    assert not host.cache.exists()  # the bundle lies in the hub's cache alone


def test_damaged_files_of_the_cache_are_downloaded_again(host: EmptyCacheHost) -> None:
    image = host.generate("a.png").read_bytes()
    snapshot = host.folder / f"home/hub/models--owner--finished/snapshots/{COMMIT}"
    names = ("target.onnx", "neighbors.npz", "bundle.json", "vq_decoder.onnx")
    deleted, truncated, *changed = ((snapshot / name).resolve() for name in names)
    deleted.unlink()
    truncated.write_bytes(truncated.read_bytes()[:-1])
    for path in changed:
        path.write_bytes(path.read_bytes()[:-1] + b"\x00")
    offline = host("run", NAME, "--class-id", 3, "--yes", "--output", host.folder / "b.png", hub="http://127.0.0.1:9")
    assert (offline.returncode, "the hub cannot be reached" in offline.stderr) == (2, True)
    COMPLETED_BYTES.clear()
    assert host.generate("b.png").read_bytes() == image
    assert COMPLETED_BYTES[REPOSITORY] == sum(len(REPOSITORIES[REPOSITORY][name]) for name in names)
    graph = (snapshot / "target.onnx").resolve()
    graph.write_bytes(graph.read_bytes()[:-1] + b"\x00")  # only the hash is wrong, which no check before finds
    offline = host("run", NAME, "--class-id", 3, "--output", host.folder / "c.png", hub="http://127.0.0.1:9")
    assert f"target.onnx: found sha256 {hashlib.sha256(graph.read_bytes()).hexdigest()[:12]}" in offline.stderr
    assert "; download it again (hf:owner/finished@" in offline.stderr
    assert host.generate("c.png").read_bytes() == image


def test_a_release_that_pins_another_bundle_replaces_the_cached_one(host: EmptyCacheHost, bundle: Bundle) -> None:
    host.generate("a.png")
    mended = open_bundle(make_tiny_bundle(host.folder / "made" / "mended", "class", weight_offset=1))
    REPOSITORIES[f"{REPOSITORY}@{OLD_COMMIT}"] = {p.name: p.read_bytes() for p in mended.folder.iterdir()}
    fields = {"reference": f"hf:{REPOSITORY}@{OLD_COMMIT}", "digest": mended.digest, "download_bytes": 1}
    try:
        host = EmptyCacheHost(host.hub, host.folder, NAME, bundles={"int8": fields})
        rejected = host("inspect", NAME)
        assert f"snapshots/{COMMIT} is incomplete, damaged or of another release" in rejected.stderr
        process = host("run", NAME, "--class-id", 3, "--yes", "--output", host.folder / "b.png")
    finally:
        del REPOSITORIES[f"{REPOSITORY}@{OLD_COMMIT}"]
    assert f"{COMMIT} is incomplete, damaged or of another release, and is replaced\n" in process.stderr
    with Image.open(host.folder / "b.png") as image:
        assert image.info["bundle_digest"] == mended.digest


def test_caches_copied_to_another_home_are_used_read_only_and_offline(host: EmptyCacheHost) -> None:
    image = host.generate("a.png").read_bytes()
    (host.folder / "home").rename(host.folder / "image")
    variables = {"HF_HUB_OFFLINE": "1", "LANTERN_RT_CACHE": str(host.folder / "image/bundles")}
    folders = [path for path in (host.folder / "image").rglob("*") if path.is_dir()]
    for folder in folders:
        folder.chmod(0o555)
    try:
        command = host.make_command("run", NAME, "--class-id", 3, "--seed", 0, "--output", host.folder / "b.png")
        process = run(host.hub, host.folder / "image", *command, **variables)
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert process.returncode == 0, process.stderr
    assert (host.folder / "b.png").read_bytes() == image


def test_a_killed_download_resumes_without_complete_files(host: EmptyCacheHost) -> None:
    STALLING_FILES.add("vq_decoder.onnx")
    host.kill_when(lambda: "vq_decoder.onnx" not in STALLING_FILES)  # half of the file was sent
    assert not host.cache.exists()
    STALLING_FILES.add("target.onnx")  # this file is complete in the cache, so it is not downloaded again
    try:
        host.generate("image.png")
        assert "target.onnx" in STALLING_FILES
    finally:
        STALLING_FILES.clear()


@pytest.mark.parametrize(
    ("name", "change"), [("bundle.json", "tampered"), ("target.onnx", "truncated"), ("neighbors.npz", "tampered")]
)
def test_a_bundle_with_a_changed_file_on_the_hub_is_rejected(host: EmptyCacheHost, name: str, change: str) -> None:
    content = REPOSITORIES[REPOSITORY][name]
    last_byte = b"" if change == "truncated" else bytes([content[-1] ^ 1])
    REPOSITORIES[REPOSITORY][name] = content[:-1] + last_byte
    process = host("run", NAME, "--class-id", 3, "--yes")
    assert (process.returncode, process.stderr.count("\n")) == (2, 2)
    assert f"{name}: found " in process.stderr
    assert process.stderr.endswith(f"; `lantern-rt export {NAME} --output FOLDER` exports it from its checkpoint\n")
    assert not host.cache.exists()


def test_a_changed_manifest_is_rejected_before_the_graphs(host: EmptyCacheHost) -> None:
    REPOSITORIES[REPOSITORY]["bundle.json"] += b"\n"
    STALLING_FILES.add("target.onnx")
    try:
        assert host("run", NAME, "--class-id", 3, "--yes").returncode == 2
        assert "target.onnx" in STALLING_FILES  # the file was not requested
    finally:
        STALLING_FILES.clear()


def test_a_bundle_deleted_from_the_cache_is_downloaded_again(host: EmptyCacheHost) -> None:
    first = host.generate("a.png")
    shutil.rmtree(host.folder / "home/hub/models--owner--finished")
    assert host.generate("b.png").read_bytes() == first.read_bytes()


def test_verify_rejects_a_bundle_that_differs_from_an_export(host: EmptyCacheHost) -> None:
    host.generate("a.png")
    host.missing_modules = []
    process = host("verify", NAME, "--export")
    assert process.returncode == 2
    assert f"{NAME}: found other files: code_embeddings, " in process.stderr
    assert [*host.cache.iterdir()] == []


def test_the_python_api_downloads_a_finished_bundle(host: EmptyCacheHost, bundle: Bundle) -> None:
    code = (
        "import sys; from pathlib import Path; from lantern_rt import Pipeline, published\n"
        f"sys.modules |= dict.fromkeys({host.missing_modules})\n"
        "published.TABLE = Path(sys.argv[1])\n"
        f"with Pipeline.from_bundle({NAME!r}, download=True) as pipe:\n"
        "    print(pipe.bundle.digest, pipe(class_ids=3).seeds)\n"
    )
    process = run(
        host.hub, host.folder / "home", "-c", code, str(host.folder / "models.json"), LANTERN_RT_CACHE=str(host.cache)
    )
    assert (process.returncode, process.stdout) == (0, f"{bundle.digest} [0]\n"), process.stderr


def test_a_server_downloads_a_finished_bundle(host: EmptyCacheHost) -> None:
    server = host.start("serve", NAME, "--yes", "--port", 0, stderr=subprocess.PIPE, cwd=host.folder)
    try:
        assert server.stderr is not None
        lines = iter(server.stderr.readline, "")
        assert next((line for line in lines if f"ready: {NAME}" in line), "") != ""
    finally:
        server.terminate()
        server.communicate()
