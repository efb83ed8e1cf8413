"""What `open_bundle` accepts, and the one line it says about everything else."""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundle_folder import CODES, WIDTH, K, make_bundle, neighbor_table, read_manifest, stub_graph, write_manifest

from lantern_rt.bundle import files as bundle_module
from lantern_rt.bundle.files import open_bundle
from lantern_rt.bundle.onnx_scan import NotOnnx, external_locations
from lantern_rt.errors import BundleError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_bundle(tmp_path / "tiny")


def refusal(path: Path | str, verify: bool = True) -> str:
    with pytest.raises(BundleError) as caught:
        open_bundle(path, verify=verify)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    return message


def rewrite(folder: Path, rehash: bool = True, **changes: Any) -> None:
    write_manifest(folder, read_manifest(folder) | changes, rehash)


def test_a_valid_bundle_opens_with_its_tables(folder: Path) -> None:
    bundle = open_bundle(str(folder))
    assert bundle.manifest.name == "tiny"
    assert bundle.path("target") == folder / "target.onnx"
    assert bundle.digest == hashlib.sha256((folder / "bundle.json").read_bytes()).hexdigest()
    embeddings = bundle.code_embeddings()
    assert embeddings.shape == (CODES, WIDTH)
    assert embeddings.dtype == np.float32
    assert not embeddings.flags.writeable
    assert bundle.code_embeddings() is embeddings
    assert bundle.neighbors().indices.shape == bundle.neighbors().distances.shape == (CODES, K)


def test_opening_a_bundle_imports_neither_torch_nor_onnx(folder: Path) -> None:
    code = (
        "import sys; from lantern_rt.bundle.files import open_bundle; open_bundle(sys.argv[1]).neighbors(); "
        "print(sorted({'torch', 'onnx', 'onnxruntime'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_embedded_bundle_opens_by_name_before_a_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_bundle(tmp_path / "embedded" / "tiny")
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bundle_module, "EMBEDDED", tmp_path / "embedded")
    assert open_bundle("tiny").folder == tmp_path / "embedded" / "tiny"
    assert "no bundle.json" in refusal("./tiny")
    assert "embedded name: tiny" in refusal("tinny")


@pytest.mark.parametrize("name", ["", "no/such/folder", "\0", "x" * 5000, "a\nb"])
def test_a_path_that_is_no_folder_is_one_line(name: str) -> None:
    assert refusal(name)


def test_a_file_in_place_of_a_folder_is_named_as_such(folder: Path) -> None:
    assert "found a file" in refusal(folder / "bundle.json")


def test_an_altered_file_is_found_by_its_hash(folder: Path) -> None:
    data = bytearray((folder / "target.onnx.data").read_bytes())
    data[5] ^= 1
    (folder / "target.onnx.data").write_bytes(data)
    assert re.search(r"target\.onnx\.data: found sha256 \w+\.\.\., expected \w+\.\.\.", refusal(folder))
    assert open_bundle(folder, verify=False)


def test_bytes_are_counted_as_they_are_hashed() -> None:
    told: list[tuple[int, int]] = []
    entries = open_bundle("scenes").manifest.files
    size = sum(entry.bytes for entry in entries.values())
    open_bundle("scenes", counted=lambda *one: told.append(one))
    assert told[0] == (0, size)
    assert told[-1] == (size, size)
    assert told == sorted(told)
    assert len(told) > len(entries), "large files are counted in pieces"
    told.clear()
    open_bundle("scenes", unread=["target.data"], counted=lambda *one: told.append(one))
    assert {total for _, total in told} == {size - entries["target.data"].bytes}
    told.clear()
    open_bundle("scenes", verify=False, counted=lambda *one: told.append(one))
    assert told == [(0, 0)]


def test_a_truncated_file_is_found_even_without_hashing(folder: Path) -> None:
    path = folder / "code_embeddings.npy"
    path.write_bytes(path.read_bytes()[:-4])
    assert "found 636 bytes, expected 640" in refusal(folder, verify=False)


