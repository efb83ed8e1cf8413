"""A bundle folder whose graphs are stubs: everything `open_bundle` looks at, nothing that computes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

CODES, WIDTH, K = 16, 8, 5
ZEROS = "0" * 64


def stub_graph(location: str | None = None) -> bytes:
    """The bytes of an ONNX model with one initializer, kept in the file `location` if given."""
    tensor = _field(8, b"w")
    if location is not None:
        tensor += _field(13, _field(1, b"location") + _field(2, location.encode()))
    return b"\x08\x0a" + _field(7, _field(2, b"g") + _field(5, tensor))


def _field(number: int, payload: bytes) -> bytes:
    assert len(payload) < 128
    return bytes([number << 3 | 2, len(payload)]) + payload


def neighbor_table() -> dict[str, np.ndarray]:
    line = np.random.default_rng(0).normal(size=CODES)
    distance = np.abs(line[:, None] - line)
    np.fill_diagonal(distance, np.inf)
    indices = distance.argsort(1)[:, :K]
    return {
        "indices": indices.astype(np.uint8),
        "distances": np.take_along_axis(distance, indices, 1).astype(np.float16),
    }


def make_bundle(folder: Path) -> Path:
    """Write a valid bundle into `folder`."""
    folder.mkdir(parents=True)
    for role in ("target", "vq_decoder", "condition", "drafter"):
        (folder / f"{role}.onnx").write_bytes(stub_graph("target.onnx.data" if role == "target" else None))
    (folder / "target.onnx.data").write_bytes(bytes(64))
    np.save(folder / "code_embeddings.npy", np.random.default_rng(1).normal(size=(CODES, WIDTH)).astype(np.float32))
    np.savez_compressed(folder / "neighbors.npz", **neighbor_table())
    sizes = {"hidden_size": WIDTH, "num_layers": 1, "num_kv_heads": 1, "head_dim": 4, "vocab_size": CODES}
    files = {
        "target": "target.onnx",
        "target.data": "target.onnx.data",
        "vq_decoder": "vq_decoder.onnx",
        "condition": "condition.onnx",
        "drafter": "drafter.onnx",
        "code_embeddings": "code_embeddings.npy",
        "neighbors": "neighbors.npz",
    }
    manifest = {
        "format_version": "3.0",
        "name": "tiny",
        "family": "test",
        "grid_rows": 4,
        "grid_columns": 4,
        "codebook_size": CODES,
        "image_height": 16,
        "image_width": 16,
        "neighbors": K,
        "target": sizes | {"max_positions": 32},
        "drafter": sizes,
        "condition": {"kind": "class", "prefix": 1, "classes": 10},
        "sampling": {"cfg_scale": 4.0},
        "decoding": {
            "method": "lantern",
            "methods": [{"method": "lantern", "tree": "dynamic", "neighbors": K, "delta": 0.1}],
        },
        "files": {role: {"path": name, "sha256": ZEROS, "bytes": 0} for role, name in files.items()},
        "provenance": {
            "exporter": "test 1",
            "sources": [{"role": "target", "name": "w.pt", "sha256": ZEROS}],
            "licence": "Apache-2.0",
        },
    }
    write_manifest(folder, manifest)
    return folder


def read_manifest(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / "bundle.json").read_text())
    return manifest


def write_manifest(folder: Path, manifest: dict[str, Any], rehash: bool = True) -> None:
    """Write `bundle.json`, with the sizes and hashes of the files as they now are."""
    for entry in manifest["files"].values() if rehash else ():
        data = (folder / entry["path"]).read_bytes()
        entry.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    (folder / "bundle.json").write_text(json.dumps(manifest, indent=2))
