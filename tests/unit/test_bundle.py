"""Bundles that `open_bundle` accepts, and the one-line errors for invalid bundles."""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundle_folder import make_stub_graph, read_manifest, set_manifest_field, write_bundle_manifest
from refusals import catch_error
from tiny_bundle import CODES, NUM_NEIGHBORS, WIDTH

from lantern_rt.bundle import files as bundle_module
from lantern_rt.bundle.files import GRAPHS, open_bundle
from lantern_rt.bundle.manifest import FORMAT_VERSION, Manifest
from lantern_rt.bundle.onnx_scan import list_external_files
from lantern_rt.errors import BundleError

SQUARE_SIZE = {"name": "24x24", "rows": 6, "columns": 6, "tokens": [7]}
WIDE_SIZE = {"name": "36x12", "rows": 3, "columns": 9, "tokens": [8]}
NAN_FIGURES = {"tokens_per_pass": 2.0, "excess_nll": float("nan"), "images": 9, "date": "2026-01-02"}
NAN_PRESET = {"method": {"method": "ar"}, "figures": NAN_FIGURES}
CONDITION = {"kind": "tokens", "prefix": 4, "layout": {"after": [3], "uncond": []}}
EMPTY_TOKENS = "`uncond` and the `tokens` of a size are empty"
INVALID_PATHS = ["../outside", "a/../../outside", "/etc/hosts", "C:/x", "a\\b", "", ".", "./a.onnx", "a//b", "a\0b"]


@pytest.fixture
def folder(class_bundle: Path, tmp_path: Path) -> Path:
    """Return a copy of a bundle with classes, 6 x 6 tokens and images of 24 x 24 pixels."""
    return Path(shutil.copytree(class_bundle, tmp_path / "tiny"))


def get_error_message(path: Path | str, verify: bool = True) -> str:
    """Return the error of opening a bundle, which must be one line."""
    message = str(catch_error(BundleError, open_bundle, path, verify=verify))
    assert "\n" not in message
    assert len(message) < 700
    return message


def change_manifest(folder: Path, rehash: bool = True, **changes: Any) -> None:
    write_bundle_manifest(folder, read_manifest(folder) | changes, rehash)


def test_a_valid_bundle_is_opened(folder: Path) -> None:
    bundle = open_bundle(str(folder))
    assert bundle.manifest.name == "tiny"
    assert bundle.path("target") == folder / "target.onnx"
    assert bundle.digest == hashlib.sha256((folder / "bundle.json").read_bytes()).hexdigest()
    embeddings = bundle.code_embeddings
    assert embeddings.shape == (CODES, WIDTH)
    assert embeddings.dtype == np.float32
    assert not embeddings.flags.writeable
    assert bundle.code_embeddings is embeddings
    assert bundle.neighbor_table.shape == (CODES, NUM_NEIGHBORS)


def test_an_embedded_bundle_comes_before_a_folder_of_its_name(
    class_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(class_bundle, tmp_path / "embedded" / "tiny")
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bundle_module, "EMBEDDED", tmp_path / "embedded")
    assert open_bundle("tiny").folder == tmp_path / "embedded" / "tiny"
    assert "no bundle.json" in get_error_message("./tiny")
    assert "found a file" in get_error_message("embedded/tiny/bundle.json")
    assert "embedded name: tiny" in get_error_message("tinny")


@pytest.mark.parametrize("name", ["", "no/such/folder", "\0", "x" * 5000, "a\nb"])
def test_a_path_that_is_not_a_folder_is_rejected(name: str) -> None:
    assert get_error_message(name)


def test_an_altered_file_of_a_bundle_is_detected_by_hash(folder: Path) -> None:
    data = bytearray((folder / "target.onnx").read_bytes())
    data[data.index(b"head")] ^= 1
    (folder / "target.onnx").write_bytes(data)
    assert re.search(r"target\.onnx: found sha256 \w+\.\.\., expected \w+\.\.\.", get_error_message(folder))
    assert open_bundle(folder, verify=False)