def test_a_missing_file_is_named_with_its_role(folder: Path) -> None:
    (folder / "vq_decoder.onnx").unlink()
    message = refusal(folder)
    assert "vq_decoder.onnx: found no file" in message
    assert "'vq_decoder'" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", "expected JSON"),
        (b"\xff\xfe", "expected JSON"),
        (b'{"format_version": "1.0", "a": NaN}', "NaN where a finite number belongs"),
        (b'{"format_version": "1.0", "a": 1e999}', "1e999 where a finite number belongs"),
        (b'{"format_version": "1.0", "format_version": "1.0"}', "the key 'format_version' twice"),
        (b"[" * 100_000, "expected JSON"),
        (b"1" * 10_000, "expected JSON"),
        (b"[]", "`format_version`: found None"),
        (b"{}", "`format_version`: found None"),
        (b'{"format_version": 1.0}', "`format_version`: found 1.0"),
        (b'{"format_version": "3.0"}', "found bundle format 3.0, this lantern-rt reads 1.x and 2.x; upgrade"),
        (b" " * (1 << 20) + b"{}", "more than 1,048,576 bytes"),
    ],
)
def test_a_manifest_that_cannot_be_read_says_why(folder: Path, text: bytes, expected: str) -> None:
    (folder / "bundle.json").write_bytes(text)
    assert expected in refusal(folder)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("family", None, "field `family`: found nothing, expected a value"),
        ("target.hidden_size", 0, "field `target.hidden_size`: found 0, expected greater than or equal to 1"),
        ("target.hidden_size", "8", "field `target.hidden_size`: found '8', expected integer"),
        ("target.hidden_size", 8.5, "field `target.hidden_size`: found 8.5"),
        ("target.depth", 3, "field `target.depth`: unknown, expected it left out"),
        ("target.vocab_size", 15, "target vocab_size 15 is not codebook_size 16"),
        ("sampling.top_p", 1.5, "field `sampling.top_p`: found 1.5, expected less than or equal to 1"),
        ("decoding.method", "magic", "field `decoding.method`: found 'magic', expected 'ar'"),
        ("decoding.methods", [{"method": "lantern", "lambda": 2.0}], "lambda`: unknown, expected it left out"),
        ("decoding.methods", [{"method": "ar"}, {"method": "ar"}], "method ar has defaults twice"),
        ("decoding.methods.0.delta", 2.0, "`decoding.methods.0.lantern.delta`: found 2.0, expected less than 1"),
        ("decoding.methods.0.lambda", 2.0, "`decoding.methods.0.lantern.lambda`: unknown"),
        ("decoding.methods.0.anneal", 0.5, "anneal .* omega"),
        ("neighbors", 16, "field `neighbors`: found 16, expected less than codebook_size 16"),
        ("files.target.sha256", "zz", "field `files.target.sha256`: found 'zz'"),
        ("files.tar\nget", 1, "field `files.tar get`: found 1"),
    ],
)
def test_a_wrong_manifest_field_is_named_with_what_was_found(
    folder: Path, path: str, value: object, expected: str
) -> None:
    manifest = read_manifest(folder)
    *outer, last = path.split(".")
    part: Any = manifest
    for key in outer:
        part = part[int(key) if isinstance(part, list) else key]
    if value is None:
        del part[last]
    else:
        part[last] = value
    write_manifest(folder, manifest, rehash=False)
    assert re.search(expected, refusal(folder))


def test_a_newer_minor_format_explains_an_unknown_field(folder: Path) -> None:
    rewrite(folder, format_version="2.7", novelty=1)
    assert "the bundle is of format 2.7, newer than 2.1: upgrade lantern-rt" in refusal(folder)


@pytest.mark.parametrize(
    "name",
    [
        "../outside",
        "a/../../outside",
        "/etc/hostname",
        "C:/x",
        "a\\b",
        "",
        ".",
        "./target.onnx",
        "a//b",
        "a\0b",
        "a\nb",
    ],
)
def test_a_path_that_leaves_the_folder_or_is_odd_is_refused(folder: Path, name: str) -> None:
    (folder.parent / "outside").write_bytes(b"")
    manifest = read_manifest(folder)
    manifest["files"]["target"]["path"] = name
    write_manifest(folder, manifest, rehash=False)
    assert "expected a" in refusal(folder)


