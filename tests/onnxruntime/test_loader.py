"""Loading and running every graph of a small bundle, and bundles with wrong graphs."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import catch_error, expect_error
from tiny_graphs import TINY_CONFIG, ClassEmbedding, TinyImageDecoder, export_graph, make_tiny_drafter, write_graph

from lantern_rt import Pipeline
from lantern_rt.bundle.files import open_bundle
from lantern_rt.bundle.manifest import FORMAT_VERSION
from lantern_rt.engines.contracts import TensorSpec
from lantern_rt.engines.graph_writer import GraphWriter
from lantern_rt.engines.loader import BundleEngines
from lantern_rt.errors import BundleError, EngineError
from lantern_rt.export.graph.graphs import make_target_graph
from lantern_rt.export.models.decoder import Decoder
from lantern_rt.export.models.eagle import make_drafter_graph

SINGLE_THREAD = 1
DECODER_SIZES = {
    "hidden_size": TINY_CONFIG.hidden_size,
    "num_layers": TINY_CONFIG.num_layers,
    "num_kv_heads": TINY_CONFIG.num_kv_heads,
    "head_dim": TINY_CONFIG.head_dim,
    "architecture": TINY_CONFIG.architecture.model_dump(),
}


@pytest.fixture(scope="module")
def bundle_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    bundle_folder = tmp_path_factory.mktemp("bundle")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    write_graph(make_target_graph(Decoder(TINY_CONFIG), torch.zeros(1, TINY_CONFIG.hidden_size)), bundle_folder)
    write_graph(make_drafter_graph(make_tiny_drafter()), bundle_folder)
    ids = torch.zeros(2, dtype=torch.int64)
    outputs = ["prefix_embeds", "uncond_embeds"]
    dynamic_axes = {name: {0: "rows"} for name in ["class_ids", *outputs]}
    export_graph(
        ClassEmbedding(10, TINY_CONFIG.prefix, TINY_CONFIG.hidden_size),
        {"class_ids": ids},
        outputs,
        dynamic_axes,
        bundle_folder / "condition.onnx",
    )
    codes = torch.zeros(2, TINY_CONFIG.grid**2, dtype=torch.int64)
    dynamic_axes = {"codes": {0: "rows"}, "images": {0: "rows"}}
    export_graph(
        TinyImageDecoder(TINY_CONFIG.vocab_size, TINY_CONFIG.grid),
        {"codes": codes},
        ["images"],
        dynamic_axes,
        bundle_folder / "vq_decoder.onnx",
    )
    table = np.random.default_rng(0).normal(size=(TINY_CONFIG.vocab_size, TINY_CONFIG.hidden_size)).astype(np.float32)
    np.save(bundle_folder / "code_embeddings.npy", table)
    file_names = {role: f"{role}.onnx" for role in ("target", "drafter", "condition", "vq_decoder")}
    file_names["code_embeddings"] = "code_embeddings.npy"
    manifest: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "name": "tiny",
        "family": "test",
        "grid_rows": TINY_CONFIG.grid,
        "grid_columns": TINY_CONFIG.grid,
        "codebook_size": TINY_CONFIG.vocab_size,
        "image_height": 2 * TINY_CONFIG.grid,
        "image_width": 2 * TINY_CONFIG.grid,
        "target": DECODER_SIZES
        | {"vocab_size": TINY_CONFIG.vocab_size, "max_positions": TINY_CONFIG.num_rope_positions},
        "drafter": DECODER_SIZES | {"vocab_size": TINY_CONFIG.vocab_size},
        "condition": {"kind": "class", "prefix": TINY_CONFIG.prefix, "classes": 10},
        "sampling": {},
        "decoding": {},
        "files": {},
        "provenance": {"exporter": "test", "licence": "Apache-2.0"},
    }
    for role, name in file_names.items():
        data = (bundle_folder / name).read_bytes()
        manifest["files"][role] = {"path": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (bundle_folder / "bundle.json").write_text(json.dumps(manifest))
    return bundle_folder


def test_every_graph_of_a_bundle_loads_and_runs(bundle_folder: Path) -> None:
    engines = BundleEngines(open_bundle(bundle_folder), SINGLE_THREAD)
    prefix, uncond_prefix = engines.compute_condition({"class_ids": np.array([3, 4, 3])})
    assert prefix.shape == uncond_prefix.shape == (3, TINY_CONFIG.prefix, TINY_CONFIG.hidden_size)
    assert np.array_equal(prefix[0], prefix[2])
    assert np.array_equal(uncond_prefix[0], uncond_prefix[1])
    images = engines.decode_images(np.zeros((2, 64), np.int64))
    assert images.shape == (2, 3, 16, 16)
    assert images.dtype == np.float32
    assert engines.drafter is engines.drafter
    assert engines.target.make_cache(2, 5).lengths.tolist() == [0, 0]


def test_the_drafter_of_a_bundle_is_loaded_at_the_first_use(
    bundle_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle_copy = Path(shutil.copytree(bundle_folder, tmp_path / "bundle"))
    bundle = open_bundle(bundle_copy)
    (bundle_copy / "drafter.onnx").unlink()
    engines = BundleEngines(bundle, SINGLE_THREAD)
    with expect_error(BundleError, "drafter.onnx"):
        engines.load_all()
    monkeypatch.setattr(type(bundle), "path", lambda _self, role: bundle_folder / "target.onnx")
    assert catch_error(BundleError, BundleEngines, bundle, SINGLE_THREAD).field.endswith("input `class_ids`")


def test_a_wrong_graph_as_image_decoder_is_detected_on_loading(bundle_folder: Path, tmp_path: Path) -> None:
    bundle_copy = Path(shutil.copytree(bundle_folder, tmp_path / "bundle"))
    shutil.copy(bundle_copy / "condition.onnx", bundle_copy / "vq_decoder.onnx")
    manifest = json.loads((bundle_copy / "bundle.json").read_text())
    manifest["files"]["vq_decoder"] = manifest["files"]["condition"] | {"path": "vq_decoder.onnx"}
    (bundle_copy / "bundle.json").write_text(json.dumps(manifest))
    error = catch_error(BundleError, Pipeline.from_bundle, bundle_copy, threads=SINGLE_THREAD)
    assert error.field == f"{bundle_copy / 'vq_decoder.onnx'}: input `codes`"


@pytest.mark.parametrize("channels", [3, 4])
def test_an_image_encoder_must_accept_images_of_three_channels(
    bundle_folder: Path, tmp_path: Path, channels: int
) -> None:
    bundle_copy = Path(shutil.copytree(bundle_folder, tmp_path / "bundle"))
    graph = GraphWriter()
    codes = graph.op(
        "Slice",
        graph.reshape("images", 0, -1),
        graph.int_vector(0),
        graph.int_vector(TINY_CONFIG.grid**2),
        graph.int_vector(1),
    )
    graph.op("Cast", codes, name="codes", to=7)
    image_tensor = TensorSpec("images", ("float32",), ("rows", channels, 2 * TINY_CONFIG.grid, 2 * TINY_CONFIG.grid))
    data = graph.to_bytes([image_tensor], [TensorSpec("codes", ("int64",), ("rows", TINY_CONFIG.grid**2))])
    (bundle_copy / "vq_encoder.onnx").write_bytes(data)
    manifest = json.loads((bundle_copy / "bundle.json").read_text())
    entry = {"path": "vq_encoder.onnx", "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest["files"]["vq_encoder"] = entry
    (bundle_copy / "bundle.json").write_text(json.dumps(manifest))
    engines = BundleEngines(open_bundle(bundle_copy), SINGLE_THREAD)
    image = np.full((1, channels, 16, 16), 5, np.float32)
    if channels == 3:
        assert (engines.encode_images(image) == 5).all()
    else:
        with expect_error(BundleError, "input `images`"):
            engines.encode_images(image)


def test_codes_outside_the_codebook_are_an_error(bundle_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with expect_error(EngineError, "failed to run the graph"):
        BundleEngines(open_bundle(bundle_folder), SINGLE_THREAD).decode_images(np.full((1, 64), 999))
    assert capfd.readouterr() == ("", "")