def test_the_progress_callback_counts_hashed_bytes() -> None:
    reports: list[tuple[int, int]] = []
    manifest = open_bundle("scenes").manifest
    assert manifest.format_version == FORMAT_VERSION
    entries = manifest.files
    size = sum(entry.bytes for entry in entries.values())
    open_bundle("scenes", progress=lambda *report: reports.append(report))
    assert reports[0] == (0, size)
    assert reports[-1] == (size, size)
    assert reports == sorted(reports)
    assert len(reports) > len(entries), "large files are reported in pieces"
    reports.clear()
    open_bundle("scenes", skipped_roles=["target.data"], progress=lambda *report: reports.append(report))
    assert {total for _, total in reports} == {size - entries["target.data"].bytes}
    reports.clear()
    open_bundle("scenes", verify=False, progress=lambda *report: reports.append(report))
    assert reports == [(0, 0)]


def test_a_truncated_file_is_detected_without_hashing(folder: Path) -> None:
    path = folder / "code_embeddings.npy"
    path.write_bytes(path.read_bytes()[:-4])
    assert "found 1,148 bytes, expected 1,152" in get_error_message(folder, verify=False)


def test_a_missing_file_is_rejected_with_path_and_role(folder: Path) -> None:
    (folder / "vq_decoder.onnx").unlink()
    message = get_error_message(folder)
    assert "vq_decoder.onnx: found no file" in message
    assert "'vq_decoder'" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"\xff\xfe", "expected JSON"),
        (b'{"format_version": "1.0", "format_version": "1.0"}', "the key 'format_version' twice"),
        (b"[" * 100_000, "expected JSON"),
        (b"1" * 10_000, "expected JSON"),
        (b"[]", "`format_version`: found None"),
        (b'{"format_version": 1.0}', "`format_version`: found 1.0"),
        (b'{"format_version": "2.1"}', "found bundle format 2.1, expected 4.x; upgrade"),
        (b" " * (1 << 20) + b"{}", "more than 1,048,576 bytes"),
    ],
)
def test_an_unreadable_manifest_is_rejected_with_the_reason(folder: Path, text: bytes, expected: str) -> None:
    (folder / "bundle.json").write_bytes(text)
    assert expected in get_error_message(folder)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("family", None, "field `family`: found nothing, expected a value"),
        ("target.hidden_size", 0, "field `target.hidden_size`: found 0, expected at least 1"),
        ("target.hidden_size", "8", "field `target.hidden_size`: found '8', expected a whole number"),
        ("target.hidden_size", 8.5, "field `target.hidden_size`: found 8.5"),
        ("target.depth", 3, "field `target.depth`: unknown field"),
        ("target.vocab_size", 15, "target vocab_size 15 is not codebook_size 32"),
        ("sampling.top_p", float("nan"), "field `sampling.top_p`: found nan"),
        ("sampling.cfg_scale", float("inf"), "field `sampling.cfg_scale`: found inf"),
        ("presets", {"fast": NAN_PRESET}, "figures.excess_nll`: found nan"),
        ("sampling.top_p", 1.5, "field `sampling.top_p`: found 1.5, expected at most 1"),
        ("decoding.methods", [{"method": "lantern", "lambda": 2.0}], "lambda`: unknown field"),
        ("decoding.methods", [{"method": "ar"}, {"method": "ar"}], "method ar has defaults twice"),
        ("decoding.methods.1.delta", 2.0, "`decoding.methods.1.lantern.delta`: found 2.0, expected less than 1"),
        ("decoding.methods.1.lambda", 2.0, "`decoding.methods.1.lantern.lambda`: unknown"),
        ("presets", {"strict": {}}, "presets.strict"),
        ("neighbors", 32, "field `neighbors`: found 32, expected less than codebook_size 32"),
        ("files.target.sha256", "zz", "field `files.target.sha256`: found 'zz'"),
        ("files.tar\nget", 1, "field `files.tar get`: found 1"),
        ("condition.cleaning", "llamagen", "`cleaning` is only allowed for kind `text`"),
        ("condition.caption_dim", 32, "`caption_dim` is required for kind `embeddings`"),
        ("condition", {"kind": "text", "prefix": 4, "cleaning": "other"}, "expected 'llamagen'"),
        ("condition", {"kind": "text", "prefix": 4}, "`files` lacks tokenizer"),
        ("condition", {**CONDITION, "kind": "words"}, "`layout` is required for kind `tokens`"),
        ("condition", {"kind": "tokens", "prefix": 4}, "`layout` is required for kind `tokens`"),
        ("condition.layout", {"after": [1]}, "set exactly one of `uncond` and `uncond_fill`"),
        ("condition.layout", {"after": [1], "uncond": [1], "uncond_fill": 1}, "set exactly one"),
        ("condition.layout", {"after": [], "uncond": [1]}, "after`: found .*, expected at least 1 element"),
        ("condition.layout", {"after": [1], "uncond": [1], "template": "none"}, "'none', expected text of the pattern"),
        ("sizes", [WIDE_SIZE], "`sizes` lacks the default grid, 6 x 6"),
        ("sizes", [SQUARE_SIZE, {**WIDE_SIZE, "name": "24x24"}], "`sizes` has a name or a grid twice"),
        ("sizes", [SQUARE_SIZE, {**SQUARE_SIZE, "name": "25x25"}], "`sizes` has a name or a grid twice"),
        ("sizes", [SQUARE_SIZE, {**WIDE_SIZE, "name": "wide"}], "text of the pattern"),
        ("sizes", [SQUARE_SIZE, {**WIDE_SIZE, "columns": 0}], "at least 1"),
        ("sizes", [SQUARE_SIZE, {**WIDE_SIZE, "rows": 60, "columns": 2}], "need 120 positions, but .* is 101"),
        ("grid_columns", 1_000_000, "`grid_columns`: found 1000000"),
        ("grid_rows", 300, "`grid_rows`: found 300"),
        ("image_width", 1_000_000, "`image_width`: found 1000000"),
        ("target.num_layers", 100_000, "`target.num_layers`: found 100000"),
        ("target.head_dim", 2**65, "`target.head_dim`: found 3689"),
        ("drafter.position_shift", 2**65, "`drafter.position_shift`: found 3689"),
        ("drafter.prefix_token", 2**65, "`drafter.prefix_token`: found 3689"),
        ("files.target.bytes", 2**65, "`files.target.bytes`: found 3689"),
        ("neighbors", 2**65, "`neighbors`: found 3689"),
        ("condition.prefix", 2**65, "`condition.prefix`: found 3689"),
        ("condition.prefix", 900_000, "need 900,035 positions"),
        ("condition", {"kind": "class", "prefix": 1, "classes": 9, "positions_per_class": 50}, "need 486 positions"),
        ("row_end", 31, "row_end must be at least codebook_size, 32, and below 1000032, found 31"),
        ("row_end", 2_000_000, "and below 1000032, found 2000000"),
    ],
)
def test_an_invalid_manifest_field_is_rejected(folder: Path, path: str, value: object, expected: str) -> None:
    manifest = read_manifest(folder)
    if path == "condition.layout":
        manifest["condition"] = {**CONDITION}
    set_manifest_field(manifest, path, value)
    write_bundle_manifest(folder, manifest, rehash=False)
    assert re.search(expected, get_error_message(folder))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"image_width": 8192, "sizes": [SQUARE_SIZE, WIDE_SIZE]}, "size 36x12 is wider or higher than 8192 pixels"),
        ({"condition": CONDITION}, EMPTY_TOKENS),
        ({"condition": CONDITION, "sizes": [SQUARE_SIZE, {**WIDE_SIZE, "tokens": []}]}, EMPTY_TOKENS),
    ],
)
def test_contradicting_manifest_fields_are_rejected(folder: Path, changes: dict[str, Any], expected: str) -> None:
    files = read_manifest(folder)["files"]
    change_manifest(folder, **changes, files={**files, "tokenizer": files["target"]})
    assert expected in get_error_message(folder)
    change_manifest(folder, **{**changes, "image_width": 24, "sizes": [SQUARE_SIZE, WIDE_SIZE]})
    assert open_bundle(folder).manifest.size("36x12").tokens == (8,)