def test_a_link_is_followed_inside_the_folder_and_refused_outside(folder: Path) -> None:
    target = folder / "target.onnx"
    (folder / "weights").mkdir()
    inside = target.rename(folder / "weights" / "t.onnx")
    target.symlink_to(inside)
    assert open_bundle(folder)
    outside = inside.rename(folder.parent / "t.onnx")
    target.unlink()
    target.symlink_to(outside)
    assert "found a link that leaves the bundle's folder" in refusal(folder)
    target.unlink()
    target.symlink_to(target)
    assert "target.onnx: cannot be read" in refusal(folder)


def test_a_folder_in_place_of_a_file_is_refused(folder: Path) -> None:
    (folder / "target.onnx").unlink()
    (folder / "target.onnx").mkdir()
    assert "found a folder or device" in refusal(folder)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_a_pipe_in_place_of_a_file_does_not_hang(folder: Path) -> None:
    (folder / "target.onnx").unlink()
    os.mkfifo(folder / "target.onnx")
    assert "found a folder or device" in refusal(folder)


@pytest.mark.parametrize("location", ["/etc/passwd", "../secret", "unlisted.data", "*/_ORT_MEM_ADDR_/*", "a\\b"])
def test_a_graph_may_only_read_files_of_the_bundle(folder: Path, location: str) -> None:
    (folder / "unlisted.data").write_bytes(b"1234")
    (folder / "target.onnx").write_bytes(stub_graph(location))
    rewrite(folder)
    assert f"reads the file {location!r}, expected one that bundle.json lists" in refusal(folder, verify=False)


@pytest.mark.parametrize("data", [b"", b"\0", b"\x3a\x7f", b"not a graph at all", stub_graph()[:-1], b"\x08\x0a"])
def test_bytes_that_are_no_graph_are_refused(folder: Path, data: bytes) -> None:
    (folder / "drafter.onnx").write_bytes(data)
    rewrite(folder)
    assert "drafter.onnx: expected an ONNX graph" in refusal(folder)


def test_the_graph_walker_agrees_with_the_onnx_package(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    weight = onnx.numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    constant = onnx.numpy_helper.from_array(np.ones(3, np.float32), "c")
    for tensor, location in ((weight, "a/w.bin"), (constant, "c.bin")):
        onnx.external_data_helper.set_external_data(tensor, location)
    inner = onnx.helper.make_graph([onnx.helper.make_node("Constant", [], ["y"], value=constant)], "inner", [], [])
    outer = onnx.helper.make_node("If", ["b"], ["y"], then_branch=inner, else_branch=inner)
    model = onnx.helper.make_model(onnx.helper.make_graph([outer], "g", [], [], [weight]))
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    assert external_locations(path) == {"a/w.bin", "c.bin"}


def test_weights_that_a_runtime_would_take_unchecked_are_refused(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    weight = onnx.numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    onnx.external_data_helper.set_external_data(weight, "w.bin")
    weight.external_data.add(key="prepacked_0", value="blob|0;64")
    path = tmp_path / "m.onnx"
    path.write_bytes(onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [], [weight])).SerializeToString())
    with pytest.raises(NotOnnx, match="made for one processor"):
        external_locations(path)


