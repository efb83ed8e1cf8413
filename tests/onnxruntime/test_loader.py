"""A small bundle with exported graphs: opening, loading, running."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import error_of, expects_error
from tiny_graphs import TINY, ClassTable, TinyImageDecoder, export, tiny_drafter

from lantern_rt import Pipeline
from lantern_rt.bundle.files import open_bundle
from lantern_rt.engines.contracts import TensorSpec
from lantern_rt.engines.graph_writer import GraphWriter
from lantern_rt.engines.loader import BundleEngines
from lantern_rt.errors import BundleError, EngineError
from lantern_rt.export.graph.graphs import make_target_graph, write_graph
from lantern_rt.export.models.decoder import Decoder
from lantern_rt.export.models.eagle import make_drafter_graph

SINGLE_THREAD = 1
SIZES = {
    "hidden_size": TINY.hidden_size,
    "num_layers": TINY.num_layers,
    "num_kv_heads": TINY.num_kv_heads,
    "head_dim": TINY.head_dim,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a class-conditional bundle with a drafter."""
    folder = tmp_path_factory.mktemp("bundle")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    write_graph(make_target_graph(Decoder(TINY), torch.zeros(1, TINY.hidden_size)), folder)
    write_graph(make_drafter_graph(tiny_drafter()), folder)
    ids = torch.zeros(2, dtype=torch.int64)
    outputs = ["prefix_embeds", "uncond_embeds"]
    free = {name: {0: "rows"} for name in ["class_ids", *outputs]}
    export(ClassTable(10, TINY.prefix, TINY.hidden_size), {"class_ids": ids}, outputs, free, folder / "condition.onnx")
    codes = torch.zeros(2, TINY.grid**2, dtype=torch.int64)
    free = {"codes": {0: "rows"}, "images": {0: "rows"}}
    export(TinyImageDecoder(TINY.vocab_size, TINY.grid), {"codes": codes}, ["images"], free, folder / "vq_decoder.onnx")
    table = np.random.default_rng(0).normal(size=(TINY.vocab_size, TINY.hidden_size)).astype(np.float32)
    np.save(folder / "code_embeddings.npy", table)
    names = {role: f"{role}.onnx" for role in ("target", "drafter", "condition", "vq_decoder")}
    names["code_embeddings"] = "code_embeddings.npy"
    manifest: dict[str, Any] = {
        "format_version": "3.6",
        "name": "tiny",
        "family": "test",
        "grid_rows": TINY.grid,
        "grid_columns": TINY.grid,
        "codebook_size": TINY.vocab_size,
        "image_height": 2 * TINY.grid,
        "image_width": 2 * TINY.grid,
        "target": SIZES | {"vocab_size": TINY.vocab_size, "max_positions": TINY.num_rope_positions},
        "drafter": SIZES | {"vocab_size": TINY.vocab_size},
        "condition": {"kind": "class", "prefix": TINY.prefix, "classes": 10},
        "sampling": {},
        "decoding": {},
        "files": {},
        "provenance": {"exporter": "test", "licence": "Apache-2.0"},
    }
    for role, name in names.items():
        data = (folder / name).read_bytes()
        manifest["files"][role] = {"path": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "bundle.json").write_text(json.dumps(manifest))
    return folder


def test_every_graph_of_a_bundle_loads_and_runs(folder: Path) -> None:
    engines = BundleEngines(open_bundle(folder), SINGLE_THREAD)
    prefix, uncond = engines.compute_condition({"class_ids": np.array([3, 4, 3])})
    assert prefix.shape == uncond.shape == (3, TINY.prefix, TINY.hidden_size)
    assert np.array_equal(prefix[0], prefix[2])
    assert np.array_equal(uncond[0], uncond[1])
    images = engines.decode_images(np.zeros((2, 64), np.int64))
    assert images.shape == (2, 3, 16, 16)
    assert images.dtype == np.float32
    assert engines.drafter is engines.drafter
    assert engines.target.new_cache(2, 5).lengths.tolist() == [0, 0]


def test_the_drafter_is_loaded_when_first_needed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "bundle"))
    bundle = open_bundle(copy)
    (copy / "drafter.onnx").unlink()
    engines = BundleEngines(bundle, SINGLE_THREAD)
    with expects_error(BundleError, "drafter.onnx"):
        engines.load_all()
    monkeypatch.setattr(type(bundle), "path", lambda _self, role: folder / "target.onnx")
    assert error_of(BundleError, BundleEngines, bundle, SINGLE_THREAD).field.endswith("input `class_ids`")


def test_a_damaged_image_decoder_is_detected_on_loading(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "bundle"))
    shutil.copy(copy / "condition.onnx", copy / "vq_decoder.onnx")
    manifest = json.loads((copy / "bundle.json").read_text())
    manifest["files"]["vq_decoder"] = manifest["files"]["condition"] | {"path": "vq_decoder.onnx"}
    (copy / "bundle.json").write_text(json.dumps(manifest))
    error = error_of(BundleError, Pipeline.from_bundle, copy, threads=SINGLE_THREAD)
    assert error.field == f"{copy / 'vq_decoder.onnx'}: input `codes`"


@pytest.mark.parametrize("channels", [3, 4])
def test_an_image_encoder_must_accept_images_of_three_channels(folder: Path, tmp_path: Path, channels: int) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "bundle"))
    graph = GraphWriter()
    codes = graph.op(
        "Slice",
        graph.reshape("images", 0, -1),
        graph.int_vector(0),
        graph.int_vector(TINY.grid**2),
        graph.int_vector(1),
    )
    graph.op("Cast", codes, name="codes", to=7)
    image_tensor = TensorSpec("images", ("float32",), ("rows", channels, 2 * TINY.grid, 2 * TINY.grid))
    data = graph.to_bytes([image_tensor], [TensorSpec("codes", ("int64",), ("rows", TINY.grid**2))])
    (copy / "vq_encoder.onnx").write_bytes(data)
    manifest = json.loads((copy / "bundle.json").read_text())
    entry = {"path": "vq_encoder.onnx", "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest["files"]["vq_encoder"] = entry
    (copy / "bundle.json").write_text(json.dumps(manifest))
    engines = BundleEngines(open_bundle(copy), SINGLE_THREAD)
    image = np.full((1, channels, 16, 16), 5, np.float32)
    if channels == 3:
        assert (engines.encode_images(image) == 5).all()
    else:
        with expects_error(BundleError, "input `images`"):
            engines.encode_images(image)


def test_codes_outside_the_codebook_are_one_line(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with expects_error(EngineError, "failed to run the graph"):
        BundleEngines(open_bundle(folder), SINGLE_THREAD).decode_images(np.full((1, 64), 999))
    assert capfd.readouterr() == ("", "")