def test_an_embedded_manifest_is_written_with_the_same_bytes_until_it_sets_min_p() -> None:
    bundle = open_bundle("scenes")
    manifest = bundle.manifest
    text = manifest.model_dump_json(indent=2) + "\n"
    assert hashlib.sha256(text.encode()).hexdigest() == bundle.digest
    changed = manifest.model_copy(update={"sampling": manifest.sampling.model_copy(update={"min_p": 0.1})})
    assert Manifest.model_validate_json(changed.model_dump_json()) == changed


def test_an_unknown_field_of_a_newer_format_asks_for_an_upgrade(folder: Path) -> None:
    change_manifest(folder, format_version="4.9", novelty=1)
    assert "the bundle has format 4.9, newer than 4.0: upgrade lantern-rt" in get_error_message(folder)


@pytest.mark.parametrize("name", [*INVALID_PATHS, "a\nb"])
def test_a_file_path_outside_the_folder_is_rejected(folder: Path, name: str) -> None:
    (folder.parent / "outside").write_bytes(b"")
    manifest = read_manifest(folder)
    manifest["files"]["target"]["path"] = name
    write_bundle_manifest(folder, manifest, rehash=False)
    assert "expected a" in get_error_message(folder)


def test_symbolic_links_are_followed_only_within_the_folder(folder: Path) -> None:
    target = folder / "target.onnx"
    (folder / "weights").mkdir()
    inside = target.rename(folder / "weights" / "t.onnx")
    target.symlink_to(inside)
    assert open_bundle(folder)
    outside = inside.rename(folder.parent / "t.onnx")
    target.unlink()
    target.symlink_to(outside)
    assert "found a link that leaves the bundle's folder" in get_error_message(folder)
    target.unlink()
    target.symlink_to(target)
    assert "target.onnx: cannot be read" in get_error_message(folder)