def test_no_bytes_make_the_graph_walker_fail_otherwise(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    path = tmp_path / "m.onnx"
    good = bytearray(stub_graph("w.bin"))
    for _ in range(300):
        data = good.copy()
        for at in rng.integers(0, len(data), 3):
            data[at] = rng.integers(256)
        path.write_bytes(data)
        try:
            external_locations(path)
        except NotOnnx:
            continue


def replaced_table(folder: Path, write: Any) -> str:
    """The complaint about a code table that `write` has put in place."""
    write(folder / "code_embeddings.npy")
    rewrite(folder)
    with pytest.raises(BundleError) as caught:
        open_bundle(folder).code_embeddings()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_code_table_of_another_shape_or_type_is_refused(folder: Path) -> None:
    message = replaced_table(folder, lambda path: np.save(path, np.zeros((CODES, WIDTH + 1), np.float32)))
    assert "found float32 [16, 9], expected float32 [16, 8]" in message
    assert "found float64" in replaced_table(folder, lambda path: np.save(path, np.zeros((CODES, WIDTH))))


def test_a_code_table_that_is_no_plain_array_is_refused(folder: Path) -> None:
    pickled = np.full((CODES, WIDTH), None, object)
    assert "without pickled objects" in replaced_table(folder, lambda path: np.save(path, pickled, allow_pickle=True))
    assert "without pickled objects" in replaced_table(folder, lambda path: path.write_bytes(pickle.dumps([1])))
    assert "without pickled objects" in replaced_table(folder, lambda path: path.write_bytes(b""))
    header = b"\x93NUMPY\x01\x00\x10\x00{'descr': oops}\n"
    assert "without pickled objects" in replaced_table(folder, lambda path: path.write_bytes(header))


def test_a_code_table_with_nan_is_refused(folder: Path) -> None:
    table = np.zeros((CODES, WIDTH), np.float32)
    table[3, 3] = np.nan
    assert "found NaN or infinity" in replaced_table(folder, lambda path: np.save(path, table))


def neighbor_refusal(folder: Path, **changes: Any) -> str:
    np.savez_compressed(folder / "neighbors.npz", **{**neighbor_table(), **changes}, allow_pickle=True)
    return neighbor_file_refusal(folder)


def neighbor_file_refusal(folder: Path) -> str:
    rewrite(folder)
    with pytest.raises(BundleError) as caught:
        open_bundle(folder).neighbors()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_wrong_neighbor_table_is_refused(folder: Path) -> None:
    table = neighbor_table()
    indices, distances = table["indices"], table["distances"]
    beyond, own, nan = indices.copy(), indices.copy(), distances.copy()
    beyond[2, 1], own[7, 0], nan[0, 4] = CODES, 7, np.nan
    assert "found uint8 [16, 4]" in neighbor_refusal(folder, indices=indices[:, :4])
    assert "found int64" in neighbor_refusal(folder, indices=indices.astype(np.int64))
    assert "found index 16, expected 0 .. 15" in neighbor_refusal(folder, indices=beyond)
    assert "found code 7 among its own neighbours" in neighbor_refusal(folder, indices=own)
    assert "nearest first" in neighbor_refusal(folder, distances=distances[:, ::-1])
    assert "finite" in neighbor_refusal(folder, distances=nan)
    assert "`distances`" in neighbor_refusal(folder, distances=np.full((CODES, K), None, object))


def test_a_neighbor_file_that_is_no_archive_is_refused(folder: Path) -> None:
    (folder / "neighbors.npz").write_bytes(pickle.dumps({"indices": 1}))
    assert "expected a NumPy archive" in neighbor_file_refusal(folder)
    with zipfile.ZipFile(folder / "neighbors.npz", "w") as archive:
        archive.writestr("indices.npy", b"junk")
    assert "expected a NumPy archive" in neighbor_file_refusal(folder)


def test_an_archive_that_unpacks_to_far_more_than_its_table_is_not_unpacked(folder: Path) -> None:
    with zipfile.ZipFile(folder / "neighbors.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("indices.npy", bytes(10_000_000))
    assert "unpacks to 10,000,000 bytes" in neighbor_file_refusal(folder)


def test_a_bundle_without_neighbors_says_so(folder: Path) -> None:
    manifest = read_manifest(folder)
    manifest["neighbors"] = 0
    del manifest["files"]["neighbors"]
    write_manifest(folder, manifest)
    with pytest.raises(BundleError, match="has no neighbour table"):
        open_bundle(folder).neighbors()
    with pytest.raises(BundleError, match="no file `neighbors`, expected one of code_embeddings, condition"):
        open_bundle(folder).path("neighbors")