@pytest.mark.parametrize("blobs", ["hub/models--owner--name/blobs", "hub/blobs/00"])
def test_a_snapshot_in_the_hubs_cache_is_opened_by_path(folder: Path, tmp_path: Path, blobs: str) -> None:
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    (tmp_path / blobs).mkdir(parents=True)
    for file in folder.iterdir():
        (snapshot / file.name).symlink_to(file.rename(tmp_path / blobs / file.name))
    (tmp_path / "latest").symlink_to(snapshot)
    assert open_bundle(snapshot).digest == open_bundle(tmp_path / "latest").digest
    outside = (tmp_path / blobs / "target.onnx").rename(tmp_path / "hub" / "target.onnx")
    (snapshot / "target.onnx").unlink()
    (snapshot / "target.onnx").symlink_to(outside)
    assert "found a link that leaves the bundle's folder" in get_error_message(snapshot)


@pytest.mark.parametrize("create", [os.mkdir, os.mkfifo])
def test_a_folder_or_pipe_in_place_of_a_bundle_file_is_rejected(folder: Path, create: Callable[[Path], None]) -> None:
    (folder / "target.onnx").unlink()
    create(folder / "target.onnx")
    assert "found a folder or device" in get_error_message(folder)


@pytest.mark.parametrize("location", ["/etc/passwd", "../secret", "unlisted.data", "*/_ORT_MEM_ADDR_/*", "a\\b"])
def test_a_graph_that_reads_an_unlisted_file_is_rejected(folder: Path, location: str) -> None:
    (folder / "unlisted.data").write_bytes(b"1234")
    (folder / "target.onnx").write_bytes(make_stub_graph(location))
    change_manifest(folder)
    expected = f"reads the file {location!r}, expected a file that bundle.json lists"
    assert expected in get_error_message(folder, verify=False)


@pytest.mark.parametrize("name", ["target.bin", "target.ONNX", "target", "target.onnx ", "target.onnx.data"])
@pytest.mark.parametrize("role", GRAPHS)
def test_a_graph_file_whose_name_does_not_end_in_onnx_is_rejected(folder: Path, role: str, name: str) -> None:
    (folder / name).write_bytes(make_stub_graph())
    files = read_manifest(folder)["files"]
    change_manifest(folder, files={**files, role: {"path": name}})
    expected = f"file {role}: found path {name!r}, expected a name that ends in .onnx"
    assert expected in get_error_message(folder, verify=False)


@pytest.mark.parametrize("data", [b"", b"\0", b"\x3a\x7f", b"not a graph at all", make_stub_graph()[:-1], b"\x08\x0a"])
def test_a_graph_file_that_is_not_an_onnx_graph_is_rejected(folder: Path, data: bytes) -> None:
    (folder / "drafter.onnx").write_bytes(data)
    change_manifest(folder)
    assert "expected an ONNX graph" in get_error_message(folder)


def test_external_files_of_weights_and_subgraphs_are_listed(tmp_path: Path) -> None:
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
    assert list_external_files(path) == {"a/w.bin", "c.bin"}


def test_precompiled_nodes_and_prepacked_weights_are_rejected(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    compiled = onnx.helper.make_node("EPContext", [], ["y"], ep_cache_context="../blob.bin", embed_mode=0)
    weight = onnx.numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    onnx.external_data_helper.set_external_data(weight, "w.bin")
    weight.external_data.add(key="prepacked_0", value="blob|0;64")
    path = tmp_path / "m.onnx"
    for nodes, weights in (([compiled], []), ([], [weight])):
        graph = onnx.helper.make_graph(nodes, "g", [], [], weights)
        path.write_bytes(onnx.helper.make_model(graph).SerializeToString())
        with pytest.raises(ValueError, match="not allowed"):
            list_external_files(path)


def get_table_error(folder: Path, attribute: str) -> str:
    """Return the error of reading a table: `code_embeddings` or `neighbor_table` of the bundle."""
    change_manifest(folder)
    message = str(catch_error(BundleError, lambda: getattr(open_bundle(folder), attribute)()))
    assert "\n" not in message
    return message


EMBEDDINGS_WITH_NAN = np.zeros((CODES, WIDTH), np.float32)
EMBEDDINGS_WITH_NAN[3, 3] = np.nan
NOT_AN_ARRAY = "without pickled objects"


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (np.zeros((CODES, WIDTH + 1), np.float32), r"float32 \[32, 9\], expected float32 or float16 \[32, 8\]"),
        (np.zeros((CODES, WIDTH)), "float64"),
        (EMBEDDINGS_WITH_NAN, "found NaN or infinity"),
        (np.full((CODES, WIDTH), None, object), NOT_AN_ARRAY),
        (pickle.dumps([1]), NOT_AN_ARRAY),
        (b"", NOT_AN_ARRAY),
        (b"\x93NUMPY\x01\x00\x10\x00{'descr': oops}\n", NOT_AN_ARRAY),
    ],
)
def test_an_invalid_table_of_embeddings_is_rejected(folder: Path, table: np.ndarray | bytes, expected: str) -> None:
    path = folder / "code_embeddings.npy"
    if isinstance(table, bytes):
        path.write_bytes(table)
    else:
        np.save(path, table, allow_pickle=True)
    assert re.search(expected, get_table_error(folder, "code_embeddings"))


def test_an_invalid_neighbor_table_is_rejected(folder: Path) -> None:
    with np.load(folder / "neighbors.npz") as archive:
        indices = archive["indices"]
    out_of_range = indices.copy()
    self_neighbor = indices.copy()
    out_of_range[2, 1] = CODES
    self_neighbor[7, 0] = 7
    tables: list[tuple[Any, str]] = [
        (indices[:, :4], "uint8 [32, 4]"),
        (indices.astype(np.int64), "int64"),
        (out_of_range, "found index 32, expected 0 .. 31"),
        (self_neighbor, "found code 7 among its own neighbours"),
        (np.full((CODES, NUM_NEIGHBORS), None, object), "`indices`"),
    ]
    for table, expected in tables:
        np.savez_compressed(folder / "neighbors.npz", indices=table, allow_pickle=True)
        assert expected in get_table_error(folder, "neighbor_table")
    np.savez(folder / "neighbors.npz", indices=np.asfortranarray(indices))
    change_manifest(folder)
    np.testing.assert_array_equal(open_bundle(folder).neighbor_table, indices)


def test_a_neighbor_file_that_is_too_large_is_rejected(folder: Path) -> None:
    path = folder / "neighbors.npz"
    path.write_bytes(pickle.dumps({"indices": 1}))
    assert "expected a NumPy archive" in get_table_error(folder, "neighbor_table")
    for data, expected in ((b"junk", "expected a NumPy archive"), (bytes(10_000_000), "10,000,000 bytes unpacked")):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("indices.npy", data)
        assert expected in get_table_error(folder, "neighbor_table")


def test_reading_neighbors_of_a_bundle_without_any_is_an_error(folder: Path) -> None:
    manifest = read_manifest(folder)
    manifest["neighbors"] = 0
    del manifest["files"]["neighbors"]
    write_bundle_manifest(folder, manifest)
    with pytest.raises(BundleError, match="has no neighbour table"):
        _ = open_bundle(folder).neighbor_table
    with pytest.raises(BundleError, match="no file `neighbors`, expected one of code_embeddings, condition"):
        open_bundle(folder).path("neighbors")
